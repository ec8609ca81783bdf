"""`gblr.train` on one process: it learns, meets the budget, takes any kind of data and leaves a plain model."""

import copy
import dataclasses
import math
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gblr
from gblr.layers.gaudi import GaudiModule
from gblr.training import assembly
from gblr.training.loop import train
from gblr.training.train_config import TrainConfig
from tests.helpers import assert_close
from tests.shape_hook import shapes_unchecked
from tests.training.cases import BUDGET, make_config, make_data, make_net, without_seconds

DATA, TEST = make_data(), make_data(50)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_it_learns_and_meets_the_budget():
    net = make_net()
    result = train(net, DATA, TEST, make_config(epochs=12))
    first, last = result.history[0], result.history[-1]
    assert len(result.history) == 12 and last["step"] == 60 and last["epoch"] == 12.0
    assert last["train_loss"] < 0.5 * first["train_loss"] and last["accuracy"] > 0.85
    assert result.relative_cost == last["relative_cost"] <= 0.3 and last["sigma"] == math.inf
    expected = net(TEST.tensors[0])
    gblr.harden_(net)
    assert_close(net(TEST.tensors[0]), expected)  # exact, as the masks are sharp at the end
    assert result.seconds > 0


def test_rows_count_as_the_paper_and_the_cost_report_do():
    net = make_net()
    result = train(net, DATA, None, make_config())
    gblr.harden_(net)
    assert gblr.cost(net, DATA.tensors[0]).relative_cost == pytest.approx(result.relative_cost)


def test_a_model_without_gaudi_layers_trains_under_the_same_settings():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    result = train(net, DATA, TEST, make_config(epochs=10))
    assert result.relative_cost is None and result.best > 0.7
    assert "relative_cost" not in result.history[0]


def test_without_a_budget_structure_stays_and_may_be_trained_afterwards():
    """Nothing would keep the cost: fitted models ended above the one they were fitted to."""
    net = make_net()
    before = state(net)
    train(net, DATA, None, make_config(budget=None))
    layer = net.blocks[0].fc
    for name in ("width_frac", "location_frac"):
        assert torch.equal(getattr(layer, name), before[f"blocks.0.fc.{name}"])
        assert getattr(layer, name).requires_grad
    assert not torch.equal(layer.u, before["blocks.0.fc.u"])


def test_one_seed_gives_the_same_bits_twice():
    config = make_config(mixup=0.2, epochs=2)
    runs = []
    for _ in range(2):
        net = make_net(dropout=0.1)
        torch.rand(7)  # whatever was drawn before
        runs.append((train(net, DATA, TEST, config), state(net)))
    assert without_seconds(runs[0][0].history) == without_seconds(runs[1][0].history)
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name]), name


def test_accumulating_two_batches_is_one_of_twice_the_size():
    nets = make_net(), make_net()
    results = [
        train(net, DATA, TEST, make_config(epochs=3, batch_size=size, accumulate=parts))
        for net, size, parts in zip(nets, (32, 16), (1, 2), strict=True)
    ]
    for row, other in zip(*(without_seconds(result.history) for result in results), strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5)  # measured: 1e-7
    for name, value in nets[0].state_dict().items():
        torch.testing.assert_close(value, nets[1].state_dict()[name], rtol=1e-5, atol=1e-5)


def test_batches_that_make_up_no_whole_step_are_left_out():
    result = train(make_net(), DATA, None, make_config(epochs=2, batch_size=32, accumulate=2))
    assert result.history[-1]["step"] == 4  # 5 batches: 2 steps in an epoch


def test_evaluation_changes_nothing_in_training():
    nets = make_net(dropout=0.1), make_net(dropout=0.1)
    train(nets[0], DATA, None, make_config(epochs=2))
    train(nets[1], DATA, TEST, make_config(epochs=2, eval_every=0.4))
    for name, value in nets[0].state_dict().items():
        assert torch.equal(value, nets[1].state_dict()[name]), name


def test_evaluation_counts_every_sample_once():
    net = make_net()
    result = train(net, DATA, TEST, make_config(epochs=1, batch_size=32, budget=None))
    x, y = TEST.tensors  # 50: a batch of 32 and a rest
    with torch.no_grad():
        logits = net(x)
    assert result.history[-1]["accuracy"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert result.history[-1]["loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["loader", "list"])
def test_loaders_and_lists_of_batches_do_as_well_as_data_sets(kind):
    loader = DataLoader(DATA, batch_size=32, shuffle=kind == "loader", drop_last=True)
    data = loader if kind == "loader" else list(loader)
    result = train(make_net(), data, DataLoader(TEST, batch_size=20), make_config(epochs=4))
    assert result.history[-1]["accuracy"] > 0.5 and result.history[-1]["step"] == 20


def test_a_loss_of_ones_own_needs_no_labels():
    x = DATA.tensors[0]
    net = make_net()

    def distance(model, batch):
        return (model(batch) - batch[:, :4]).square().mean()

    result = train(net, [x[:32], x[32:64]], [x[64:]], make_config(epochs=20), loss=distance)
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    assert result.best == min(row["loss"] for row in result.history if row["sigma"] == math.inf)


def test_an_evaluation_of_ones_own_gives_sums():
    def sums(model, batch):
        x, y = batch
        top = model(x).topk(2, dim=-1).indices
        return {"top2": (top == y[:, None]).any(1).sum(), "count": len(y)}

    result = train(make_net(), DATA, TEST, make_config(epochs=5, budget=None), evaluate=sums)
    assert 0.7 < result.history[-1]["top2"] <= 1 and result.best is None
    with pytest.raises(ValueError, match=r"as 'count'; got \['loss'\]"):
        train(make_net(), DATA, TEST, make_config(epochs=1), evaluate=lambda model, batch: {"loss": 1.0})


def test_images_with_mixup_cutmix_and_smoothing():
    torch.manual_seed(0)
    images, labels = torch.randn(32, 3, 6, 6), torch.arange(32) % 4
    images[:, 0] += 2 * labels[:, None, None]
    net = nn.Sequential(gblr.GaudiConv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    data = TensorDataset(images, labels)
    config = make_config(epochs=16, batch_size=16, mixup=0.4, cutmix=1.0, label_smoothing=0.1, ema=0.9)
    result = train(net, data, data, config)
    assert result.history[-1]["accuracy"] > 0.8 and result.relative_cost <= 0.3


def test_the_budget_of_a_whole_model_is_counted_on_the_first_batch():
    net = make_net()
    train(net, DATA, None, make_config(budget=gblr.Budget(relative_cost=0.7, scope="model")))
    gblr.harden_(net)
    assert gblr.cost(net, DATA.tensors[0]).model_relative_cost <= 0.7


def test_half_precision_keeps_parameters_and_structure_in_full():
    net = make_net()
    seen = []

    def loss(model, batch):
        logits = model(batch[0])
        seen.append((net.blocks[0].norm.weight.dtype, torch.is_autocast_enabled("cpu")))
        return nn.functional.cross_entropy(logits, batch[1])

    result = train(net, DATA, None, make_config(precision="bf16", epochs=3), loss=loss)
    assert {p.dtype for p in net.parameters()} == {torch.float32} and seen[0] == (torch.float32, False)
    plain = train(make_net(), DATA, None, make_config(epochs=3))
    assert plain.history[-1]["train_loss"] != result.history[-1]["train_loss"]
    assert plain.history[-1]["train_loss"] == pytest.approx(result.history[-1]["train_loss"], rel=0.05)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_model_is_given_back_as_a_plain_module(precision):
    net = make_net().eval()
    names = set(vars(net))
    train(net, DATA, None, make_config(epochs=1, precision=precision))
    assert set(vars(net)) == names and not net.training and not net.blocks[0].training
    twin = copy.deepcopy(net)
    assert torch.equal(twin(TEST.tensors[0]), net(TEST.tensors[0]))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_forward_of_the_instances_own_is_kept(precision):
    net = make_net()
    plain = net.forward
    net.forward = lambda x: 2 * plain(x)
    own = net.forward
    train(net, DATA, None, make_config(epochs=1, precision=precision))
    assert vars(net)["forward"] is own
    assert torch.equal(net(TEST.tensors[0]), 2 * plain(TEST.tensors[0]))


@pytest.mark.parametrize("part", ["param_groups", "Average"])
def test_a_model_that_cannot_be_prepared_is_as_before(part, monkeypatch):
    net = make_net().eval()
    before, names = state(net), set(vars(net))

    def fails(*_):
        raise ValueError("no")

    monkeypatch.setattr(assembly, part, fails)
    with pytest.raises(ValueError, match="no"):
        config = make_config(budget=None, precision="bf16", channels_last=True, ema=0.9)
        train(net, DATA, None, config)
    assert set(vars(net)) == names and not net._forward_pre_hooks
    assert not any(module.training for module in net.modules())
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def normed_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), gblr.GaudiLinear(16, 4))


def test_modules_keep_their_modes():
    net = normed_net()
    net[1].eval()  # statistics that are meant to stay
    train(net, DATA, TEST, make_config(epochs=1))
    assert [module.training for module in net.modules()] == [True, True, False, True]
    assert net[1].num_batches_tracked == 0
    net.eval()[0].train()
    train(net, DATA, TEST, make_config(epochs=1))
    assert [module.training for module in net.modules()] == [False, True, False, False]
    assert net[1].num_batches_tracked == 5  # a model in evaluation mode is trained as a whole


def test_gradients_of_structure_are_not_clipped_with_the_rest():
    """Adam without momentum divides its scale out, but for the widths' part in the norm of all."""
    runs = []
    for clip in (None, 1e-9):
        net = make_net()
        train(net, DATA, None, make_config(max_steps=1, warmup=0.0, clip_norm=clip, lr=1e-3, weight_decay=0.0))
        runs.append(state(net))
    start = state(make_net())
    moved = [(run["stem.weight"] - start["stem.weight"]).abs().max() for run in runs]
    assert moved[1] < 0.2 * moved[0]  # Adam's eps is 1e-8
    assert torch.equal(*(run["blocks.0.fc.location_frac"] for run in runs))


def test_frozen_parts_stay_frozen():
    net = make_net()
    net.stem.requires_grad_(False)
    before = state(net)
    train(net, DATA, None, make_config(epochs=1, ema=0.5))
    assert torch.equal(net.stem.weight, before["stem.weight"])
    assert not torch.equal(net.head.weight, before["head.weight"])


def test_the_best_model_is_one_that_meets_the_budget(tmp_path):
    net = make_net()
    config = make_config(epochs=10, budget=BUDGET, sigma=gblr.SigmaSchedule(1.0, 20.0, end=0.5, sharp=0.4))
    result = train(net, DATA, TEST, config, out=tmp_path)
    done = [row for row in result.history if row["sigma"] == math.inf]
    assert len(done) == 5 and result.best == max(row["accuracy"] for row in done)  # from step 30 of 50 on
    best = gblr.load_(make_net(seed=3), tmp_path / "best")
    with torch.no_grad():
        accuracy = (best(TEST.tensors[0]).argmax(1) == TEST.tensors[1]).float().mean().item()
    assert accuracy == pytest.approx(result.best)
    gblr.harden_(best)
    assert gblr.cost(best, TEST.tensors[0]).relative_cost <= 0.3


def test_a_best_model_is_kept_at_a_last_sigma_that_no_binary_fraction_is(tmp_path):
    sigma = gblr.SigmaSchedule(1.0, 33.3, end=0.8, sharp=0.0)
    result = train(make_net(), DATA, TEST, make_config(epochs=5, sigma=sigma), out=tmp_path)
    assert result.best == max(row["accuracy"] for row in result.history[3:])
    assert (tmp_path / "best" / "metrics.json").exists()


@pytest.mark.parametrize("losses", [[1.0, math.nan, 2.0, 3.0], [math.nan, math.inf, 2.0, 1.0]])
def test_an_evaluation_that_is_no_number_is_never_the_best(losses):
    values = iter(losses)
    config = make_config(epochs=4, batch_size=160, budget=None)
    result = train(make_net(), DATA, [torch.zeros(1)], config, evaluate=lambda *_: {"loss": next(values), "count": 1})
    assert result.best == 1.0 and len(result.history) == 4


def test_epochs_may_be_reported_in_parts():
    result = train(make_net(), DATA, TEST, make_config(epochs=1.4, eval_every=0.6))
    assert [row["step"] for row in result.history] == [3, 6, 7]


# -- models that know their loss --------------------------------------------------------------------------------------


def converted(model):
    gblr.convert_(model, gblr.GaudiConfig(relative_cost=0.8, init="low_rank", refine="none"))
    return model


def test_a_language_model_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = converted(transformers.GPT2LMHeadModel(config))
    tokens = torch.arange(64 * 8).view(64, 8) * 3 % 32
    batches = [{"input_ids": part, "labels": part} for part in tokens.split(16)]
    result = train(model, batches, batches, make_config(epochs=8, budget=gblr.Budget(relative_cost=0.5)))
    last = result.history[-1]
    assert result.relative_cost <= 0.5 and last["loss"] < 0.7 * result.history[0]["loss"]
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"])) and result.best == last["loss"]


def test_batches_without_a_label_do_not_count_in_evaluation():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x, labels):
            logits = self.head(x)
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
            return types.SimpleNamespace(loss=loss, logits=logits)

    for shape in ((6,), (6, 3)):  # of samples, of positions
        x, labels = torch.randn(*shape, 8), torch.randint(0, 4, shape)
        batches = [{"x": x, "labels": labels}, {"x": x, "labels": torch.full_like(labels, -100)}]
        torch.manual_seed(0)
        model = Classifier()
        result = train(model, batches[:1], batches, TrainConfig(epochs=1))
        expected = model(**batches[0]).loss.item()
        assert result.best is not None and result.history[-1]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_text_classifier_of_hugging_face_on_a_data_set_of_dicts():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = converted(transformers.BertForSequenceClassification(config))
    samples = [{"input_ids": [i % 20] * 4, "label": i % 2} for i in range(40)]

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return len(samples)

        def __getitem__(self, index):
            return samples[index]

    def collate(rows):
        ids = torch.tensor([row["input_ids"] for row in rows])
        return transformers.BatchEncoding({"input_ids": ids, "labels": torch.tensor([row["label"] for row in rows])})

    config = make_config(epochs=10, batch_size=8, budget=gblr.Budget(relative_cost=0.5))
    result = train(model, Samples(), Samples(), config, collate=collate)
    assert result.history[-1]["accuracy"] > 0.9 and "perplexity" not in result.history[-1]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        ([torch.zeros(4, 8)], {}, TypeError, r"must be \(inputs, labels\) or a mapping"),
        ([(torch.zeros(8), 1)], {}, TypeError, "one for each sample; got 1. .* DataLoader"),
        ([(torch.zeros(8), torch.tensor(1))], {}, TypeError, r"one for each sample; got tensor\(1\)"),
        ([{"input": torch.zeros(4, 8)}], {}, ValueError, "returned no `.loss`"),
        ([{"input": torch.zeros(4, 8)}], {"mixup": 0.1}, ValueError, "got a mapping"),
        ([(torch.zeros(4, 8), torch.zeros(4).long())], {"cutmix": 1.0}, ValueError, r"needs images .*; got \(4, 8\)"),
    ],
)
def test_batches_that_it_cannot_use_are_refused(data, options, error, words):
    torch.manual_seed(0)
    with pytest.raises(error, match=words):
        train(nn.Linear(8, 4), data, None, make_config(**options))


def test_a_loss_of_ones_own_excludes_the_built_in_tricks():
    with pytest.raises(ValueError, match="do them in `loss`"):
        train(make_net(), DATA, None, make_config(mixup=0.1), loss=lambda model, batch: 0.0)


def test_no_module_is_no_model():
    with shapes_unchecked(), pytest.raises(TypeError, match="`model` must be a torch module; got str"):
        train("net", DATA)


def test_half_precision_with_scaling_needs_a_gpu():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="on a CPU use 'bf16' or 'no'"):
        train(make_net(), DATA, None, make_config(precision="fp16"))


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_checkpoint(tmp_path):
    calls = []

    def loss(model, batch):
        calls.append(1)
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return value * math.nan if len(calls) > 7 else value

    with pytest.raises(FloatingPointError, match="nan at step 10; lower `lr`"):
        train(make_net(), DATA, None, make_config(), out=tmp_path, loss=loss)
    kept = gblr.load_(make_net(seed=2), tmp_path / "last")
    assert all(bool(value.isfinite().all()) for value in kept.parameters())


def test_accelerate_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"pip install 'gblr\[hf\]'"):
        train(make_net(), DATA)


def test_the_environment_variable_is_checked(monkeypatch):
    monkeypatch.setenv("GBLR_PARALLEL", "fsdp2")
    from gblr.training.assembly import _parallel

    with pytest.raises(ValueError, match="`GBLR_PARALLEL` must be one of 'ddp', 'fsdp'; got 'fsdp2'"):
        _parallel(TrainConfig())
    assert _parallel(TrainConfig(parallel="ddp")) == "ddp"


def test_defaults_are_a_valid_run():
    net = make_net()
    result = train(net, DATA, config=dataclasses.replace(TrainConfig(), batch_size=16, budget=BUDGET))
    assert len(result.history) == 1 and result.best is None
    assert any(isinstance(module, GaudiModule) for module in net.modules())


def test_channels_last_gives_the_same_numbers_in_another_layout():
    images = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, torch.arange(32) % 4)
    seen, results = [], []
    for channels_last in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), gblr.GaudiConv2d(6, 5, 3), nn.Flatten(), nn.Linear(5 * 16, 4)
        )
        net[2].register_forward_pre_hook(
            lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
        )
        results.append(train(net, data, None, make_config(batch_size=16, channels_last=channels_last)))
    assert not any(seen[: len(seen) // 2]) and all(seen[len(seen) // 2 :])
    plain, laid_out = ([row["train_loss"] for row in result.history] for result in results)
    assert plain == pytest.approx(laid_out, rel=1e-3)
    assert net[0].weight.is_contiguous() and not net._forward_pre_hooks
