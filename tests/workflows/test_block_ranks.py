from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gblr.workflows.block_ranks import with_block_rank
from gblr.workflows.listing import list_layers
from gblr.workflows.settings import Settings
from gblr.workflows.variants import config_of


def layers(*shapes: tuple[int, int]) -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(*shape) for shape in shapes)


@pytest.mark.parametrize(
    ("shapes", "options", "expected"),
    [
        (((576, 192), (576, 1536)), {}, 16),
        (((384, 384), (384, 1536)), {}, 1),
        (((576, 1536), (576, 4)), {}, 1),  # a router: one block would be all of it
        (((576, 1536),), {"block_rank": 4}, 4),
        (((576, 1536),), {"convolutions": True}, 1),
        (((576, 1536),), {"from_scratch": True}, 1),
        (((576, 1536),), {"method": "low-rank"}, 1),
        (((576, 1536),), {"method": "low-rank", "baselines": ("gaudi",)}, 16),
    ],
)
def test_wide_layers_get_thick_blocks_unless_asked_otherwise(shapes, options, expected):
    settings = with_block_rank(Settings("model", "data", **options), layers(*shapes))
    assert settings.block_rank == expected
    assert config_of(settings, "gaudi").block_rank == expected


def test_a_fused_projection_is_as_narrow_as_its_parts():
    with torch.device("meta"):
        fused = nn.ModuleDict({"qkv": nn.Linear(512, 512 + 2 * 64), "fc1": nn.Linear(512, 512)})
    assert with_block_rank(Settings("model", "data"), fused).block_rank == 16
    fused.config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=1)  # k and v have one head of 64 each
    assert with_block_rank(Settings("model", "data"), fused).block_rank == 1


def test_the_list_of_layers_tells_the_rank_that_was_chosen():
    assert "in blocks of rank 16" in list_layers(layers((512, 512)), Settings("model", "data"))
    assert "blocks" not in list_layers(layers((384, 384)), Settings("model", "data"))
