"""Layers at the end of residual branches are found, and refitted so that the sum is that of the teacher."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    FalconConfig,
    FalconModel,
    GPT2Config,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaModel,
    ViTConfig,
    ViTModel,
)

import gblr
from gblr.conversion import refit
from gblr.conversion.block_runs import BlockRuns
from gblr.conversion.refit_runs import collect_pairs
from gblr.conversion.residual import Stream, residual_streams

WIDTH = 24


class Branch(nn.Module):
    """x + down(relu(up(norm(x)))), with the sum made in several ways."""

    def __init__(self, how: str = "sum", norm_last: bool = False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.how, self.norm_last = how, norm_last

    def forward(self, x):
        given = self.down(self.up(x if self.norm_last else self.norm(x)).relu())
        if self.how == "in place":
            x += given
        elif self.how == "scaled":
            x = x + 0.5 * given
        else:
            x = given + x
        return self.norm(x) if self.norm_last else x


class TwoBranches(nn.Module):
    """Two branches beside each other, as in GPT-NeoX and many after it."""

    def __init__(self, how: str = "branches first"):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.how = how

    def forward(self, x):
        one, two = self.attention(self.norm(x)), self.down(self.up(self.norm2(x)).relu())
        if self.how == "in place":
            two += one
            return x + two
        return x + one + two if self.how == "stream first" else one + two + x


class SameInput(nn.Module):
    """Two branches that are given the very same."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.a(x) + self.b(x)


class ConvBranch(nn.Module):
    """x + down(relu(up(x))) of images, as in residual networks without normalization."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.layers:
            x = block(x)
        return self.head(x)


def batches(num: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(8, WIDTH, generator=generator)  # inputs that can be told from few of their directions
    return [torch.randn(16, 8, generator=generator) @ mixing for _ in range(num)]


def seeded(*blocks_of: dict) -> Model:
    torch.manual_seed(0)
    return Model(*(Branch(**options) for options in blocks_of)).eval()


@pytest.mark.parametrize("how", ["sum", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stream_of_a_branch_is_found_however_it_is_added_to(how, dtype):
    model = seeded({"how": how}, {"how": how}).to(dtype)
    layers = [f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")]
    with torch.no_grad():
        found = residual_streams(model, layers, batches()[0].to(dtype), ["layers.0", "layers.1"])
    assert found == {f"layers.{i}.down": Stream(f"layers.{i}.norm") for i in range(2)}


def test_of_sums_that_are_normalized_the_layer_itself_may_be_given_the_stream():
    model = seeded({"norm_last": True})
    with torch.no_grad():
        assert residual_streams(model, ["layers.0.down"], batches()[0]) == {"layers.0.down": Stream("layers.0.up")}


def test_a_sum_that_is_scaled_is_left_alone():
    with torch.no_grad():
        assert (
            residual_streams(seeded({"how": "scaled"}), ["first", "layers.0.up", "layers.0.down"], batches()[0]) == {}
        )


def test_modules_that_are_given_nothing_are_passed_over():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.extra, self.head = Branch(), nn.Identity(), nn.Linear(WIDTH, 3)

        def forward(self, x):
            self.extra(x[..., :0])
            return self.head(self.block(x))

    with torch.no_grad():
        found = residual_streams(Model().eval(), ["block.down"], batches()[0])
    assert found == {"block.down": Stream("block.norm")}


def test_a_layer_that_gives_zeros_has_no_stream():
    torch.manual_seed(0)
    model = Model(TwoBranches()).eval()
    nn.init.zeros_(model.layers[0].attention.weight)
    nn.init.zeros_(model.layers[0].attention.bias)
    with torch.no_grad():
        found = residual_streams(model, ["layers.0.attention", "layers.0.down"], batches()[0])
    assert found == {"layers.0.down": Stream("layers.0.norm2")}


def test_a_layer_that_is_called_twice_has_no_stream():
    model = seeded({}, {})
    model.layers[1] = model.layers[0]
    with torch.no_grad():
        assert residual_streams(model, ["layers.0.down"], batches()[0]) == {}


def test_a_stream_from_another_block_is_not_taken():
    """Blocks are run alone, and would not have it."""
    model = seeded({"norm_last": True}, {"norm_last": True})
    model.layers[0].norm = nn.Identity()  # then "layers.0.up" is given what "first" gave
    with torch.no_grad():
        found = residual_streams(model, ["layers.0.down"], batches()[0], ["layers.0.down", "layers.0.up"])
    assert found == {}


_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TRANSFORMERS = {
    "llama": (LlamaModel, LlamaConfig(**_SIZES, vocab_size=32), ("self_attn.o_proj", "mlp.down_proj")),
    "gpt2": (GPT2Model, GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32), ("attn.c_proj", "mlp.c_proj")),
    "bert": (BertModel, BertConfig(**_SIZES, vocab_size=32), ("attention.output.dense", "output.dense")),
    "vit": (ViTModel, ViTConfig(**_SIZES, image_size=8, patch_size=4), ("attention.o_proj", "mlp.fc2")),
    "gpt_neox": (GPTNeoXModel, GPTNeoXConfig(**_SIZES, vocab_size=32), ("attention.dense", "mlp.dense_4h_to_h")),
    "falcon": (
        FalconModel,
        FalconConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32),
        ("self_attention.dense", "mlp.dense_4h_to_h"),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_both_branches_of_a_transformer_are_found(name):
    build, config, ends = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = build(config).eval()
    batch = torch.randn(2, 3, 8, 8) if name == "vit" else torch.randint(0, 32, (2, 12))
    layers = [name for name, module in model.named_modules() if gblr.linear_layers()(module, name)]
    with torch.no_grad():
        found = residual_streams(model, layers, batch)
    assert len(found) == 4 and all(layer.endswith(ends) for layer in found)
    beside = sum(len(stream.branches) for stream in found.values())
    assert beside == (2 if name in ("gpt_neox", "falcon") else 0)


@pytest.mark.parametrize("how", ["branches first", "stream first", "in place"])
def test_of_branches_beside_each_other_the_later_knows_the_earlier(how):
    torch.manual_seed(0)
    model = Model(*(TwoBranches(how) for _ in range(2))).eval()
    layers = [f"layers.{i}.{name}" for i in range(2) for name in ("attention", "up", "down")]
    with torch.no_grad():
        found = residual_streams(model, layers, batches()[0], ["layers.0", "layers.1"])
    assert found == {
        name: stream for i in range(2) for name, stream in (
            (f"layers.{i}.attention", Stream(f"layers.{i}.norm")),
            (f"layers.{i}.down", Stream(f"layers.{i}.norm", (f"layers.{i}.attention",))),
        )
    }  # fmt: skip


@pytest.mark.parametrize("with_stream", [False, True])
def test_the_goal_is_what_the_stream_lacks_to_the_sum_of_the_teacher(with_stream):
    teacher = seeded({})
    model, names = copy.deepcopy(teacher), ["layers.0.down"]
    with torch.no_grad():
        model.first.weight.mul_(0.5)
        runs = BlockRuns(model, batches(), names), BlockRuns(teacher, batches(), names, fixed=True)
        streams = residual_streams(teacher, names, batches()[0]) if with_stream else {}
        seen = collect_pairs(*runs, names, set(), streams=streams)[names[0]].whole()
        x, ours = torch.cat(batches()), model.first(torch.cat(batches()))
        theirs = teacher.first(x)
        given = teacher.layers[0](theirs) - (ours if with_stream else theirs)
    torch.testing.assert_close(seen.outputs, given.sum(0).double(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(seen.squares, given.square().sum(0).double(), rtol=1e-4, atol=1e-3)


def test_the_goal_of_a_later_branch_makes_up_for_the_earlier():
    torch.manual_seed(0)
    teacher = Model(TwoBranches()).eval()
    model, names = copy.deepcopy(teacher), ["layers.0.down"]
    with torch.no_grad():
        model.first.weight.mul_(0.5)
        model.layers[0].attention.weight.mul_(0.5)
        runs = BlockRuns(model, batches(), names), BlockRuns(teacher, batches(), names, fixed=True)
        streams = residual_streams(teacher, ["layers.0.attention", *names], batches()[0])
        seen = collect_pairs(*runs, names, set(), streams=streams)[names[0]].whole()
        x = torch.cat(batches())
        ours, block = model.first(x), model.layers[0]
        given = teacher.layers[0](teacher.first(x)) - ours - block.attention(block.norm(ours))
    torch.testing.assert_close(seen.outputs, given.sum(0).double(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(seen.squares, given.square().sum(0).double(), rtol=1e-4, atol=1e-3)


def test_a_refit_that_goes_on_knows_the_branches_that_were_refitted_before():
    torch.manual_seed(0)
    teacher, seen, done = Model(*(TwoBranches() for _ in range(2))).eval(), batches(), []
    models = [copy.deepcopy(teacher) for _ in range(2)]
    for model in models:
        gblr.convert_(model, gblr.LowRankConfig(0.6), gblr.linear_layers(include=("layers",)), calibration=seen)

    def stop(rows):
        done.extend(row.layer for row in rows)
        if done[-1] == "layers.0.attention":
            raise KeyboardInterrupt

    refit.refit_layers_(models[0], teacher, seen)
    with pytest.raises(KeyboardInterrupt):
        refit.refit_layers_(models[1], teacher, seen, on_done=stop)
    refit.refit_layers_(models[1], teacher, seen, skip=done)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)


def test_branches_with_one_input_make_up_for_an_error_once():
    """They are fitted one after the other: all that the stream lacks shows in their input, and both would take it."""
    torch.manual_seed(0)
    teacher = Model(SameInput()).eval()
    model, seen = copy.deepcopy(teacher), batches(16)
    gblr.convert_(model, gblr.LowRankConfig(1.0), gblr.linear_layers(include=("layers",)), calibration=seen)  # no error
    with torch.no_grad():
        model.first.weight.mul_(0.5)
        model.first.bias.mul_(0.5)
        before = (model(seen[0]) - teacher(seen[0])).norm()
        gblr.heal_(model, teacher, seen)
        assert (model(seen[0]) - teacher(seen[0])).norm() < 0.05 * before


@pytest.mark.parametrize("block", [Branch, TwoBranches])
@pytest.mark.parametrize("config", [gblr.LowRankConfig(0.6), gblr.GaudiConfig(0.6), gblr.MonarchConfig(0.6)], ids=str)
def test_a_refit_takes_errors_out_of_the_stream(config, block, monkeypatch):
    """Of three blocks, on inputs that were not used."""
    seen, unseen = batches(8)[:6], batches(8)[6:]
    torch.manual_seed(0)
    teacher = Model(*(block() for _ in range(3))).eval()
    errors = {}
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(refit, "residual_streams", lambda *args: {})
        model = copy.deepcopy(teacher)
        gblr.convert_(model, config, gblr.linear_layers(include=("layers",)), calibration=seen)
        gblr.heal_(model, teacher, seen)
        with torch.no_grad():
            errors[name] = sum(float((model(x) - teacher(x)).square().sum()) for x in unseen)
    assert errors["with"] < 0.95 * errors["without"]


@pytest.mark.parametrize("size", [4, 6, 1])  # as many channels as columns, fewer, more
@pytest.mark.parametrize("config", [gblr.LowRankConfig(0.5), gblr.GaudiConfig(0.5)], ids=str)
def test_streams_of_convolutions_are_those_of_channels(config, size):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *(ConvBranch(4) for _ in range(3)), nn.Flatten()).eval()
    images = [torch.randn(8, 3, size, size) for _ in range(4)]
    model, names = copy.deepcopy(teacher), ["2.down"]
    gblr.convert_(model, config, gblr.conv_layers(include=("1", "2", "3")), calibration=images)
    runs = BlockRuns(model, images, names), BlockRuns(teacher, images, names, fixed=True)
    with torch.no_grad():
        streams = residual_streams(teacher, names, images[0])
        seen = collect_pairs(*runs, names, set(), streams=streams)["2.down"].whole()
        sums = sum((teacher[:3](x) - model[:2](x)).sum((0, 2, 3)) for x in images)
    assert streams == {"2.down": Stream("2.up")}
    torch.testing.assert_close(seen.outputs, sums.double(), rtol=1e-4, atol=1e-3)
    gblr.heal_(model, teacher, images)
    assert all(module(images[0]).isfinite().all() for module in (model, teacher))
