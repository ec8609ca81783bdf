import pytest
import torch
from torch import nn

import gblr
from gblr.models.vit import ViT

SMALL = {"image_size": 8, "patch_size": 4, "in_channels": 1, "width": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def test_scores_of_an_image_do_not_depend_on_the_rest_of_the_batch():
    torch.manual_seed(0)
    model, images = ViT(**SMALL).eval(), torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(model(images)[2:3], model(images[2:3]))


def test_every_parameter_matters():
    torch.manual_seed(0)
    model = ViT(**SMALL)
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    # softmax forgets a constant, so the bias of the keys has no effect by its nature
    assert all(bool((p.grad != 0).any()) for name, p in model.named_parameters() if "key.bias" not in name)


def test_the_order_of_patches_matters():
    torch.manual_seed(0)
    model, image = ViT(**SMALL), torch.randn(1, 1, 8, 8)
    assert not torch.allclose(model(image), model(image.roll(4, dims=-1)), atol=1e-3)


def test_its_projections_convert_and_count_by_type():
    model = ViT(**SMALL)
    gblr.convert_(model, gblr.GaudiConfig(1.0, init="scratch"))
    assert not any(type(m) is nn.Linear for name, m in model.named_modules() if "head" not in name)
    assert {"q", "k", "v", "fc1", "fc2"} <= set(gblr.cost(model, torch.zeros(1, 1, 8, 8)).by_type())


@pytest.mark.parametrize("wrong", [{"patch_size": 3}, {"num_heads": 3}])
def test_sizes_that_do_not_divide_are_refused(wrong):
    with pytest.raises(ValueError, match="must divide"):
        ViT(**SMALL | wrong)
