"""What of captured steps can be seen without a GPU; tests/gpu/test_train.py has the rest."""

import pytest
import torch

from gblr.training.loop import train
from gblr.training.step_graphs import shape_of
from tests.training.cases import make_config, make_data, make_net


@pytest.mark.parametrize("beside", [{"accumulate": 2}, {"mixup": 0.2}, {"cutmix": 1.0}])
def test_what_cannot_be_captured_is_refused(beside):
    with pytest.raises(ValueError, match="cuda_graphs"):
        make_config(cuda_graphs=True, **beside)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a CUDA device")
def test_without_a_gpu_it_is_refused():
    with pytest.raises(ValueError, match="CUDA device"):
        train(make_net(), make_data(), None, make_config(cuda_graphs=True))


def test_shapes_tell_batches_apart_by_all_that_a_graph_takes_for_granted():
    def batch(length=4, dtype=torch.long, **more):
        return {"x": torch.zeros(2, length, dtype=dtype), "parts": (torch.ones(3), [torch.ones(1)])} | more

    assert shape_of(batch()) == shape_of(batch())
    assert shape_of({"x": torch.zeros(2)}) == shape_of({"x": torch.ones(2)})
    others = [batch(length=5), batch(dtype=torch.int), batch(scale=2.0), batch(y=torch.ones(1))]
    assert len({shape_of(one) for one in [batch(), *others]}) == 5
