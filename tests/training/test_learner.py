import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gblr.conversion.cost import Cost, cost
from gblr.conversion.harden import harden_
from gblr.layers.gaudi import GaudiLinear
from gblr.ops import prox
from gblr.training.budget import Budget
from gblr.training.param_groups import param_groups
from gblr.training.schedules import SigmaSchedule, fall
from tests.helpers import raises_value_error
from tests.shape_hook import shapes_unchecked
from tests.training.models import (
    IMAGES,
    ROWS,
    SHARP,
    SOFT,
    adamw,
    changed,
    gaudi_layers,
    learner_of,
    mixed_model,
    mlp,
    no_values_read,
    one_step,
    snapshot,
    train,
)

PAPER = SigmaSchedule(1.0, 6.0, shape="linear", warmup=0.2, end=1.0, sharp=0.0)
SCHEDULES = [SHARP, SOFT, PAPER, SigmaSchedule.constant(math.inf), SigmaSchedule.constant(2.0)]
METHODS = ["projection", "shrinkage"]


def hardened(model: nn.Module, x: torch.Tensor) -> Cost:
    harden_(model)
    return cost(model, x)


def budget_of(model: nn.Module, unit: str, share: float, **options) -> Budget:
    """Leaves `share` of the converted layers' dense multiplications or parameters, in each of the units."""
    now = cost(model, IMAGES)
    if unit == "relative_cost":
        return Budget(relative_cost=share, **options)
    if unit == "model":
        rest = now.num_mults - now.converted_mults
        left = (rest + share * now.converted_dense_mults) / now.dense_mults
        return Budget(relative_cost=left, scope="model", **options)
    layers = gaudi_layers(model)
    biases = sum(layer.out_features for layer in layers if layer.bias is not None)
    weights = sum(layer.out_features * layer.in_features for layer in layers)
    rest = 0 if unit == "num_params" else now.rest_params
    scope = "layers" if unit == "num_params" else "model"
    return Budget(num_params=math.ceil(rest + biases + share * weights), scope=scope, **options)


def within(found: Cost, budget: Budget) -> bool:
    if budget.num_params is not None:
        return (found.num_params if budget.scope == "model" else found.converted_params) <= budget.num_params
    return (found.model_relative_cost if budget.scope == "model" else found.relative_cost) <= budget.relative_cost


@settings(max_examples=24)
@given(
    seed=st.integers(0, 1000), share=st.floats(0.02, 0.9), block_rank=st.sampled_from([1, 2]),
    align=st.sampled_from([1, 4]), method=st.sampled_from(METHODS), sigma=st.sampled_from(SCHEDULES),
    unit=st.sampled_from(["relative_cost", "model", "num_params", "all_params"]), total_steps=st.integers(1, 6),
)  # fmt: skip
def test_the_hardened_model_never_costs_more_than_the_budget(
    seed, share, block_rank, align, method, sigma, unit, total_steps
):
    with shapes_unchecked():  # a third of the time
        model = mixed_model(seed, block_rank, align=align)
        budget = budget_of(model, unit, share, method=method)
        inputs = IMAGES if budget.needs_inputs else None
        learner = learner_of(model, budget=budget, sigma=sigma, total_steps=total_steps, example_inputs=inputs)
        train(learner, model, IMAGES)
        reported = learner.relative_cost
        found = hardened(model.eval(), IMAGES)
        assert within(found, budget)
        assert reported == pytest.approx(found.relative_cost, rel=1e-12)


@pytest.mark.parametrize("last", [3.0, 20.0])
def test_real_widths_keep_the_budget_too(last):
    model = mixed_model(rounding=False)
    learner = learner_of(model, sigma=SigmaSchedule(1.0, last, end=1.0, sharp=0.0), budget=Budget(relative_cost=0.8))
    train(learner, model, IMAGES)
    reported = learner.relative_cost
    assert 0.1 < hardened(model.eval(), IMAGES).relative_cost <= reported <= 0.8


def test_a_budget_is_used_and_not_only_kept():
    model = mixed_model(3)
    learner = learner_of(model, budget=Budget(relative_cost=0.5))
    train(learner, model, IMAGES)
    assert 0.49 < learner.relative_cost <= 0.5


@pytest.mark.parametrize("method", METHODS)
def test_more_steps_than_planned_stay_within_the_budget(method):
    model = mlp()
    learner = learner_of(model, budget=Budget(relative_cost=0.3, method=method), total_steps=3)
    train(learner, model, steps=6)
    assert learner.step == 6 and learner.relative_cost <= 0.3
    assert gaudi_layers(model)[0].sigma == math.inf


@pytest.mark.parametrize("weights", ["gradient", "price", "equal"])
def test_shrinkage_stops_at_the_budget_in_short_runs_too(weights):
    """A run of 30 steps takes a whole axis in one: models ended at a tenth of the cost that was asked for, or at 0."""
    model = mlp()
    learner = learner_of(model, budget=Budget(relative_cost=0.3, method="shrinkage", weights=weights), total_steps=30)
    train(learner, model)
    assert 0.25 < learner.relative_cost <= 0.3


@pytest.mark.parametrize(("shape", "sigma"), [("cubic", SHARP), ("linear", SOFT)], ids=["sharp", "soft"])
def test_projection_obeys_its_falling_bound_at_every_step(shape, sigma):
    model, found = mixed_model(1), []
    budget = Budget(relative_cost=0.3, start=0.2, end=0.8, shape=shape)
    learner = learner_of(
        model, budget=budget, sigma=sigma, total_steps=10, example_inputs=IMAGES, callback=found.append
    )
    train(learner, model, IMAGES)
    state = learner.state_dict()
    dense = sum(p * m.out_features * m.in_features for p, m in zip(state["positions"], learner.layers, strict=True))
    first, last = torch.tensor(state["start"] / dense), torch.tensor(0.3)
    for step, metrics in enumerate(found, start=1):
        bound = float(fall(first, last, torch.tensor(step / 10), 0.2, 0.8, shape))
        assert metrics["step"] == step and metrics["relative_cost"] <= bound * (1 + 1e-6)
    assert found[0]["relative_cost"] > 0.6 and found[-1]["relative_cost"] <= 0.3


def test_a_single_step_meets_the_budget():
    model = mlp()
    learner = learner_of(model, total_steps=1)
    train(learner, model)
    assert learner.step == 1 and learner.relative_cost <= 0.3


# -- blocks ------------------------------------------------------------------------------------------------------


def two_blocks() -> tuple[GaudiLinear, torch.Tensor, torch.Tensor]:
    """A layer of two blocks that do not touch, its first block as a matrix, and the whole matrix."""
    torch.manual_seed(0)
    layer = GaudiLinear(24, 24, bias=False, num_blocks=2, block_rank=4)
    layer.set_sigma(3.0)
    with torch.no_grad():
        layer.width_frac.fill_(0.5)
        layer.location_frac[:, 1] = 0.5
        u, v = layer.factors()
        return layer, u[0].T @ v[0], layer.weight


def only_structure(layer: GaudiLinear) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups(layer, lr=0.0, structure_lr=0.02))


def approach(layer: GaudiLinear, target: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (layer.weight - target).square().sum().backward()
        optimizer.step()


def test_a_block_dies_and_returns():
    """It is first unwanted, then needed; the budget leaves room for it all the time."""
    layer, without, whole = two_blocks()
    sigma = SigmaSchedule.constant(3.0)
    learner = learner_of(layer, only_structure(layer), budget=Budget(relative_cost=1.0), sigma=sigma, total_steps=100)
    approach(layer, without, learner.optimizer, 60)
    assert layer.structure.live.tolist() == [True, False] and learner.metrics()["live_blocks"] == 1
    approach(layer, whole, learner.optimizer, 40)
    assert layer.structure.live.tolist() == [True, True] and learner.metrics()["live_blocks"] == 2
    assert torch.allclose(layer.weight, whole, atol=1e-5)


@pytest.mark.parametrize("learns", [True, False])
def test_a_block_returns_from_two_widths_of_zero_by_the_learner_alone(learns):
    layer, _, whole = two_blocks()
    optimizer = only_structure(layer)
    if learns:
        sigma = SigmaSchedule.constant(3.0)
        learner_of(layer, optimizer, budget=Budget(relative_cost=1.0), sigma=sigma, total_steps=60)
    with torch.no_grad():
        layer.width_frac[:, 1] = 0.0
    approach(layer, whole, optimizer, 60)
    assert layer.structure.live.tolist() == [True, learns]
    assert torch.allclose(layer.weight, whole, atol=1e-5) == learns


@pytest.mark.parametrize("align", [1, 4])
def test_the_proximal_step_never_leaves_both_widths_zero(align):
    model = mlp(align=align)
    learner = learner_of(model, budget=Budget(relative_cost=0.02, end=0.3), total_steps=10)
    for _ in range(10):
        one_step(model, learner.optimizer)
        for layer in gaudi_layers(model):
            (row, _), (col, _) = layer.elements()
            assert ((row > 0) | (col > 0)).all()
    assert learner.relative_cost <= 0.02 and learner.metrics()["live_blocks"] < 4


def test_dead_blocks_feel_a_gradient():
    model = mlp()
    learner = learner_of(model, budget=Budget(relative_cost=0.02, end=0.3), total_steps=10)
    train(learner, model, steps=5)
    model.zero_grad()
    (model(ROWS) - 1).square().mean().backward()
    last = model[2]
    dead = ~last.structure.live
    assert dead.any() and (last.width_frac.grad[:, dead] != 0).any(0).all()


def test_locations_stay_on_the_circle():
    model = mlp()
    with torch.no_grad():
        model[0].location_frac.fill_(0.999)
        model[2].location_frac.fill_(0.001)
    learner = learner_of(model, adamw(model, structure_lr=0.3))
    for _ in range(8):
        one_step(model, learner.optimizer)
        for layer in gaudi_layers(model):
            assert (layer.location_frac >= 0).all() and (layer.location_frac < 1).all()


@pytest.mark.parametrize("frozen", ["width_frac", "all"])
def test_frozen_layers_stay_as_they_are_and_are_paid_for(frozen):
    model = mixed_model(2, relative_cost=0.2)
    for name, p in model[3].named_parameters():
        p.requires_grad_(frozen != "all" and name != frozen)
    before = model[3].width_frac.clone()
    learner = learner_of(model, budget=Budget(relative_cost=0.18))
    train(learner, model, IMAGES)
    assert torch.equal(model[3].width_frac, before)
    assert hardened(model.eval(), IMAGES).relative_cost <= 0.18


def freeze(layer: GaudiLinear, frozen: bool = True) -> None:
    for p in layer.structure_parameters():
        p.requires_grad_(not frozen)


@pytest.mark.parametrize("weights", ["gradient", "price", "equal"])
@pytest.mark.parametrize("done", [0, 2])
def test_layers_may_be_frozen_and_thawed_while_it_learns(weights, done):
    model = mlp(relative_cost=0.6)
    learner = learner_of(model, budget=Budget(relative_cost=0.35, weights=weights))
    train(learner, model, steps=done)
    freeze(model[2])
    before = model[2].width_frac.clone()
    train(learner, model, steps=6 - done)
    assert torch.equal(model[2].width_frac, before) and learner.relative_cost <= 0.35
    freeze(model[2], False)
    train(learner, model, steps=2)
    assert not torch.equal(model[2].width_frac, before) and learner.relative_cost <= 0.35


def test_structure_that_is_frozen_as_a_whole_at_the_budget_stays():
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=5)
    for layer in gaudi_layers(model):
        freeze(layer)
    before = [layer.width_frac.clone() for layer in gaudi_layers(model)]
    train(learner, model, steps=3)
    assert all(torch.equal(layer.width_frac, old) for layer, old in zip(gaudi_layers(model), before, strict=True))
    assert learner.step == 8 and learner.relative_cost <= 0.3


def test_a_layer_that_is_frozen_above_the_budget_is_told():
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=1)
    freeze(model[0])
    with raises_value_error("cannot", "trainable widths"):
        one_step(model, learner.optimizer)


# -- optimizers and rates ----------------------------------------------------------------------------------------


def still_model(widths: float = 0.9) -> nn.Sequential:
    """Rows of widths to which no gradient comes: only the proximal step moves them."""
    model = mlp()
    for layer in gaudi_layers(model):
        layer.width_frac.data.fill_(widths)
    return model


def shrunk_by(model: nn.Sequential, optimizer) -> list[float]:
    """How much the widths of each layer fell in a step without gradients, over the weight of the layer."""
    budget = Budget(relative_cost=0.01, method="shrinkage", max_shrinkage=0.1, end=1.0, weights="price")
    learner = learner_of(model, optimizer, budget=budget, sigma=SigmaSchedule.constant(math.inf), total_steps=100)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    weights = [layer.block_rank * torch.tensor(layer._axes).float() for layer in learner.layers]
    mean = sum(w.sum() * layer.num_blocks for w, layer in zip(weights, learner.layers, strict=True))
    mean /= sum(2 * layer.num_blocks for layer in learner.layers)
    before = [layer.width_frac.detach().clone() for layer in learner.layers]
    for one in optimizers:
        one.zero_grad(set_to_none=False)
        one.step()
    learner.remove()
    fell = [b - layer.width_frac.detach() for b, layer in zip(before, learner.layers, strict=True)]
    found = [f / (w / mean)[:, None] for f, w in zip(fell, weights, strict=True)]
    for f in found:
        assert torch.allclose(f, f.mean().expand_as(f), rtol=1e-4)  # the price is in the threshold
    return [float(f.mean()) for f in found]


def cut_by_projection(model: nn.Sequential, weights: str) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """How much each width fell in a step in which the optimizer itself moved none."""
    optimizer = adamw(model, structure_lr=0.0)
    learner_of(model, optimizer, budget=Budget(relative_cost=0.7, end=0.0, weights=weights), total_steps=4)
    before = torch.cat([layer.width_frac.detach() for layer in gaudi_layers(model)], 1)
    one_step(model, optimizer)
    return before - torch.cat([layer.width_frac.detach() for layer in gaudi_layers(model)], 1), optimizer


def test_widths_share_a_cut_equally_by_price_or_by_gradient():
    cut, _ = cut_by_projection(still_model(), "equal")
    assert torch.allclose(cut, cut.mean().expand_as(cut), rtol=1e-4) and cut.mean() > 0.01
    cut, _ = cut_by_projection(still_model(), "price")
    assert torch.allclose(cut / cut[0, 0], torch.tensor([[16.0] * 12 + [8.0] * 8, [12.0] * 12 + [16.0] * 8]) / 16)
    model = still_model()
    cut, optimizer = cut_by_projection(model, "gradient")
    size = torch.cat([optimizer.state[layer.width_frac]["exp_avg_sq"].sqrt() for layer in gaudi_layers(model)], 1)
    expected = 1 / (size / size.mean() + 1e-3)
    expected = (expected / expected.mean()).clamp(0.1, 10)
    ratio = (cut / expected)[:, (cut < 0.8).all(0)]  # of blocks that were not cut down to 0
    assert ratio.numel() > 10 and torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=1e-3)


def test_weights_by_gradient_do_not_hang_on_frozen_layers():
    """They have no gradient: were it counted as a small one, it would dwarf those of all others."""
    model = nn.Sequential(*mlp(), GaudiLinear(8, 8))
    model[3].width_frac.requires_grad_(False)
    learner = learner_of(model, budget=Budget(relative_cost=0.9))
    train(learner, model, steps=1)
    weights = learner._weights()
    assert not weights[:, 20:].any()
    assert weights[:, :20].mean() > 0.5 and weights[:, :20].std() > 0.3


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_layer_that_begins_to_learn_later_weighs_as_much_as_its_twin(options):
    """Its mean square of gradients is small at first, as it began at 0, and not because its widths matter less."""
    torch.manual_seed(0)
    twins = nn.ModuleList([GaudiLinear(12, 8)])
    twins.append(copy.deepcopy(twins[0]))
    twins[1].width_frac.requires_grad_(False)
    optimizer = torch.optim.AdamW(twins.parameters(), 0.0, **options)  # nothing moves: gradients stay equal
    sigma = SigmaSchedule.constant(math.inf)
    learner = learner_of(twins, optimizer, budget=Budget(relative_cost=1.0), sigma=sigma)
    for step in range(7):
        twins[1].width_frac.requires_grad_(step >= 5)
        sum(twin(ROWS).square().mean() for twin in twins).backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = learner._weights().chunk(2, dim=1)
    assert torch.allclose(first, second, rtol=1e-3) and first.std() > 0.1


def test_groups_may_be_taken_from_the_optimizer():
    model = mlp()
    learner = learner_of(model, budget=Budget(relative_cost=0.3, method="shrinkage"))
    train(learner, model, steps=4)
    del learner.optimizer.param_groups[0]
    train(learner, model, steps=4)
    assert learner.relative_cost <= 0.3
    del learner.optimizer.param_groups[-1]
    with raises_value_error("does not hold", "2 layers", "'0'"):
        one_step(model, learner.optimizer)


def test_layers_that_no_gradient_has_reached_are_no_reason_to_stop():
    model = nn.ModuleDict({"used": mlp(), "unused": GaudiLinear(6, 6)})
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)  # holds the widths of all, frozen or not
    model["used"][0].width_frac.requires_grad_(False)
    learner = learner_of(model, optimizer, budget=Budget(relative_cost=0.7))
    for _ in range(8):
        one_step(model["used"], optimizer)
    assert learner.step == 8 and learner.relative_cost <= 0.7


def test_an_optimizer_that_does_not_measure_gradients_needs_other_weights():
    model = mlp()
    learner = learner_of(model, torch.optim.SGD(model.parameters(), 0.01))
    with raises_value_error("SGD", "`exp_avg_sq`", "AdamW"):
        one_step(model, learner.optimizer)
    learner.remove()
    learner = learner_of(model, learner.optimizer, budget=Budget(relative_cost=0.3, weights="equal"))
    train(learner, model)
    assert learner.relative_cost <= 0.3


@pytest.mark.parametrize("name", ["budget", "sigma"])
def test_plain_numbers_in_place_of_budget_and_schedule_are_told(name):
    with shapes_unchecked(), pytest.raises(TypeError, match=f"`{name}` must be a gblr.*0.3"):
        learner_of(mlp(), **{name: 0.3})


def test_widths_that_are_no_longer_the_optimizers_are_told():
    """As after loading with `assign=True`, which puts new parameters in place of those that it holds."""
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=1)
    model.load_state_dict(snapshot(model), assign=True)
    with raises_value_error("does not hold", "2 layers", "'0'"):
        train(learner, model, steps=1)


def test_the_default_shrinkage_takes_a_whole_axis_away_in_three_percent_of_the_steps():
    model = still_model(1.0)
    budget = Budget(relative_cost=0.001, method="shrinkage", weights="equal", end=1.0)
    optimizer = adamw(model, structure_lr=0.3)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3)  # warms up: the rate is far below its own at first
    learner = learner_of(model, optimizer, budget=budget, sigma=SigmaSchedule.constant(math.inf), total_steps=1000)
    optimizer.param_groups[-1]["lr"] = 0.3
    for step in range(36):
        optimizer.step()
        widest = max(float(layer.width_frac.detach().max()) for layer in gaudi_layers(model))
        assert widest == pytest.approx(1 - (step + 1) / 30, abs=1e-4) if step < 24 else widest < 0.2
    assert learner.relative_cost == 0


def test_a_rate_of_zero_tells_nothing_about_shrinkage():
    model = mlp()
    learner_of(model, adamw(model, structure_lr=0.0)).remove()  # projection does not ask for it
    with raises_value_error("rate", "0", "`max_shrinkage`"):
        learner_of(model, adamw(model, structure_lr=0.0), budget=Budget(relative_cost=0.3, method="shrinkage"))


def test_the_threshold_of_shrinkage_is_the_present_rate_of_the_widths():
    model = still_model()
    optimizer = adamw(model, structure_lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for lr in (0.2, 0.1, 0.05):
        assert shrunk_by(model, optimizer) == pytest.approx([0.1 * lr] * 2, rel=1e-4)
        scheduler.step()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_layer_shrinks_by_the_rate_of_its_own_group(as_tensor):
    model = still_model()
    rates = [torch.tensor(lr) if as_tensor else lr for lr in (0.2, 0.05)]
    groups = [
        {"params": list(layer.parameters()), "lr": lr} for layer, lr in zip(gaudi_layers(model), rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, foreach=False)
    assert shrunk_by(model, optimizer) == pytest.approx([0.02, 0.005], rel=1e-4)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.1) if as_tensor else 0.1
    assert shrunk_by(model, optimizer) == pytest.approx([0.02, 0.01], rel=1e-4)


def test_rates_are_found_after_the_optimizer_was_restored():
    """Loading replaces the groups of an optimizer by new ones."""
    model = still_model()
    optimizer = adamw(model, structure_lr=0.2)
    learner = learner_of(model, optimizer, budget=Budget(relative_cost=0.01, method="shrinkage"), total_steps=100)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[-1]["lr"] = 0.0
    before = snapshot(model)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert not [name for name in changed(model, before) if "width" in name] and learner.step == 1


def test_content_and_structure_may_have_an_optimizer_each():
    model = mlp()
    *content, structure = param_groups(model, lr=0.05, structure_lr=0.02)
    optimizers = [torch.optim.SGD(content, momentum=0.9), torch.optim.AdamW([structure])]
    learner = learner_of(model, optimizers)
    assert learner.optimizer is optimizers[1]
    for _ in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(ROWS) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert learner.step == 8 and learner.relative_cost <= 0.3


def test_of_several_optimizers_with_widths_the_last_one_counts_and_each_gives_its_rate():
    model = still_model()
    first, second = gaudi_layers(model)
    optimizers = [torch.optim.AdamW(first.parameters(), 0.2), torch.optim.AdamW(second.parameters(), 0.05)]
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    assert shrunk_by(model, [*optimizers, plain]) == pytest.approx([0.02, 0.005], rel=1e-4)


def test_only_real_steps_count_under_gradient_accumulation():
    model = mlp()
    learner = learner_of(model, total_steps=4)
    for micro in range(12):
        before = snapshot(model)
        (model(ROWS) - 1).square().mean().div(3).backward()
        if micro % 3 == 2:
            learner.optimizer.step()
            learner.optimizer.zero_grad()
        else:
            assert not changed(model, before)
        assert learner.step == (micro + 1) // 3
    assert learner.relative_cost <= 0.3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad_step", [0, 2], ids=["first", "third"])
def test_a_step_that_the_scaler_skips_changes_nothing(fused, method, bad_step):
    """A fused optimizer is called all the same, and learns from the scaler that it must not move."""
    model = mlp()
    budget = Budget(relative_cost=0.3, method=method, max_shrinkage=2.0, end=0.5)
    learner = learner_of(model, adamw(model, fused=fused), budget=budget, total_steps=6)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(7):
        learner.optimizer.zero_grad()
        scaler.scale((model(ROWS) - 1).square().mean()).backward()
        if step == bad_step:
            model[0].u.grad[0, 0, 0] = math.inf
        before, steps = snapshot(model), learner.step
        scaler.step(learner.optimizer)
        scaler.update()
        assert learner.step == steps + (step != bad_step)
        assert bool(changed(model, before)) == (step != bad_step)
    assert learner.step == 6 and learner.relative_cost <= 0.3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rounding", [True, False])
def test_a_step_reads_no_value_on_the_host(method, rounding, monkeypatch):
    """Here by watching for reads; tests/gpu asks the device itself. On the CPU one read saves a search, so not here."""
    monkeypatch.setattr(prox, "can_read_values", lambda *_: False)
    model = mlp(rounding=rounding, num_blocks=4)
    model[0].requires_grad_(False)  # its rate is a number beside the tensors of the others
    groups = [group | {"lr": torch.tensor(group["lr"])} for group in param_groups(model, lr=0.01)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    learner = learner_of(model, optimizer, budget=Budget(relative_cost=0.9, method=method), sigma=SOFT)
    train(learner, model, steps=1)
    with no_values_read():
        learner._after_step()
    assert learner.step == 2


@pytest.mark.parametrize("sigma", [SigmaSchedule(1.0, 33.3, end=0.8, sharp=0.0), SigmaSchedule.constant(33.3), SHARP])
def test_it_is_done_once_budget_and_sigma_are_at_their_last_values(sigma):
    model = mlp()
    learner = learner_of(model, budget=Budget(relative_cost=0.3, end=0.55), sigma=sigma, total_steps=20)
    steps = []
    for step in range(1, 21):
        one_step(model, learner.optimizer)
        steps += [step] if learner.is_done else []
    first = (
        11 if sigma.is_constant else 19 if sigma is SHARP else 16
    )  # 0.55 * 20 is above 11, 11 / 20 is not above 0.55
    assert steps == list(range(first, 21))


# -- what it tells -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("method", ["projection", "shrinkage"])
def test_it_follows_a_model_that_is_moved_after_it_was_made(done, method):
    """Trainers move models late. The meta device stands for a GPU: whatever reads a value would fail there."""
    model = mlp()
    learner = learner_of(model, budget=Budget(relative_cost=0.3, method=method), example_inputs=ROWS)
    train(learner, model, steps=done)
    before = list(model.parameters())
    model.to("meta")
    moved = dict(zip(before, model.parameters(), strict=True))  # on a GPU they stay the same objects
    for group in learner.optimizer.param_groups:
        group["params"] = [moved[parameter] for parameter in group["params"]]
    learner.optimizer.state.update({moved[p]: learner.optimizer.state.pop(p) for p in before[: done * len(before)]})
    with no_values_read():
        learner._after_step()
    parts = (learner, learner._widths, learner._rates, learner._prices, learner._prices.budget)
    tensors = {name: value for part in parts for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 12 and {value.device.type for value in tensors.values()} == {"meta"}


def test_metrics_tell_cost_blocks_widths_sigma_and_threshold():
    model, found = mlp(), []
    learner = learner_of(model, callback=found.append)
    train(learner, model)
    assert [m["step"] for m in found] == list(range(1, 9)) and found[-1] == learner.metrics()
    assert found[-1].keys() == {"step", "relative_cost", "live_blocks", "mean_width", "sigma", "threshold"}
    assert found[-1]["relative_cost"] == learner.relative_cost
    assert found[-1]["sigma"] == math.inf and 1 < found[0]["sigma"] < found[1]["sigma"]
    live = [layer.structure.live for layer in gaudi_layers(model)]
    assert found[-1]["live_blocks"] == sum(int(one.sum()) for one in live)
    widths = [
        torch.stack([s.row_width / m.out_features, s.col_width / m.in_features])[:, s.live]
        for m in gaudi_layers(model)
        for s in [m.structure]
    ]
    assert found[-1]["mean_width"] == pytest.approx(float(torch.cat(widths, 1).mean()))
    assert max(m["threshold"] for m in found) > 0


def test_metrics_of_a_model_without_a_live_block():
    model = mlp()
    learner = learner_of(model, budget=Budget(relative_cost=0.001), total_steps=1)
    train(learner, model)
    metrics = learner.metrics()
    assert metrics["live_blocks"] == metrics["mean_width"] == metrics["relative_cost"] == 0


def test_the_callback_is_called_every_so_many_steps():
    model, found = mlp(), []
    train(learner_of(model, callback=found.append, every=3), model)
    assert [m["step"] for m in found] == [3, 6]


def test_a_learner_that_was_removed_does_nothing_and_makes_room_for_another():
    model = mlp()
    first = learner_of(model)
    train(first, model, steps=2)
    first.remove()
    first.remove()
    before = model[0].sigma.clone()
    one_step(model, first.optimizer)
    assert first.step == 2 and torch.equal(model[0].sigma, before)
    assert "gblr_learner" not in first.optimizer.state_dict()
    second = learner_of(model, first.optimizer)
    train(second, model)
    assert second.step == 8 and second.relative_cost <= 0.3


# -- counting positions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_positions_are_counted_in_the_first_step_as_on_example_inputs(seed):
    counted = []
    for inputs in (None, IMAGES):
        model = mixed_model(seed)
        learner = learner_of(model, example_inputs=inputs)
        train(learner, model, IMAGES, steps=1)
        counted.append(torch.tensor(learner.state_dict()["positions"]))
    assert torch.equal(counted[0], counted[1] * len(IMAGES))
    assert (counted[1] == torch.tensor([layer.positions for layer in cost(model, IMAGES).converted])).all()


def test_compiled_models_learn_without_a_graph_break_and_without_compiling_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    bare = mixed_model(1)
    with shapes_unchecked():
        model = torch.compile(bare, backend="aot_eager", fullgraph=True)
        learner = learner_of(model, adamw(bare), budget=Budget(relative_cost=0.4))
        train(learner, model, IMAGES, steps=2)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(learner, model, IMAGES, steps=6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs <= 2
        reported = learner.relative_cost
        found = hardened(bare.eval(), IMAGES)
    assert learner.step == 8 and reported == pytest.approx(found.relative_cost) and reported <= 0.4
    positions = [layer.positions * len(IMAGES) for layer in found.converted]
    assert learner.state_dict()["positions"] == positions


def test_compiled_models_can_be_counted_on_example_inputs():
    torch._dynamo.reset()
    with shapes_unchecked():
        model = torch.compile(mixed_model(1), backend="eager", fullgraph=True)
        budget = Budget(relative_cost=0.5, scope="model")
        learner = learner_of(model, budget=budget, example_inputs=IMAGES)
    plain = learner_of(mixed_model(1), budget=budget, example_inputs=IMAGES)
    assert learner.state_dict() == plain.state_dict()


# -- what it refuses ---------------------------------------------------------------------------------------------


def test_a_model_without_gaudi_layers_is_refused():
    model = nn.Linear(3, 3)
    with raises_value_error("Gaudi", "`gblr.convert_(model, GaudiConfig(...))`"):
        learner_of(model, torch.optim.AdamW(model.parameters()))


def test_an_optimizer_without_the_widths_is_refused():
    model = mlp()
    content = [p for layer in gaudi_layers(model) for p in layer.content_parameters()]
    with raises_value_error("widths", "2", "'0'", "`gblr.param_groups(model, ...)`"):
        learner_of(model, torch.optim.AdamW(content))


def test_frozen_widths_alone_are_refused():
    model = mlp()
    for layer in gaudi_layers(model):
        layer.width_frac.requires_grad_(False)
    with raises_value_error("frozen"):
        learner_of(model)


def test_a_second_learner_on_one_optimizer_is_refused():
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=4)
    before, hooks = snapshot(model), [len(layer._forward_hooks) for layer in gaudi_layers(model)]
    with raises_value_error("StructureLearner", "`remove()`"):
        learner_of(model, learner.optimizer)
    assert not changed(model, before) and model[0].sigma > 1
    assert hooks == [len(layer._forward_hooks) for layer in gaudi_layers(model)]
    train(learner, model, steps=4)
    assert learner.step == 8 and learner.relative_cost <= 0.3


@pytest.mark.parametrize(("name", "bad"), [("total_steps", 0), ("total_steps", -3), ("every", 0)])
def test_numbers_of_steps_below_one_are_refused(name, bad):
    with raises_value_error(f"`{name}`", bad):
        learner_of(mlp(), **{name: bad})


@pytest.mark.parametrize("sigma", [SHARP, None, SigmaSchedule.constant(math.inf)])
def test_real_widths_with_a_sharp_end_are_refused(sigma):
    model = nn.Sequential(GaudiLinear(12, 12), GaudiLinear(12, 8, rounding=False))
    with raises_value_error("`rounding=False`", "'1'", "inf"):
        learner_of(model, sigma=sigma)


def test_something_that_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"`optimizer` must be a torch optimizer.*got int"), shapes_unchecked():
        learner_of(mlp(), 3)


def test_a_budget_out_of_reach_is_refused_at_once_where_it_can_be():
    with raises_value_error("cannot", "parameters"):
        model = mlp()
        train(learner_of(model, budget=Budget(num_params=3)), model)


def test_a_layer_that_is_thawed_and_given_to_the_optimizer_later_is_cut_too():
    model = mlp()
    late = gaudi_layers(model)[1]
    late.requires_grad_(False)
    learner = learner_of(model, budget=Budget(relative_cost=0.5), total_steps=20)
    train(learner, model, steps=3)
    late.requires_grad_(True)
    with pytest.raises(ValueError, match="does not hold the widths of 1 layers, '2' first"):
        train(learner, model, steps=1)
    learner.optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.02, "name": "late"})
    train(learner, model, steps=16)
    assert learner.is_done and 0.45 < learner.relative_cost <= 0.5
    assert late.width_frac.mean() < 0.9
