"""One process of a run that `torchrun` starts, for test_train_parallel.py: RESULT, then OUT and a step to die at.

The second process kills itself there, as a machine that fails would. What each process ends with goes to RESULT.rank.
"""

import os
import signal
import sys

import torch

import gblr
from gblr.training.loop import Run
from tests.training.cases import make_config, make_data, make_net


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def die_at(step):
    one_step = Run.one_step

    def fatal_step(self, number, stream):
        if number == step and not self.is_main:
            os.kill(os.getpid(), signal.SIGKILL)
        one_step(self, number, stream)

    Run.one_step = fatal_step


def main(result, out=None, dies=None):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if dies:
        die_at(int(dies))
    net = make_net(seed=rank)  # all processes must take the weights of the first
    found = gblr.train(net, make_data(), make_data(50), make_config(ema=0.9), out=out)
    width = net.blocks[0].fc.width_frac
    torch.save(
        {
            "history": found.history,
            "best": found.best,
            "state": {name: whole(value).cpu() for name, value in net.state_dict().items()},
            "local_width": width.to_local().shape if hasattr(width, "to_local") else None,
        },
        f"{result}.{rank}",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
