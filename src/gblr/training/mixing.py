"""Mixup and cutmix: each image blended with the one at the mirrored place of its batch, and its label with it."""

import random
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

Box = tuple[int, int, int, int]  # top, bottom, left, right


@dataclass(frozen=True)
class Mix:
    """`share` is what an image keeps of itself; the rest is its partner's, everywhere or inside of `box`."""

    share: float
    box: Box | None = None


def draw_mix(mixup: float, cutmix: float, height: int, width: int, rng: random.Random) -> Mix:
    """Shares follow Beta(alpha, alpha); with both alphas above 0, either way has probability 1/2 (as timm's Mixup)."""
    cut = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
    alpha = cutmix if cut else mixup
    share = rng.betavariate(alpha, alpha)
    if not cut:
        return Mix(share)
    box = draw_box(share, height, width, rng)
    area = (box[1] - box[0]) * (box[3] - box[2])
    return Mix(1 - area / (height * width), box)  # what the border cut off stays the image's own


def draw_box(share: float, height: int, width: int, rng: random.Random) -> Box:
    """A box of the image's proportions and 1 - share of its area, around a uniform centre, cut at the border."""
    side = (1 - share) ** 0.5
    bounds: list[int] = []
    for length in (height, width):
        half, centre = int(length * side) // 2, rng.randrange(length)
        bounds += [max(0, centre - half), min(length, centre + half)]
    return bounds[0], bounds[1], bounds[2], bounds[3]


def mix_inputs(x: Float[Tensor, "*x"], mix: Mix) -> Float[Tensor, "*x"]:
    partner = x.flip(0)
    if mix.box is None:
        return mix.share * x + (1 - mix.share) * partner
    top, bottom, left, right = mix.box
    mixed = x.clone()
    mixed[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
    return mixed


def mix_targets(
    labels: Int[Tensor, " b"] | Float[Tensor, "b classes"], num_classes: int, mix: Mix
) -> Float[Tensor, "b classes"]:
    """Probabilities of the classes, which add up to 1; labels may be such themselves."""
    hot = labels if labels.is_floating_point() else functional.one_hot(labels.long(), num_classes).float()
    return mix.share * hot + (1 - mix.share) * hot.flip(0)
