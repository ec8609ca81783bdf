import torch

from gblr.fitting import descent
from gblr.fitting.blocks import Blocks
from gblr.fitting.metric import make_metric


def test_a_turn_that_is_told_on_the_device_makes_the_same_visit():
    """As a CUDA graph reads it."""
    torch.manual_seed(0)
    weight, gram = torch.randn(2, 12, 10), torch.randn(2, 30, 10)
    for metric in (make_metric(None, 1), make_metric(gram.mT @ gram, 1)):
        blocks = Blocks.full(torch.randn(2, 4, 1, 12), torch.randn(2, 4, 1, 10), torch.tensor([4, 3]))
        states = [descent._State(blocks.clone(), weight - blocks.product(), torch.full((2,), 0.1)) for _ in range(2)]
        for k in range(4):
            descent._update(states[0], k, metric, 1)
            descent._update(states[1], torch.tensor([k]), metric, 1)
        for name, value in vars(states[0].blocks).items():
            assert torch.equal(value, getattr(states[1].blocks, name)), name
        assert torch.equal(states[0].residual, states[1].residual)
        assert all(torch.equal(a, b) for a, b in zip(states[0].worth, states[1].worth, strict=True))
