"""Blocks run one after the other on kept hidden states: the same as the whole model, for every kind of model."""

import copy
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import gblr
from gblr.conversion.block_runs import BlockRuns
from gblr.conversion.refit import refit_layers_, structured_layers


def ids(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 50, (2, 8), generator=generator)


def padded(number):
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": ids(number), "attention_mask": mask}


def llama():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=50,
    )  # fmt: skip
    return LlamaForCausalLM(config), [padded(0), padded(1)]


def gpt2():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=50, n_positions=16))
    return model, [{"input_ids": ids(i)} for i in range(2)]


def bert():
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=50
    )  # fmt: skip
    return BertModel(config), [padded(0), padded(1)]


def vit():
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    return ViTForImageClassification(config), [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))]


class Chain(nn.Module):
    def __init__(self, skips=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head, self.skips = nn.Linear(16, 16), skips

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = layer(x) + (first if self.skips else 0)
        return self.head(x)


class Plain(Chain):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain():
    return Plain(), [torch.randn(3, 16)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, other=0):
        return x + self.b(torch.tanh(self.a(x + other)))


class Conditioned(nn.Module):
    """A layer of its own stands before each block, and is refitted in between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.conditions = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        first = x
        for layer, condition in zip(self.layers, self.conditions, strict=True):
            x = layer(x, 3 * condition(first))
        return x


def conditioned():
    return Conditioned(), [torch.randn(64, 16)]


MODELS = (llama, gpt2, bert, vit, plain, conditioned)


@pytest.mark.parametrize("make", MODELS)
def test_refits_are_those_of_whole_runs(make, monkeypatch):
    torch.manual_seed(0)
    teacher, batches = make()
    model = copy.deepcopy(teacher.eval())
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    other = copy.deepcopy(model)
    assert BlockRuns(model, batches, list(structured_layers(model))).blocks
    quick = refit_layers_(model, teacher, batches)
    monkeypatch.setattr(BlockRuns, "_is_chain", lambda self: False)
    slow = refit_layers_(other, teacher, batches)
    assert [row.layer for row in quick] == [row.layer for row in slow]
    for a, b in zip(quick, slow, strict=True):
        assert a.error == pytest.approx(b.error, rel=1e-3, abs=1e-5)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_hidden_states_of_a_batch_go_when_it_has_passed_their_block():
    model, given = Plain().eval(), [torch.randn(3, 16) for _ in range(8)]
    made = []

    def count(module, args, output):
        made.append(weakref.ref(output))
        alive.append(len({id(ref()) for ref in made} - {id(None), *map(id, given)}))

    runs = BlockRuns(model, given, [f"layers.{i}.0" for i in range(4)])
    for block in model.layers:
        block.register_forward_hook(count)
    with torch.no_grad():
        for i in range(4):
            alive: list[int] = []
            runs.go_to(f"layers.{i}.0")
            assert max(alive, default=0) <= len(given) + 1


def test_a_refit_runs_every_block_a_few_times_whatever_the_depth():
    teacher, batches = llama()
    model = copy.deepcopy(teacher.eval())
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    calls = [0, 0, 0]
    for number, block in enumerate(teacher.model.layers):
        block.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    refit_layers_(model, teacher, batches)
    sets = 4  # of layers with the same input: q k v, o, gate up, down
    assert max(calls) <= len(batches) * (sets + 1) + 4  # recorded and looked at; and four first looks


def test_blocks_do_not_run_to_be_recorded():
    """Neither their layers nor what comes after them; hooks of the user's neither see it nor count twice."""
    model, batches = llama()
    model.eval()
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(3)]
    runs, ran = BlockRuns(model, batches, names), []
    for name in (*names, "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        runs.go_to(names[0])
        assert runs.blocks and runs.next == 0 and not ran
        runs.go_to(names[2])
        hidden, seen = runs.hidden[1], []
        assert ran == [names[0]] * 2 + [names[1]] * 2
        model.model.layers[2].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(**batches[1])
    torch.testing.assert_close(hidden, seen[0])
    assert all("forward" not in block.__dict__ for block in model.model.layers)


def test_compiled_blocks_are_recorded_as_they_run():
    model, batches = llama()
    expected = BlockRuns(model.eval(), batches, ["model.layers.1.mlp.up_proj"])
    compiled = copy.deepcopy(model)
    for block in compiled.model.layers:
        block.compile(backend="eager")
    found = BlockRuns(compiled, batches, ["model.layers.1.mlp.up_proj"])
    with torch.no_grad():
        for runs in (expected, found):
            runs.go_to("model.layers.1.mlp.up_proj")
    assert found.at == expected.at == 1
    for a, b in zip(found.hidden, expected.hidden, strict=True):
        torch.testing.assert_close(a, b)


class InPlace(Plain):
    """Blocks that change what they are given."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.insert(0, nn.ELU(inplace=True))


class InPlaceFirst(Plain):
    """The first block alone does, by a hook."""

    def __init__(self):
        super().__init__()
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0].add_(1),))


class InPlaceBetween(Chain):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x += 1
        return self.head(x)


class Arches(Conditioned):
    """Blocks that are given what an earlier one gave, as it is or not."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        kept = x = self.layers[0](x)
        x = self.layers[1](x)
        return self.layers[2](x, self.change(kept))


NO_CHAINS = (
    Chain(skips=True), Chain(), InPlace(), InPlaceFirst(), InPlaceBetween(), Arches(lambda x: x),
    Arches(nn.LayerNorm(16)), nn.Sequential(nn.Linear(16, 16)),
)  # fmt: skip


@pytest.mark.parametrize("model", NO_CHAINS, ids=lambda model: type(model).__name__)
def test_what_is_no_plain_chain_is_run_from_its_beginning(model):
    """A sum with zero makes another tensor of what a block gave: nothing can tell that from a skip."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    runs = BlockRuns(model, [torch.randn(2, 16)], layers)
    assert runs.blocks == []
    runs.go_to(layers[0])
    assert runs.at is None
    runs.run(0)


def test_tensors_that_count_no_changes_make_no_chain():
    layers = [f"layers.{i}.0" for i in range(4)]
    assert BlockRuns(Plain(), [torch.randn(2, 16)], layers).blocks
    with torch.inference_mode():
        assert not BlockRuns(Plain(), [torch.randn(2, 16)], layers).blocks


def test_layers_around_the_blocks_are_reached_by_whole_runs():
    runs = BlockRuns(Plain(), [torch.randn(2, 16)], ["layers.0.0", "layers.1.0", "layers.2.0", "layers.3.0", "head"])
    runs.go_to("layers.2.0")
    assert runs.at == 2 and runs.next == 2
    runs.go_to("head")
    assert runs.at is None
