import pytest
import torch

from gblr.models.mixer import Mixer


def test_the_authors_mixer_has_its_layers():
    model = Mixer(depth=1)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("fc1.weight")}
    assert shapes == {"blocks.0.tokens.fc1.weight": (256, 64), "blocks.0.channels.fc1.weight": (2048, 512)}
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_every_patch_reaches_the_scores():
    model = Mixer(image_size=8, patch_size=4, width=8, depth=1)
    x = torch.randn(1, 3, 8, 8, requires_grad=True)
    model(x).sum().backward()
    assert (x.grad.abs().amax(1) > 0).all()


def test_patches_must_fit():
    with pytest.raises(ValueError, match="divide"):
        Mixer(image_size=9)
