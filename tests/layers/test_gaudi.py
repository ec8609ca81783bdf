import copy
import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils.checkpoint import checkpoint

import gblr
from gblr.layers.gaudi import MASK_THRESHOLD, GaudiLinear
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure
from gblr.ops.masks import gaudi_mask
from tests.helpers import assert_close, compiled, raises_value_error
from tests.layers.gaudi_layers import STRUCTURE, aligned_blocks, random_gaudi, three_blocks
from tests.shape_hook import shapes_unchecked

FEW, MANY = 1, 500  # positions for which factors are chained, and for which W is composed


def dense_weight(layer: GaudiLinear) -> torch.Tensor:
    """W by its definition (Eq. 7), from masks of `gaudi_mask`."""
    with torch.no_grad():
        masks = []
        for axis, length in enumerate((layer.out_features, layer.in_features)):
            width, location = layer.width_frac[axis].double() * length, layer.location_frac[axis].double() * length
            if layer.rounding:
                width, location = width.round(), location.round()
            masks.append(gaudi_mask(width, location, float(layer.sigma), length)[:, None])
        u, v = layer.u.double() * masks[0], layer.v.double() * masks[1]
        return torch.einsum("kro,kri->oi", u, v)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual.float() - expected).norm() / expected.norm()).detach())


def structure_dtypes(layer: GaudiLinear) -> set[torch.dtype]:
    return {getattr(layer, name).dtype for name in STRUCTURE}


@pytest.mark.parametrize("positions", [FEW, MANY])
@pytest.mark.parametrize("sigma", [3.0, math.inf])
@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("block_rank", [1, 3])
def test_forward_is_the_product_with_the_masked_weight(positions, sigma, rounding, block_rank, generator):
    layer = random_gaudi(sigma=sigma, rounding=rounding, block_rank=block_rank)
    assert layer.composes(positions) == (positions == MANY)
    x = torch.randn(positions, 12, generator=generator)
    expected = x.double() @ dense_weight(layer).T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_the_route_with_fewer_multiplications_is_taken():
    layer = GaudiLinear(24, 40, block_rank=2, num_blocks=9)
    for positions in range(1, 200):
        compose = 18 * 24 * 40 + positions * 24 * 40
        chain = positions * 18 * (24 + 40)
        assert layer.composes(positions) == (compose <= chain), positions
    thin = GaudiLinear(24, 40, num_blocks=3)
    assert not thin.composes(10**9)  # rank 3 is cheaper for any number of positions


@pytest.mark.parametrize("num_blocks", [2, 12])
def test_the_number_of_multiplications_done_is_that_of_the_cheaper_route(num_blocks):
    from torch.utils.flop_counter import FlopCounterMode

    layer = random_gaudi(num_blocks=max(3, num_blocks), bias=False)
    ranks, dense = layer.num_blocks, 12 * 16
    for positions in (1, 30, 300):
        with FlopCounterMode(display=False) as counter:
            layer(torch.zeros(positions, 12))
        cheaper = min((ranks + positions) * dense, positions * ranks * (12 + 16))
        assert counter.get_total_flops() == 2 * cheaper


@pytest.mark.parametrize("shape", [(12,), (0, 12), (3, 12), (2, 3, 12), (2, 1, 3, 12)])
def test_inputs_of_any_rank(shape, generator):
    layer = random_gaudi()
    x = torch.randn(shape, generator=generator)
    assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "to"])
def test_structure_stays_float32_under_casts(cast):
    layer = random_gaudi(sigma=3.0)
    before = {name: getattr(layer, name).detach().clone() for name in STRUCTURE}
    model = nn.Sequential(layer)
    model = model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
    assert structure_dtypes(layer) == {torch.float32}
    assert layer.u.dtype == layer.v.dtype == layer.bias.dtype != torch.float32
    for name, value in before.items():
        assert torch.equal(getattr(layer, name), value), name
    assert isinstance(layer.width_frac, nn.Parameter) and layer.width_frac.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("positions", [FEW, MANY])
def test_a_cast_layer_computes_in_its_dtype(dtype, positions, generator):
    layer = random_gaudi(sigma=3.0)
    x = torch.randn(positions, 12, generator=generator)
    expected = layer(x)
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert relative_error(y, expected) < 2e-2


@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.parametrize("block_rank", [1, 8])
def test_factors_that_cancel_bear_autocast_where_nothing_is_trained(convolution, block_rank, generator):
    """Refits and evaluations in bfloat16 saw another model than the one that was fitted."""
    decay = torch.linspace(2, 0.2, 72)
    weight = (
        torch.randn(96, 72, generator=generator) * decay @ torch.linalg.qr(torch.randn(72, 72, generator=generator))[0]
    )
    layer = nn.Conv2d(8, 96, 3, bias=False) if convolution else nn.Linear(72, 96, bias=False)
    layer.weight.data = weight.reshape(layer.weight.shape)
    model = nn.Sequential(layer)
    where = gblr.conv_layers() if convolution else gblr.linear_layers()
    gblr.convert_(model, gblr.GaudiConfig(0.8, block_rank=block_rank, max_growth=300), where)
    x = torch.randn(16, 8, 14, 14, generator=generator) if convolution else torch.randn(2048, 72, generator=generator)
    errors = []
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients), torch.autocast("cpu", torch.bfloat16):
            found = model(x).detach().float()
        with torch.no_grad():
            errors.append(float((found - model(x)).norm() / model(x).norm()))
    assert errors[0] < 0.005 < 2 * errors[0] < errors[1]


@pytest.mark.parametrize("positions", [FEW, MANY])
def test_autocast_keeps_structure_in_float32_and_trains(positions, generator):
    layer = random_gaudi(sigma=3.0)
    x = torch.randn(positions, 12, generator=generator)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, expected) < 2e-2
    y.float().square().sum().backward()
    assert structure_dtypes(layer) == {torch.float32}
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32 and bool(parameter.grad.any())


@pytest.mark.parametrize("positions", [FEW, MANY])
@pytest.mark.parametrize("rounding", [True, False])
def test_gradients_reach_contents_widths_and_locations(positions, rounding, generator):
    layer = random_gaudi(sigma=2.0, rounding=rounding)
    x = torch.randn(positions, 12, generator=generator)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any()), name


def test_both_routes_have_the_same_gradients(generator):
    x = torch.randn(5, 12, generator=generator)
    grads = []
    for compose in (True, False):
        layer = random_gaudi(sigma=2.0)
        layer.composes = lambda positions, compose=compose: compose
        layer(x).square().sum().backward()
        grads.append([parameter.grad for parameter in layer.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_width_learns_to_grow_where_that_helps(generator):
    """One block, cut short: gradient descent on its width alone recovers the matrix."""
    layer = GaudiLinear(32, 32, bias=False, num_blocks=1)
    with torch.no_grad():
        layer.u.fill_(1.0), layer.v.fill_(1.0)
        layer.width_frac.fill_(0.5)
    layer.set_sigma(2.0)
    optimizer = torch.optim.SGD([layer.width_frac], lr=2e-5)
    for _ in range(60):
        optimizer.zero_grad()
        (layer.weight - 1).square().sum().backward()
        optimizer.step()
    assert float(layer.width_frac.detach().min()) > 0.8


def test_set_sigma_works_in_place():
    layer = random_gaudi(sigma=1.0)
    places = {name: getattr(layer, name).data_ptr() for name in ("sigma", "_row_table", "_col_table")}
    before = layer.weight.detach()
    layer.set_sigma(math.inf)
    assert {name: getattr(layer, name).data_ptr() for name in places} == places
    assert float(layer.sigma) == math.inf
    assert not torch.allclose(layer.weight, before)
    torch.testing.assert_close(layer.weight.double(), dense_weight(layer), rtol=1e-5, atol=1e-5)


def test_a_new_sigma_of_one_layer_leaves_others_alone():
    first, second = random_gaudi(sigma=5.0), random_gaudi(sigma=5.0)
    expected = second.weight.detach().clone()
    first.set_sigma(1.0)
    assert torch.equal(second.weight, expected)


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("last", [20.0, math.inf])
def test_masks_of_an_average_over_the_state_dict_follow_its_sigma(rounding, last):
    """As timm's ModelEma makes it: tables are not in the state dict, and an average of infinities is NaN."""
    layer = random_gaudi(sigma=1.0, rounding=rounding).requires_grad_(False)
    average = copy.deepcopy(layer)
    average.weight  # noqa: B018  evaluated before the first update
    for sigma in (2.0, last, last, last):
        layer.set_sigma(sigma)
        torch._foreach_lerp_(list(average.state_dict().values()), list(layer.state_dict().values()), 0.5)
    stored = {name: value.clone() for name, value in average.state_dict().items()}
    expected = copy.deepcopy(layer)
    expected.set_sigma(math.inf if last == math.inf else float(stored["sigma"]))
    assert_close(average.weight, expected.weight)
    assert float(average.sigma) == float(expected.sigma)
    layer.load_state_dict(stored)
    assert torch.equal(layer.weight, average.weight)


def reloaded(layer: GaudiLinear) -> GaudiLinear:
    layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    return layer


@pytest.mark.parametrize("change", [copy.deepcopy, nn.Module.double, nn.Module.bfloat16, reloaded])
def test_masks_follow_a_sigma_that_is_written_to_before_or_after_a_move(change):
    for changes in ((change, lambda layer: layer), (lambda layer: layer, change)):
        layer = changes[0](random_gaudi(sigma=1.0))
        layer.state_dict()["sigma"].fill_(5.0)
        layer = changes[1](layer)
        assert relative_error(layer.weight, dense_weight(layer).float()) < (
            0.01 if layer.u.dtype.itemsize == 2 else 1e-4
        )


def test_a_call_with_the_state_of_another_layer_changes_no_table():
    """A teacher by `functional_call`, between the forward and the backward pass of its student."""
    layer, x = random_gaudi(sigma=3.0), torch.randn(FEW, 12)
    teacher = {name: value.clone() for name, value in layer.state_dict().items()}
    teacher["sigma"].add_(1.0)
    loss = layer(x).square().mean()
    torch.func.functional_call(layer, teacher, (x,))
    loss.backward()
    assert float(layer.sigma) == 3.0 and relative_error(layer.weight, dense_weight(layer).float()) < 1e-4


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_a_sigma_that_means_nothing_is_refused(sigma):
    layer = random_gaudi(sigma=4.0)
    with pytest.raises(ValueError, match="sigma"):
        layer.set_sigma(sigma)
    assert float(layer.sigma) == 4.0


def test_the_printed_layer_tells_shape_blocks_live_blocks_and_cost():
    layer = GaudiLinear(12, 16, block_rank=2, align=4, num_blocks=5)
    layer.load_matrix(aligned_blocks())
    s = layer.structure
    cost = 2 * int(((s.row_width + s.col_width) * s.live).sum()) / 192
    text = repr(layer)
    for part in ("16 x 12", "block_rank=2", "blocks=5", "align=4", "live=3", "sigma=inf", "bias=True"):
        assert part in text
    assert f"relative_cost={cost:.3f}" in text
    assert "16 x 12" in repr(GaudiLinear(12, 16, device="meta"))


def test_num_mults_counts_live_blocks_only():
    layer = GaudiLinear(12, 16, num_blocks=6)
    layer.load_matrix(three_blocks())
    assert layer.num_mults == 16 + 12 + 5 + 3 + 4 + 7


@pytest.mark.parametrize("relative_cost", [0.05, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("block_rank", "align"), [(1, 1), (4, 1), (2, 8), (1, 7)])
@pytest.mark.parametrize("shape", [(48, 96), (64, 64), (96, 48)])
def test_the_scratch_start_costs_what_is_asked(relative_cost, block_rank, align, shape):
    layer = GaudiLinear(*shape, block_rank=block_rank, align=align, relative_cost=relative_cost)
    dense, step = shape[0] * shape[1], block_rank * 2 * align
    assert relative_cost * dense - 2 * step <= layer.num_mults <= relative_cost * dense


@pytest.mark.parametrize("relative_cost", [0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("block_rank", "align"), [(1, 1), (8, 1), (4, 4), (16, 16), (1, 16), (1, 7)])
@pytest.mark.parametrize("small", [1, 3, 10, 16, 32])
def test_thin_layers_start_alive_and_at_no_more_than_what_is_asked(relative_cost, block_rank, align, small):
    """A side that is raised to `align` once killed whole blocks, often all of them."""
    for shape in ((small, 512), (512, small)):
        layer = GaudiLinear(*shape, block_rank=block_rank, align=align, relative_cost=relative_cost, bias=False)
        smallest = layer.block_rank * sum(min(align, n) for n in shape)
        asked = min(relative_cost * 512 * small, layer.num_blocks * layer.block_rank * sum(shape))
        assert layer.num_mults <= max(asked, smallest)
        assert layer.num_mults >= max(asked - 2 * layer.block_rank * align, smallest)


@pytest.mark.parametrize("relative_cost", [0.1, 0.3])
@pytest.mark.parametrize("shape", [(768, 16), (16, 768), (512, 32)])
def test_a_thin_layer_starts_with_the_variance_of_a_linear_layer(relative_cost, shape, generator):
    layer = GaudiLinear(*shape, False, block_rank=16, align=16, relative_cost=relative_cost, generator=generator)
    x = torch.randn(400, shape[0], generator=generator)
    assert 0.5 < float(layer(x).detach().var()) * 3 < 2
    assert float(layer.u.detach().std()) < 1


def test_without_rounding_the_scratch_start_costs_what_is_asked():
    layer = GaudiLinear(48, 96, relative_cost=0.1, rounding=False)
    real = float((layer.width_frac.detach() * torch.tensor([[96.0], [48.0]])).sum())
    assert real == pytest.approx(0.1 * 48 * 96, rel=1e-4)


def test_blocks_that_the_scratch_start_leaves_dead_can_return(generator):
    layer = GaudiLinear(64, 64, align=8, relative_cost=0.05, bias=False, generator=generator)
    dead = ~layer.structure.live
    assert bool(dead.any())
    layer.set_sigma(2.0)
    layer(torch.randn(9, 64, generator=generator)).square().sum().backward()
    assert bool((layer.width_frac.grad[0, dead] != 0).all())


@pytest.mark.parametrize("relative_cost", [0.15, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(64, 64), (48, 96), (96, 48)])
@pytest.mark.parametrize("block_rank", [1, 8])
def test_the_scratch_start_gives_outputs_the_variance_of_a_linear_layer(relative_cost, shape, block_rank, generator):
    ratios = []
    for _ in range(8):
        layer = GaudiLinear(*shape, bias=False, block_rank=block_rank, relative_cost=relative_cost, generator=generator)
        x = torch.randn(200, shape[0], generator=generator)
        ratios.append(float(layer(x).detach().var()) / (1 / 3))  # nn.Linear: in * 1 / (3 in)
    assert 0.75 < sum(ratios) / len(ratios) < 1.3


def test_the_scratch_start_is_repeatable():
    first, second = (GaudiLinear(12, 16, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_loaded_matrix_is_the_weight():
    matrix = three_blocks()
    layer = GaudiLinear(12, 16)
    layer.load_matrix(matrix)
    assert_close(layer.weight, matrix.to_dense())
    assert layer.num_mults == matrix.num_mults


@pytest.mark.parametrize("align", [1, 4])
def test_padding_blocks_are_dead_and_can_return(align, generator):
    layer = GaudiLinear(12, 16, align=align, num_blocks=8)
    layer.load_matrix(GBLRMatrix.from_low_rank(*(torch.randn(3, n, generator=generator) for n in (16, 12))))
    assert int(layer.structure.live.sum()) == 3
    layer.set_sigma(2.0)
    layer(torch.randn(9, 12, generator=generator)).square().sum().backward()
    for k in range(3, 8):
        assert bool(layer.width_frac.grad[0, k] != 0), k


def test_a_matrix_that_does_not_fit_is_refused():
    layer = GaudiLinear(12, 16, num_blocks=2)
    with raises_value_error("`num_blocks`", 2, 3):
        layer.load_matrix(three_blocks())
    with raises_value_error("`matrix`", (16, 12), (12, 16)):
        layer.load_matrix(three_blocks().T)
    with raises_value_error("`matrix`", "block_rank", 2):
        layer.load_matrix(three_blocks(block_rank=2))


@pytest.mark.parametrize(
    "wrong", [{"row_width": 3}, {"row_location": 5}, {"col_width": 7}, {"col_location": 2}], ids=str
)
def test_a_matrix_between_the_multiples_of_align_is_refused_and_changes_nothing(wrong):
    """It would be rounded to another matrix."""
    matrix = aligned_blocks(**wrong)
    layer = GaudiLinear(12, 16, block_rank=2, align=4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with raises_value_error("`align`", 4, *wrong, *wrong.values()):
        layer.load_matrix(matrix)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    for options in ({"align": 1}, {"align": 4, "rounding": False}):
        layer = GaudiLinear(12, 16, block_rank=2, **options)
        layer.load_matrix(matrix)
        assert_close(layer.weight, matrix.to_dense())


def test_where_rounding_changes_nothing_any_place_may_be_loaded():
    """A dead block, and a full one, whose location does not matter; an axis that `align` does not divide."""
    structure = Structure(*(torch.tensor(v) for v in ([30, 5, 8], [7, 3, 24 - 30], [21, 0, 16], [0, 9, 21])))
    generator = torch.Generator().manual_seed(1)
    matrix = GBLRMatrix(structure, *(torch.randn(3, 1, n, generator=generator) for n in (30, 21)))
    layer = GaudiLinear(21, 30, align=8)
    layer.load_matrix(matrix)
    assert_close(layer.weight, matrix.to_dense())


def test_hardening_is_exact_without_smoothing():
    layer = random_gaudi(sigma=math.inf)
    matrix = layer.to_matrix()
    assert_close(matrix.to_dense(), layer.weight)
    assert matrix.num_mults == layer.num_mults
    assert bool(matrix.structure.live.all()) and matrix.num_blocks == layer.num_blocks - 1


@pytest.mark.parametrize("sigma", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("rounding", [True, False])
def test_hardening_leaves_out_only_what_the_threshold_allows(sigma, rounding):
    layer = random_gaudi(sigma=sigma, rounding=rounding)
    matrix = layer.to_matrix()
    assert bool(matrix.structure.live.all())
    # each dropped entry of a factor is at most threshold * content
    u, v = (content.detach().abs().flatten(0, 1) for content in (layer.u, layer.v))
    bound = 3 * MASK_THRESHOLD * (u.T @ v)
    error = (matrix.to_dense() - dense_weight(layer)).abs()
    assert bool((error <= bound + 1e-5).all())


def test_a_dead_layer_hardens_to_a_matrix_without_blocks():
    layer = random_gaudi()
    with torch.no_grad():
        layer.width_frac[0].zero_()
    assert layer.to_matrix().num_blocks == 0
    assert not layer.weight.any()


def test_widths_and_locations_round_to_multiples_of_align():
    layer = random_gaudi(in_features=32, out_features=48, align=8)
    s = layer.structure
    for value in vars(s).values():
        assert bool((value % 8 == 0).all())
    assert bool((s.row_width == 48).any()) and bool((s.col_width == 32).any())


def test_where_align_does_not_divide_the_axis_the_full_axis_stays_allowed():
    layer = random_gaudi(in_features=21, out_features=30, align=8)
    s = layer.structure
    for width, location, length in ((s.row_width, s.row_location, 30), (s.col_width, s.col_location, 21)):
        assert bool(((width % 8 == 0) | (width == length)).all()) and bool((width == length).any())
        assert bool((location % 8 == 0).all())
    x = torch.randn(3, 21)
    assert_close(layer.to_matrix().matmul(x) + layer.bias, layer(x))


def test_widths_beyond_the_axis_count_as_full():
    layer = random_gaudi()
    with torch.no_grad():
        layer.width_frac.fill_(1.7)
    assert layer.num_mults == layer.num_blocks * (12 + 16)
    assert bool(layer(torch.ones(2, 12)).isfinite().all())


def test_a_deep_copy_is_independent():
    layer = random_gaudi(sigma=3.0)
    twin = copy.deepcopy(layer)
    expected = layer.weight.detach().clone()
    with torch.no_grad():
        twin.width_frac.mul_(0.5)
    twin.set_sigma(1.0)
    assert torch.equal(layer.weight, expected) and not torch.allclose(twin.weight, expected)


@pytest.mark.parametrize("positions", [FEW, MANY])
def test_the_layer_compiles_to_one_graph_with_its_gradients(positions, generator):
    layer = random_gaudi(sigma=3.0)
    x = torch.randn(positions, 12, generator=generator)
    run = compiled(layer)
    assert_close(run(x), layer(x))
    actual, expected = (torch.autograd.grad(f(x).square().mean(), layer.parameters()) for f in (run, layer))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_a_compiled_layer_sees_a_new_sigma(generator):
    layer = random_gaudi(sigma=3.0)
    x = torch.randn(2, 12, generator=generator)
    run = compiled(layer)
    before = run(x)
    layer.set_sigma(1.0)
    assert_close(run(x), layer(x))
    assert not torch.allclose(run(x), before)


def test_the_layer_exports(generator):
    layer = random_gaudi(sigma=3.0)
    x = torch.randn(4, 12, generator=generator)
    with shapes_unchecked():
        program = torch.export.export(layer, (x,))
    assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_layer_exports_with_a_batch_left_open(strict, training, generator):
    layer = random_gaudi(sigma=3.0).train(training)
    with shapes_unchecked():
        program = torch.export.export(
            layer, (torch.zeros(4, 12),), dynamic_shapes=({0: torch.export.Dim("b")},), strict=strict
        )
    assert type(layer.num_positions) is int
    for positions in (2, 4, MANY):
        x = torch.randn(positions, 12, generator=generator)
        assert_close(program.module()(x), layer(x))


def test_a_compiled_layer_takes_any_batch_in_a_graph_for_each_route(generator):
    layer, torch_counts = random_gaudi(sigma=3.0), torch._dynamo.utils.counters
    torch._dynamo.reset()
    torch_counts.clear()
    run = torch.compile(layer, backend="eager", dynamic=True)
    with shapes_unchecked():
        for positions in (2, 3, 5, 50, MANY, 7, 90, 4):
            x = torch.randn(positions, 12, generator=generator)
            assert_close(run(x), layer(x))
    assert torch_counts["stats"]["unique_graphs"] == 2


def test_a_layer_on_meta_has_shapes_and_is_filled_by_a_state_dict(generator):
    layer = GaudiLinear(12, 16, device="meta")
    assert layer(torch.empty(3, 12, device="meta")).shape == (3, 16)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    source = random_gaudi(sigma=3.0)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    x = torch.randn(3, 12, generator=generator)
    assert torch.equal(layer(x), source(x))
    assigned = GaudiLinear(12, 16, device="meta")
    assigned.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(assigned(x), source(x))


def test_a_state_dict_gives_the_same_layer_back(generator):
    source, target = random_gaudi(sigma=3.0), GaudiLinear(12, 16)
    missing = target.load_state_dict(source.state_dict())
    assert not missing.missing_keys and not missing.unexpected_keys
    x = torch.randn(3, 12, generator=generator)
    assert torch.equal(target(x), source(x))


def test_a_loaded_layer_has_the_same_masks_at_a_sigma_that_float32_rounds(generator):
    source, target = random_gaudi(sigma=2.1), GaudiLinear(12, 16)
    target.load_state_dict(source.state_dict())
    for name in STRUCTURE:
        assert torch.equal(getattr(source, name), getattr(target, name)), name


def test_a_sigma_that_is_zero_in_float32_is_refused():
    with raises_value_error("`sigma`", 0):
        GaudiLinear(12, 16).set_sigma(1e-60)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_structure_assigned_in_another_dtype_becomes_float32(dtype, device, generator):
    source = random_gaudi(sigma=3.0)
    state = {name: value.to(dtype) for name, value in source.state_dict().items()}
    state["location_frac"] = nn.Parameter(state["location_frac"])
    layer = GaudiLinear(12, 16, device=device)
    layer.width_frac.requires_grad_(False)
    layer.load_state_dict(state, assign=True)
    assert structure_dtypes(layer) == {torch.float32} and layer.u.dtype == dtype
    assert not layer.width_frac.requires_grad and layer.location_frac.requires_grad
    assert {value.dtype for value in state.values()} == {dtype}  # what was given stays as it is
    assert layer(torch.randn(3, 12, generator=generator).to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_structure_that_a_framework_casts_is_refused(dtype, generator):
    """FSDP gives forward its own tensors: masks would be others than those of the model that is saved and hardened."""
    layer = GaudiLinear(24, 16, generator=generator)
    cast = {name: value.to(dtype) for name, value in layer.named_parameters()}
    with pytest.raises(TypeError, match=r"float32.*torch\.autocast"):
        torch.func.functional_call(layer, cast, torch.randn(2, 24, dtype=dtype))
    kept = cast | {name: getattr(layer, name) for name in ("width_frac", "location_frac")}
    assert torch.func.functional_call(layer, kept, torch.randn(2, 24, dtype=dtype)).dtype == dtype


def test_the_state_dict_holds_no_tables():
    assert set(random_gaudi().state_dict()) == {"width_frac", "location_frac", "u", "v", "sigma", "bias"}


def test_gradient_checkpointing_changes_nothing(generator):
    layer = random_gaudi(sigma=2.0)
    x = torch.randn(5, 12, generator=generator, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    saved = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), layer.parameters())
    for a, b in zip(plain, saved, strict=True):
        assert torch.equal(a, b)


def test_a_dense_layer_made_of_it_computes_the_same(generator):
    layer = random_gaudi(sigma=3.0)
    x = torch.randn(3, 12, generator=generator)
    assert type(layer.to_dense_layer()) is nn.Linear
    assert_close(layer.to_dense_layer()(x), layer(x))
    assert GaudiLinear(12, 16, bias=False).to_dense_layer().bias is None


def test_structure_and_content_parameters_are_all_but_the_bias():
    layer = random_gaudi()
    named = dict(layer.named_parameters())
    assert [id(p) for p in layer.structure_parameters()] == [id(named["width_frac"]), id(named["location_frac"])]
    assert {id(p) for p in layer.content_parameters()} == {id(named["u"]), id(named["v"])}


def test_sizes_that_make_no_layer_are_refused():
    with raises_value_error("`in_features`", 0):
        GaudiLinear(0, 4)
    with raises_value_error("`out_features`", -1):
        GaudiLinear(4, -1)
    with raises_value_error("`block_rank`", "`align`", 0):
        GaudiLinear(4, 4, block_rank=0)
    for num_blocks in (0, -1):
        with raises_value_error("`num_blocks`", num_blocks):
            GaudiLinear(4, 4, num_blocks=num_blocks)
    with raises_value_error("`relative_cost`", 0):
        GaudiLinear(4, 4, relative_cost=0)


def test_to_empty_and_reset_parameters_leave_nothing_unfilled(generator):
    """torch's way to fill a model from the meta device: what is not reset would be whatever was in memory."""
    with torch.device("meta"):
        layer = GaudiLinear(16, 24)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(torch.nan)
    layer.reset_parameters(relative_cost=0.5, generator=generator)
    assert all(bool(tensor.isfinite().all()) for tensor in layer.parameters())
    assert float(layer.sigma) == math.inf
    other = GaudiLinear(16, 24)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 16, generator=generator)
    assert torch.equal(layer(x), other(x))


def test_a_cast_casts_the_gradients_of_structure_back_too(generator):
    layer = GaudiLinear(8, 8)
    layer(torch.randn(3, 8, generator=generator)).square().sum().backward()
    before = layer.width_frac.grad.clone()
    layer.bfloat16()
    assert layer.u.grad.dtype == torch.bfloat16 and layer.width_frac.grad.dtype == torch.float32
    assert (layer.width_frac.grad - before).norm() <= 0.01 * before.norm()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_second_derivatives_by_parameters_are_refused_and_by_inputs_there(generator):
    """torch would take those by parameters for zero."""
    layer, x = GaudiLinear(8, 8), torch.randn(3, 8, generator=generator, requires_grad=True)
    layer.set_sigma(2.0)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), layer.u, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.square().sum().backward()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(grad.square().sum(), layer.u)
    weight = layer.weight.detach()
    expected = weight.clone().requires_grad_()
    (2 * x.detach() @ expected.T @ expected + 2 * layer.bias.detach() @ expected).square().sum().backward()
    (through,) = torch.autograd.grad(layer.weight, layer.u, expected.grad)
    assert (found - through).norm() <= 1e-4 * through.norm()


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("sigma", [2.0, math.inf])
def test_torch_func_differentiates_by_parameters(sigma, rounding, generator):
    layer = random_gaudi(sigma=sigma, rounding=rounding, block_rank=2)
    x = torch.randn(5, 12, generator=generator)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().mean()

    expected = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
    found = torch.func.grad(loss)(parameters, x)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for name, wanted in zip(parameters, expected, strict=True):
        for grad in (found[name], per_sample[name].mean(0)):
            assert_close(grad, wanted)


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("rounding", [True, False])
def test_derivatives_in_forward_mode_are_not_lost(rounding, trainable, generator):
    layer = random_gaudi(sigma=2.0, rounding=rounding, block_rank=2).requires_grad_(trainable)
    x = torch.randn(5, 12, generator=generator)
    for name, parameter in layer.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator)

        def call(value, name=name):
            return torch.func.functional_call(layer, {name: value}, (x,))

        _, expected = torch.func.jvp(call, (parameter.detach(),), (direction,))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(parameter.detach(), direction))).tangent
        assert tangent is not None, name
        assert_close(tangent, expected)


def test_an_ensemble_of_layers_is_mapped_at_once(generator):
    layers = [random_gaudi(sigma=sigma) for sigma in (1.0, 4.0, math.inf)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(5, 12, generator=generator)
    y = torch.func.vmap(lambda p, b: torch.func.functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    assert_close(y, torch.stack([layer(x) for layer in layers]))


def test_the_first_parameter_has_the_dtype_of_the_model():
    layer = GaudiLinear(8, 6).bfloat16()
    assert next(layer.parameters()).dtype == torch.bfloat16 and layer.width_frac.dtype == torch.float32
