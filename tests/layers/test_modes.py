"""Modes are put back module by module, in a way that hardened layers notice."""

import pytest
import torch
from torch import nn

from gblr.conversion.measure import undisturbed
from gblr.layers.modes import modes_of, restore_modes
from tests.layers.packed_layers import each_form, packed_linear
from tests.shape_hook import shapes_unchecked


def test_every_module_gets_its_own_mode_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[1].eval()
    model[1][1].train()
    modes = modes_of(model)
    model.eval()
    restore_modes(modes)
    assert [module.training for module in model.modules()] == [True, True, False, False, True]


@each_form
@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_model_is_evaluated_as_it_is_now_every_time(form, fused, generator):
    """A graph sees no changes of contents but those that the switch to evaluation tells; the second one told none."""
    layer, x = packed_linear(form).train(), torch.randn(3, 20, generator=generator)
    compiled = torch.compile(nn.Sequential(layer), backend="eager")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=fused)
    with shapes_unchecked():
        for _ in range(3):
            optimizer.zero_grad()
            (compiled(x) - 1).square().mean().backward()
            optimizer.step()
            with undisturbed(compiled):
                found = compiled(x)
            expected = x @ layer.matrix.to_dense().T + layer.bias
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
