import copy
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gblr.conversion.calibration import calibrate
from gblr.conversion.convert import convert_
from gblr.conversion.cost import cost
from gblr.conversion.filters import linear_layers
from gblr.experiments import structures
from gblr.experiments import train_run as module
from gblr.experiments.cifar10_finetune import KINDS as FINETUNED
from gblr.experiments.datasets import generated
from gblr.experiments.networks import NETWORKS
from gblr.experiments.run import BASELINES, DENSE, LEARNED
from gblr.experiments.step import uncompiled
from gblr.experiments.store import plain
from gblr.experiments.structures import monarch_costs, structure_
from gblr.experiments.text_models import TEXT_MODELS
from gblr.experiments.train_run import Paused, tiny_run, train_run
from gblr.fitting.config import BlastConfig, MonarchConfig, PixelflyConfig
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule
from gblr.models.mixer import Mixer
from gblr.models.vit import ViT
from tests.shape_hook import shapes_unchecked

COSTS = (0.3, 0.15, 0.08)
TOLERANCE = 0.05  # every method comes that near to the cost asked, from below


@pytest.fixture(scope="module")
def task():
    return generated()


@pytest.fixture
def quick_fits(monkeypatch):
    """Costs do not depend on how long a fit is refined."""
    monkeypatch.setitem(structures._BASELINES, "blast", lambda c, **more: BlastConfig(c, steps=1, **more))
    monkeypatch.setitem(structures._BASELINES, "pixelfly", lambda c, **more: PixelflyConfig(c, steps=1, **more))


def stop_after(monkeypatch, epochs):
    """A clock that ticks once a look; an epoch looks twice. Returns the deadline to give."""
    ticks = itertools.count()
    clock = SimpleNamespace(time=lambda: next(ticks), perf_counter=lambda: 0.0)
    monkeypatch.setattr(module, "time", clock)
    return 2 * epochs - 0.5


@pytest.mark.parametrize("kind", [LEARNED[0], BASELINES[0], FINETUNED[3]], ids=lambda kind: kind.label)
def test_a_run_that_was_paused_ends_as_if_it_had_not_been(kind, task, tmp_path, monkeypatch):
    run = replace(tiny_run(kind.run("vit384", 0.3), 4), epochs=4)
    if kind is FINETUNED[3]:
        run = replace(run, source="weights", calibration=32)
    whole = train_run(run, task).record
    state = tmp_path / "a.state.pt"
    with pytest.raises(Paused, match="after epoch 2 of 4"):
        train_run(run, task, state=state, deadline=stop_after(monkeypatch, 2))
    assert state.exists() and not list(tmp_path.glob(".*"))
    lines = []
    parts = train_run(run, task, state=state, say=lines.append).record
    assert lines[0] == "goes on after epoch 2"
    for key in ("test", "train", "curve", "reached_cost", "before", "by_type", "layers", "target"):
        assert parts[key] == whole[key], key


def test_runs_that_differ_in_their_training_share_a_fit(task, tmp_path, monkeypatch):
    fitted = FINETUNED[3].run("vit384", 0.3, source="weights", calibration=32)
    run = replace(tiny_run(fitted), lr=1e-3)
    first, other = (train_run(run, task, state=tmp_path / f"{name}.state").record for name in "ab")
    assert len(list((tmp_path / "fits").iterdir())) == 1
    for key in ("test", "curve", "before", "dense_start", "fit_seconds", "reached_cost"):
        assert first[key] == other[key], key  # the time as well: it was not fitted again
    faster = train_run(replace(run, lr=1e-2), task, state=tmp_path / "c.state").record
    assert faster["fit_seconds"] == first["fit_seconds"] and faster["curve"] != first["curve"]
    for unlike in (replace(run, relative_cost=0.2), replace(run, held_out=16), replace(run, block_rank=4)):
        assert unlike.fit_key != run.fit_key
    assert replace(run, seed=3, epochs=9, structure_lr=1e-3).fit_key == run.fit_key


def test_a_fit_of_other_weights_is_not_taken(task, tmp_path):
    fitted = tiny_run(FINETUNED[3].run("vit384", 0.3, source="weights", calibration=32))
    train_run(fitted, task, state=tmp_path / "a.state")
    other = replace(fitted, seed=1)  # a tiny network starts from the random weights of its seed
    shared = train_run(other, task, state=tmp_path / "b.state").record
    assert shared["before"] == train_run(other, task).record["before"]


def test_a_baseline_that_is_lost_in_training_has_a_result(task):
    record = train_run(replace(tiny_run(BASELINES[0].run("vit384", 0.3)), lr=1e30), task).record
    assert math.isnan(record["test"]["loss"]) and {row["rank"] for row in record["layers"].values()} == {None}


def test_results_are_plain_json_with_everything_a_table_needs(task):
    record = train_run(tiny_run(LEARNED[0].run("vit384", 0.3)), task).record
    stored = json.loads(json.dumps(plain(record), allow_nan=False))
    assert stored["curve"]["epoch"] == [1, 2] and stored["curve"]["sigma"][-1] == "inf"
    assert all(len(column) == 2 for column in stored["curve"].values())
    assert {"accuracy", "loss"} == set(stored["test"]) == set(stored["train"])
    assert set(stored["by_type"]) == {"q", "k", "v", "fc1", "fc2"}
    for found in stored["by_type"].values():
        assert found["min"] <= found["mean"] <= found["max"] <= found["dense"]
    assert stored["reached_cost"] <= 0.3 and stored["soft"]["accuracy"] == stored["test"]["accuracy"]
    assert all(layer["rank"] <= 32 for layer in stored["layers"].values())


def test_one_seed_gives_one_result_and_another_seed_another(task):
    run = tiny_run(DENSE.run("vit384", 1.0))
    first, again, other = (train_run(replace(run, seed=seed), task).record["test"]["loss"] for seed in (0, 0, 1))
    assert first == again != other


def test_held_out_images_are_not_trained_on(task):
    part = task.holding_out(16)
    assert len(part.train) == 48 and len(part.test) == 16
    assert torch.equal(part.test.images, task.train.images[48:])


@pytest.mark.parametrize("asked", COSTS)
@pytest.mark.parametrize("kind", [*BASELINES, *LEARNED[:2]], ids=lambda kind: kind.label)
@pytest.mark.parametrize(("name", "make"), [("vit384", lambda: ViT(depth=1)), ("mixer", lambda: Mixer(depth=1))])
def test_all_methods_have_equal_cost(name, make, kind, asked, quick_fits):
    if kind.method == "blast" and (name, asked) == ("mixer", 0.08):
        pytest.skip("the slowest fit, of a cost that other cases show")
    torch.manual_seed(0)  # of 16,384 random weights the deviation itself may be 1 % off
    model, example = make(), torch.zeros(1, 3, 32, 32)
    structure_(model, replace(kind.run(name, asked), start_cost=None), NETWORKS[name].where, example)
    assert (1 - TOLERANCE) * asked <= cost(model, example).relative_cost <= asked * (1 + 1e-6)
    for layer in model.modules():
        if isinstance(layer, MatrixModule):  # outputs have the variance that nn.Linear gives them
            assert float(layer.weight.detach().std()) == pytest.approx(1 / math.sqrt(3 * layer.in_features), rel=0.01)


def test_monarch_may_cost_more_in_one_shape_where_it_costs_less_in_another():
    mults = {(384, 384): 3.0 * 384**2, (1536, 384): 8.0 * 384**2}
    found = monarch_costs(mults, 0.3)
    assert found[1536, 384] == pytest.approx(1.25 / 4) and found[384, 384] <= 0.3
    assert sum(found[shape] * m for shape, m in mults.items()) / sum(mults.values()) > 0.29
    with pytest.raises(ValueError, match="no Monarch"):
        monarch_costs({(8, 8): 64.0}, 0.1)


def test_monarch_is_fitted_to_what_the_dense_model_sees_in_layers_of_every_shape(generator):
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 4))
    batches = [torch.randn(64, 16, generator=generator)]
    first, last = copy.deepcopy(net), copy.deepcopy(net)
    run = replace(BASELINES[1].run("vit384", 0.4), source="weights")
    where = linear_layers(include=("0", "2"))
    assert run.method == "monarch"
    structure_(first, run, where, batches[0][:1], calibrate(first, batches, where))
    share = float(cost(first, batches[0][:1]).layers[1].relative_cost)
    convert_(last, MonarchConfig(share), linear_layers(include=("2",)), calibration=batches)
    assert isinstance(first[0], MatrixModule) and not isinstance(last[0], MatrixModule)
    torch.testing.assert_close(first[2].weight, last[2].weight)


def test_monarch_takes_fused_projections_and_transposed_weights():
    gpt2 = TEXT_MODELS["gpt2-imdb"]
    model = gpt2.build(64, True)
    structure_(model, BASELINES[1].run("gpt2-imdb", 0.3), gpt2.where, torch.zeros(1, 8, dtype=torch.long))
    kinds = {name: type(layer) for name, layer in model.transformer.h[0].named_modules() if name.count(".") == 1}
    assert kinds.pop("attn.c_attn") is SplitLinear
    assert all(issubclass(kinds[name], MatrixModule) for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"))


def test_a_cost_of_the_whole_model_leaves_room_for_its_dense_part(task):
    run = replace(tiny_run(LEARNED[0].run("resnet20", 0.5)), scope="model", epochs=4)
    record = train_run(run, task).record
    assert record["target"] < 0.5 and 0.45 < record["model_relative_cost"] <= 0.5


def test_a_whole_model_cannot_cost_less_than_its_dense_part(task):
    with pytest.raises(ValueError, match="stay dense"):
        train_run(replace(tiny_run(BASELINES[0].run("resnet20", 0.02)), scope="model"), task)


@pytest.mark.parametrize("kind", BASELINES[:3], ids=lambda kind: kind.label)
def test_blocks_compile_once_for_all_and_give_the_same(kind):
    """Monarch and Pixelfly run eagerly inside compiled blocks; all blocks share their graphs."""
    model, x = ViT(width=32, depth=3, num_heads=2, mlp_ratio=2.0), torch.randn(4, 3, 32, 32)
    with shapes_unchecked(), torch.no_grad():
        structure_(model, kind.run("vit384", 0.3), NETWORKS["vit384"].where, x[:1])
        plain = model(x)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        torch.testing.assert_close(model(x), plain)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
        with uncompiled(model):
            assert all(block._compiled_call_impl is None for block in model.blocks)
        assert all(block._compiled_call_impl is not None for block in model.blocks)
