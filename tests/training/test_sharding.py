import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gblr.training.batches import LoaderBatches
from gblr.training.sharding import _refuse_shared, find_blocks
from tests.training.cases import make_data, make_net


def names_of(model):
    places = {module: name for name, module in model.named_modules()}
    return [places[block] for block in find_blocks(model)]


def test_blocks_are_the_members_of_the_outermost_containers():
    net = make_net()
    net.blocks[0].mlp = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), nn.Sequential(nn.Linear(2, 2))])
    assert names_of(net) == ["blocks.0", "blocks.1", "stages.0.0", "stages.1"]
    assert names_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    assert names_of(nn.Linear(2, 2)) == []


def test_a_block_that_is_used_twice_is_sharded_once():
    layer = nn.Linear(2, 2)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    assert find_blocks(net) == [layer]
    _refuse_shared(net, find_blocks(net))


def test_parameters_that_blocks_share_are_refused_with_a_way_out():
    net = make_net()
    net.blocks[1].norm.weight = net.blocks[0].norm.weight
    with pytest.raises(ValueError, match=r"several blocks share, 'blocks.0.norm.weight' first; use `parallel='ddp'`"):
        _refuse_shared(net, find_blocks(net))
    net = make_net()
    net.head.bias = net.blocks[0].fc.bias
    with pytest.raises(ValueError, match="cannot shard 1 parameters"):
        _refuse_shared(net, find_blocks(net))
    net = make_net()
    net.head.weight = nn.Parameter(net.stem.weight.detach())
    net.stem.weight = net.head.weight  # both outside of the blocks
    _refuse_shared(net, find_blocks(net))


def test_what_accelerate_fills_up_in_the_last_batch_does_not_count():
    """50 samples in batches of 20: the last one has 10, of which the first process holds all."""
    batch = [torch.zeros(10, 8), torch.zeros(10)]
    for rank, real in ((0, 10), (1, 0)):
        batches = LoaderBatches.__new__(LoaderBatches)
        batches.rank, batches.num_processes = rank, 2
        batches.loader = SimpleNamespace(end_of_dataloader=True, remainder=10)
        assert batches._num_real(batch) == real
        batches.loader.end_of_dataloader = False
        assert batches._num_real(batch) == 10
    assert len(DataLoader(make_data(50), batch_size=20)) == 3


def test_importing_gblr_leaves_distributed_training_and_its_libraries_unloaded():
    code = "import gblr, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    late = {"accelerate", "transformers", "tensorboard"}
    late |= {f"torch.distributed.{name}" for name in ("tensor", "checkpoint", "fsdp")}
    assert late.isdisjoint(loaded)
