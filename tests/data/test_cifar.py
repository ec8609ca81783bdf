import hashlib
import io
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from gblr.data import cifar
from gblr.data.cifar import load_cifar10, load_cifar100

TEST_PIXELS = "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"  # sha256 of the published test set


@pytest.fixture
def few(monkeypatch):
    """Twelve training and four test images stand for the whole."""
    monkeypatch.setattr(cifar, "_SIZES", {"train": 12, "test": 4})
    generator = np.random.default_rng(0)
    return {split: generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for split, n in cifar._SIZES.items()}


def encoded(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def write_npz(folder, name, images):
    parts = [encoded(image) for image in images]
    ends = np.cumsum([0] + [len(part) for part in parts])
    np.savez(folder / name, data=np.frombuffer(b"".join(parts), np.uint8), off=ends, y=np.arange(len(images)) % 10)


def assert_same(found, images):
    assert np.array_equal(found.images.permute(0, 2, 3, 1).numpy(), images)
    assert found.labels.tolist() == [i % 10 for i in range(len(images))]


def test_encoded_images_come_back_in_order_from_several_files(few, tmp_path):
    write_npz(tmp_path, "train-0.npz", few["train"])
    write_npz(tmp_path, "test-0.npz", few["test"])
    train, test = load_cifar10(tmp_path)
    assert_same(train, few["train"])
    assert_same(test, few["test"])


def test_the_original_batches_are_read(few, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "_SIZES", {"train": 20, "test": 4})
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        data = few["test"].transpose(0, 3, 1, 2).reshape(4, -1)
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": [0, 1, 2, 3]}, protocol=2))
    train, test = load_cifar10(tmp_path)
    assert len(train) == 20
    assert_same(test, few["test"])


def test_a_batch_that_holds_anything_but_arrays_is_refused(few, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": os.getcwd}))
    with pytest.raises(pickle.UnpicklingError, match="unexpected"):
        load_cifar10(tmp_path)


def test_a_missing_shard_is_noticed(few, tmp_path):
    write_npz(tmp_path, "train-0.npz", few["train"][:7])
    write_npz(tmp_path, "test-0.npz", few["test"])
    with pytest.raises(ValueError, match="12 train images; found 7"):
        load_cifar10(tmp_path)


def test_an_empty_folder_says_what_it_should_hold(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-\*.parquet"):
        load_cifar10(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("GBLR_DATA" not in os.environ, reason="set GBLR_DATA to a folder with cifar10/")
def test_the_real_test_set_has_the_published_pixels():
    _, test = load_cifar10(os.environ["GBLR_DATA"])
    pixels = test.images.permute(0, 2, 3, 1).contiguous().numpy().tobytes()
    assert hashlib.sha256(pixels).hexdigest() == TEST_PIXELS


def test_cifar_100_is_read_from_its_python_files(few, tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for split, images in few.items():
        labels = [i % 10 for i in range(len(images))]
        content = {b"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), b"fine_labels": labels}
        (folder / split).write_bytes(pickle.dumps(content))
    train, test = load_cifar100(tmp_path)
    assert_same(train, few["train"])
    assert_same(test, few["test"])
    with pytest.raises(FileNotFoundError, match="CIFAR-100"):
        load_cifar100(tmp_path / "nowhere")
