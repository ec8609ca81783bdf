import torch
from torch import nn
from transformers import MambaConfig, MambaModel, MixtralConfig, MixtralForCausalLM

from gblr.conversion.convert import convert_
from gblr.conversion.filters import linear_layers
from gblr.conversion.harden import densify_
from gblr.conversion.left_dense import notes_on_stacks
from gblr.fitting.config import LowRankConfig
from gblr.workflows.listing import list_layers
from gblr.workflows.settings import Settings


def mixture() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, num_attention_heads=4, num_key_value_heads=2, **sizes))


def test_experts_that_stay_dense_are_told_with_their_share():
    model = mixture()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    expected = f"{experts / sum(p.numel() for p in model.parameters()):.0%}"
    assert experts and expected in list_layers(model, Settings("model", "data"))
    (note,) = [note for note in convert_(model, LowRankConfig(0.5)).notes if "experts" in note]
    assert "and 3 more" in note and expected in note


def test_convolutions_and_small_stacks_are_not_worth_a_line():
    normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3))
    model = nn.Sequential(
        nn.Conv1d(8, 8, 3), normed, nn.ConvTranspose1d(8, 8, 3), nn.Conv2d(3, 8, 3), nn.Linear(64, 64)
    )
    model.register_parameter("stack", nn.Parameter(torch.zeros(2, 2, 2)))
    assert notes_on_stacks(model) == []


def test_layers_whose_weights_the_model_reads_itself_are_told():
    model = MambaModel(MambaConfig(vocab_size=50, hidden_size=32, state_size=4, num_hidden_layers=2))
    batches = [torch.randint(0, 50, (16, 8))]
    (note,) = convert_(model, LowRankConfig(0.6), calibration=batches).notes
    assert "no call of layers.0.mixer.dt_proj (and 1 more layer likewise)" in note and "`exclude`" in note
    called = linear_layers(exclude=("dt_proj",))
    densify_(model)
    assert not convert_(model, LowRankConfig(0.6), called, batches).notes
