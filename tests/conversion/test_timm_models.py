"""timm's models, where timm is installed: it comes with torchvision, which may not be at home beside this torch."""

import importlib.util

import pytest
import torch
from torch import nn

from gblr.conversion.convert import convert_
from gblr.models.timm_models import import_timm
from tests.conversion.low_rank_models import LOSSLESS, assert_same, make_low_rank_

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_classes": 5}


@needs_timm
@pytest.mark.parametrize("kind", ["vit", "mixer"])
def test_timm_models(kind):
    import_timm()
    from timm.models.mlp_mixer import MlpMixer
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(depth=2, num_heads=2, **SIZES) if kind == "vit" else MlpMixer(num_blocks=2, **SIZES)
    nn.init.normal_(model.head.weight)  # the mixer's is zero, and all its scores with it
    model = make_low_rank_(model.eval())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        report = convert_(model, LOSSLESS[0])
        assert "head" not in report and len(report) == 2 * 4
        assert_same(model(images), expected)


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_the_error_says_how_to_get_it():
    with pytest.raises(ModuleNotFoundError, match=r"pip install -c constraints.txt 'gblr\[timm\]'"):
        import_timm()
