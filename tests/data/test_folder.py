import numpy as np
import pytest
from PIL import Image

from gblr.data.folder import read_image_folder
from gblr.data.pictures import Pictures
from tests.data.tiny_files import pixels, png, write_images


def read(pictures, **options):
    sized = Pictures(pictures.encoded, pictures.labels, **({"size": (8, 8)} | options))
    return sized[list(range(len(sized)))]


def test_class_folders_are_numbered_by_name(tmp_path):
    write_images(tmp_path, 2)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    found = read_image_folder(tmp_path)
    assert found.classes == ("bird", "cat", "dog") and found.test is None
    images, labels = read(found.train)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert images[:, 0, 0, 0].tolist() == [0, 1, 50, 51, 100, 101]
    assert np.array_equal(images[3].permute(1, 2, 0).numpy(), pixels(51))


def test_train_and_val_folders_are_kept_apart(tmp_path):
    write_images(tmp_path / "train", 3)
    write_images(tmp_path / "val", 1, classes=("bird", "dog"))
    found = read_image_folder(tmp_path)
    assert len(found.train) == 9 and found.test.labels.tolist() == [0, 2]


def test_a_test_part_without_classes_gives_way(tmp_path):
    write_images(tmp_path / "train", 3)
    write_images(tmp_path / "test", 2, classes=())
    with pytest.raises(FileNotFoundError, match=r"no images in class folders in .*test: expected one subfolder"):
        read_image_folder(tmp_path)
    write_images(tmp_path / "val", 1)
    assert read_image_folder(tmp_path).test.labels.tolist() == [0, 1, 2]


def test_the_models_own_order_of_classes_counts(tmp_path):
    write_images(tmp_path, 1)
    assert read_image_folder(tmp_path, ("dog", "cat", "fish", "bird")).train.labels.tolist() == [3, 1, 0]
    assert read_image_folder(tmp_path, ("dog", "wolf")).train.labels.tolist() == [0, 1, 2]


def test_a_class_may_be_called_train(tmp_path):
    write_images(tmp_path, 2, classes=("bus", "train", "tram"))
    found = read_image_folder(tmp_path)
    assert found.classes == ("bus", "train", "tram") and len(found.train) == 6 and found.test is None


def test_hidden_files_are_no_images(tmp_path):
    write_images(tmp_path, 2)
    (tmp_path / "cat" / "._0.png").write_bytes(b"what macOS writes on foreign disks")
    assert len(read_image_folder(tmp_path).train) == 6


def test_images_without_classes(tmp_path):
    write_images(tmp_path / "train", 4, classes=())
    write_images(tmp_path / "test", 2, classes=())
    found = read_image_folder(tmp_path)
    assert found.classes == () and len(found.train) == 4 and len(found.test) == 2


def test_a_class_that_training_lacks_is_refused(tmp_path):
    write_images(tmp_path / "train", 1)
    write_images(tmp_path / "test", 1, classes=("fish",))
    with pytest.raises(ValueError, match=r"fish is a class .* \(bird, cat, dog\)"):
        read_image_folder(tmp_path)


def test_a_folder_without_images_says_what_it_should_hold(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected class/name.png"):
        read_image_folder(tmp_path)


def test_images_are_scaled_and_their_middle_is_kept(tmp_path):
    (tmp_path / "wide.png").write_bytes(png(200, size=(16, 32)))
    (tmp_path / "same.png").write_bytes(png(100))
    found = read_image_folder(tmp_path).train
    assert found.original_size(1) == (16, 32)
    same, wide = read(found)[0]
    assert np.array_equal(same.permute(1, 2, 0).numpy(), pixels(100))
    middle = pixels(200, size=(16, 32))[:, 8:24, 1].mean()
    assert abs(float(wide[1].float().mean()) - middle) < 3 and wide[0].eq(200).all()
    narrow = read(found, crop_share=0.5)[0][1, 1]
    assert narrow.min() > wide[1].min() and narrow.max() < wide[1].max()


def test_images_of_any_size_are_fitted(tmp_path):
    """29 / 7 * 7 is above 29 in floating point: a box that begins before the image."""
    (tmp_path / "wide.png").write_bytes(png(9, (29, 39)))
    (tmp_path / "high.png").write_bytes(png(9, (464, 232)))
    for size in ((7, 7), (224, 224), (37, 51)):
        assert read(read_image_folder(tmp_path).train, size=size)[0].shape == (2, 3, *size)


def test_grey_of_16_bits_keeps_its_brightness(tmp_path):
    levels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 257 * 4
    Image.fromarray(levels).save(tmp_path / "deep.png")
    assert np.array_equal(read(read_image_folder(tmp_path).train, channels=1)[0][0, 0].numpy(), levels // 257)


def test_grey_images_and_colours_become_what_the_model_takes(tmp_path):
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "grey.png")
    found = read_image_folder(tmp_path).train
    assert read(found)[0].shape == (1, 3, 8, 8) and read(found)[0].eq(7).all()
    assert read(found, channels=1)[0].shape == (1, 1, 8, 8)


def test_a_damaged_image_is_named(tmp_path):
    write_images(tmp_path, 1)
    (tmp_path / "cat" / "0.png").write_bytes(png(1)[:60])
    with pytest.raises(OSError, match=r"cat/0.png cannot be read: .* take it out of the data"):
        read(read_image_folder(tmp_path).train)
