import io

import numpy as np
import pytest
import torch
from PIL import Image

from gblr.data.pictures import Pictures
from gblr.data.streams import PictureBatches, random_part


@pytest.fixture
def pictures():
    """Ten pictures of one grey each, so that any part of one tells which it is."""
    encoded = []
    for i in range(10):
        buffer = io.BytesIO()
        Image.fromarray(np.full((20, 24, 3), 20 * i, np.uint8)).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    return Pictures(encoded, torch.arange(10))


def batches(pictures, train, **more):
    return PictureBatches(pictures, 4, train, (0.0,) * 3, (1.0,) * 3, size=14, **more)


def test_labels_stay_with_their_pictures_and_all_are_served_in_evaluation(pictures):
    found = list(batches(pictures, train=False))
    assert [len(y) for _, y in found] == [4, 4, 2] and found[0][0].shape == (4, 3, 14, 14)
    for x, y in found:
        torch.testing.assert_close(x.mean((1, 2, 3)) * 255, 20.0 * y, atol=0.5, rtol=0)


def test_epochs_are_shuffled_alike_for_a_seed_and_drop_the_rest(pictures):
    def order(epoch, seed=0):
        one = batches(pictures, train=True, seed=seed)
        one.set_epoch(epoch)
        assert len(one) == 2
        return [int(v) for x, y in one for v in y if x.shape == (4, 3, 14, 14)]

    assert order(0) == order(0) != order(1) and order(0) != order(0, seed=1)
    for x, y in batches(pictures, train=True):
        torch.testing.assert_close(x.mean((1, 2, 3)) * 255, 20.0 * y, atol=0.5, rtol=0)


def test_random_parts_lie_inside_and_half_are_mirrored():
    ramp = torch.arange(32.0).expand(200, 1, 32, 32)
    parts = random_part(ramp, 16, torch.Generator().manual_seed(0))
    assert parts.shape == (200, 1, 16, 16) and parts.min() >= 0 and parts.max() <= 31
    rising = (parts[:, 0, 0, -1] > parts[:, 0, 0, 0]).float().mean()
    assert 0.35 < rising < 0.65
    spans = (parts[:, 0, 0, -1] - parts[:, 0, 0, 0]).abs()
    assert spans.min() < 16 < spans.max()
