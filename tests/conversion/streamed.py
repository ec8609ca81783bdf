"""Small transformers models on disk, and a process that streams one: alone, as one of several, or in little memory."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gblr.fitting.config import GaudiConfig, LowRankConfig

ROOT = Path(__file__).parents[2]
CONFIGS: dict[str, Any] = {
    "gaudi": GaudiConfig(0.5, steps=2),
    "gaudi rank 16": GaudiConfig(0.5, block_rank=16, steps=1),
    "low rank": LowRankConfig(0.5),
}


def write_llama(folder: Path, blocks: int = 2, hidden: int = 32, shard: str = "30KB", **options: Any) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 50, "num_hidden_layers": blocks}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**(sizes | options))).save_pretrained(folder, max_shard_size=shard)
    return folder


def make_batches(num: int = 3) -> list[dict[str, torch.Tensor]]:
    """The second text of each is padded."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return [
        {"input_ids": torch.randint(0, 50, (2, 7), generator=generator), "attention_mask": mask} for _ in range(num)
    ]


def run(*arguments: object, **environment: str) -> tuple[int, str]:
    """`tests.conversion.stream_worker` with these arguments, in a fresh process: exit code, and all it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.conversion.stream_worker", *map(str, arguments)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"} | environment,
    )  # fmt: skip
    return done.returncode, done.stdout


def run_together(*arguments: object, processes: int = 1, **environment: str) -> list[int]:
    """Exit codes of as many processes as `torchrun` would start, from a server that has imported what they need:
    imports take them far longer than their work. `torchrun` itself is tested by docs/howto/streaming.md.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conversion.stream_worker"])
    started = []
    for rank in range(processes):
        of_rank = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        started.append(context.Process(target=_work, args=([*map(str, arguments)], of_rank)))
        started[-1].start()
    for process in started:
        process.join(timeout=120)
        process.kill()
        process.join()
    return [process.exitcode for process in started]  # type: ignore[misc]


def _work(arguments: list[str], environment: dict[str, str]) -> None:
    from tests.conversion import stream_worker

    os.environ.update(environment)
    stream_worker.main(arguments)
