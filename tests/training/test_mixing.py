import random

import pytest
import torch

from gblr.training.mixing import Mix, draw_box, draw_mix, mix_inputs, mix_targets
from tests.helpers import assert_close

IMAGES = torch.arange(4.0)[:, None, None, None].expand(4, 3, 6, 8)
LABELS = torch.tensor([0, 1, 2, 2])


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_targets_are_probabilities_that_match_the_pixels(mixup, cutmix):
    rng = random.Random(0)
    for _ in range(50):
        mix = draw_mix(mixup, cutmix, 6, 8, rng)
        assert 0 <= mix.share <= 1
        targets = mix_targets(LABELS, 5, mix)
        assert_close(targets.sum(1), torch.ones(4))
        mixed = mix_inputs(IMAGES, mix)
        expected = mix.share * IMAGES.mean((1, 2, 3)) + (1 - mix.share) * IMAGES.flip(0).mean((1, 2, 3))
        assert_close(mixed.mean((1, 2, 3)), expected)  # a box holds as much of the partner as the label says


def test_labels_are_those_of_the_mirrored_sample():
    targets = mix_targets(LABELS, 3, Mix(0.75))
    assert_close(targets, torch.tensor([[0.75, 0, 0.25], [0, 0.75, 0.25], [0, 0.25, 0.75], [0.25, 0, 0.75]]))


def test_labels_may_be_probabilities_already():
    hot = torch.nn.functional.one_hot(LABELS, 3).float()
    assert_close(mix_targets(hot, 3, Mix(0.75)), mix_targets(LABELS, 3, Mix(0.75)))


def test_cutmix_changes_the_box_and_nothing_else():
    mixed = mix_inputs(IMAGES, Mix(0.5, box=(1, 4, 2, 7)))
    inside = torch.zeros(6, 8, dtype=torch.bool)
    inside[1:4, 2:7] = True
    assert torch.equal(mixed[..., inside], IMAGES.flip(0)[..., inside])
    assert torch.equal(mixed[..., ~inside], IMAGES[..., ~inside])
    assert IMAGES[0].max() == 0  # the original is untouched


def test_boxes_lie_in_the_image_and_have_the_asked_area_where_the_border_does_not_cut():
    rng = random.Random(1)
    for _ in range(200):
        share = rng.random()
        top, bottom, left, right = draw_box(share, 32, 64, rng)
        assert 0 <= top <= bottom <= 32 and 0 <= left <= right <= 64
        side = (1 - share) ** 0.5
        assert bottom - top <= 32 * side and right - left <= 64 * side
        if 0 < top and bottom < 32:
            assert bottom - top == int(32 * side) // 2 * 2


def test_the_share_counts_the_box_after_the_border_has_cut_it():
    rng = random.Random(2)
    mixes = [draw_mix(0.0, 1.0, 6, 8, rng) for _ in range(100)]
    for mix in mixes:
        top, bottom, left, right = mix.box
        assert mix.share == pytest.approx(1 - (bottom - top) * (right - left) / 48)


def test_both_ways_take_turns_and_one_alone_is_always_taken():
    rng = random.Random(3)
    boxes = [draw_mix(0.8, 1.0, 6, 8, rng).box is not None for _ in range(400)]
    assert 0.4 < sum(boxes) / 400 < 0.6
    assert all(draw_mix(0.8, 0.0, 6, 8, rng).box is None for _ in range(20))
    assert all(draw_mix(0.0, 0.8, 6, 8, rng).box is not None for _ in range(20))


def test_half_precision_images_stay_what_they_are():
    for mix in (Mix(0.3), Mix(0.5, (0, 3, 0, 8))):
        assert mix_inputs(IMAGES.bfloat16(), mix).dtype == torch.bfloat16
