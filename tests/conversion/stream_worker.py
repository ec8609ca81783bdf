"""A process that streams a model: `python -m tests.conversion.stream_worker SOURCE OUT CONFIG [cal] [refit]`.

LIMIT in the environment: how many bytes more than the interpreter and its libraries may be taken, of the data segment.
KILL: this process kills itself once that many layers are fitted; KILL_RANK: only that one of several.
"""

import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import torch

from gblr.conversion import streaming
from gblr.conversion.convert import convert_
from tests.conversion.streamed import CONFIGS, make_batches, write_llama


def main(arguments: list[str]) -> None:
    source, out, name, *options = arguments
    torch.set_num_threads(1)
    batches = make_batches() if "cal" in options else None
    if "KILL" in os.environ and os.environ.get("RANK", "0") == os.environ.get("KILL_RANK", "0"):
        kill_after(int(os.environ["KILL"]))
    if "LIMIT" in os.environ:
        limit(int(os.environ["LIMIT"]), CONFIGS[name], "whole" in options)
    if "whole" in options:
        from transformers import AutoModelForCausalLM

        convert_(AutoModelForCausalLM.from_pretrained(source), CONFIGS[name], calibration=batches)
    else:
        streaming.convert_streaming(
            source, out, CONFIGS[name], calibration=batches, timeout=8.0, refit="refit" in options
        )
    print("done")


def kill_after(layers: int) -> None:
    fit_piece, left = streaming.fit_piece, [layers]

    def counted(*args):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        fit_piece(*args)

    streaming.fit_piece = counted


def limit(more: int, config: object, whole: bool) -> None:
    """What a conversion of a tiny model takes is libraries; beyond that there is so much and no more."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_llama(Path(folder, "source"), blocks=2)
        streaming.convert_streaming(source, Path(folder, "out"), config, calibration=make_batches(1))
        if whole:
            from transformers import AutoModelForCausalLM

            convert_(AutoModelForCausalLM.from_pretrained(source), config)
    used = next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmData"))
    bound = used * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


if __name__ == "__main__":
    main(sys.argv[1:])
