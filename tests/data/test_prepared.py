import pytest
import torch

from gblr.data.images import ImageSet
from gblr.data.prepared import PreparedImages, channel_statistics, fitted
from gblr.training.loop import train
from gblr.training.train_config import TrainConfig
from tests.helpers import assert_close


def images(n=6, c=3, size=8):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, c, size, size), dtype=torch.uint8, generator=generator)
    return ImageSet(pixels, torch.arange(n) % 3)


def test_pixels_are_normalised_when_read():
    data = images()
    mean, std = channel_statistics(data.images)
    x = PreparedImages(data, mean, std).inputs(range(6))
    assert_close(x.mean((0, 2, 3)), torch.zeros(3))
    assert_close(x.std((0, 2, 3)), torch.ones(3))
    one, label = PreparedImages(data, (0.5,), (0.5,))[4]
    assert label == 1
    assert_close(one, data.images[4] / 127.5 - 1)


def test_floats_are_taken_as_0_to_1_and_cast_to_the_models_dtype():
    data = ImageSet(torch.full((2, 1, 4, 4), 0.75), torch.zeros(2, dtype=torch.long))
    x = PreparedImages(data, (0.5,), (0.25,), dtype=torch.bfloat16).inputs([0])
    assert x.dtype == torch.bfloat16 and x.eq(1).all()


def test_augmentation_is_for_training_alone_and_follows_the_seed():
    prepared = PreparedImages(images(), (0.0,), (1.0,), pad=2, flip=True)
    reads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        reads.append(prepared.labelled(range(6))[0])
    assert torch.equal(reads[0], reads[1]) and not torch.equal(reads[0], reads[2])
    assert torch.equal(prepared.inputs(range(6)), PreparedImages(prepared.data, (0.0,), (1.0,)).labelled(range(6))[0])


def test_images_are_fitted_to_the_model():
    data = images(c=1)
    assert fitted(data, None, None).images is data.images
    large = fitted(data, 16, 3)
    assert large.images.shape == (6, 3, 16, 16) and large.images.dtype == torch.uint8
    assert torch.equal(large.images[:, 0], large.images[:, 2])
    flat = ImageSet(torch.full((1, 3, 9, 9), 77, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    assert fitted(flat, 4, 1).images.eq(77).all()
    with pytest.raises(ValueError, match="3 channels cannot become images of 4"):
        fitted(flat, None, 4)


def test_gblr_trains_on_them():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    prepared = PreparedImages(images(12), (0.5,), (0.5,), pad=1, flip=True)
    result = train(model, prepared, prepared, TrainConfig(epochs=2, batch_size=4))
    assert len(result.history) == 2 and "accuracy" in result.history[0]
