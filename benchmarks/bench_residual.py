"""What refits gain by their goal at the end of residual branches: the teacher's sum, or the outputs of its layer.

    python benchmarks/bench_residual.py --model FILE.gguf --data DIR --out docs/results/residual.json

A language model, low rank with global ranks at each of the costs, fitted to windows of Wikipedia articles and refitted
to both goals; perplexity on windows of WikiText-2. bfloat16 for the model's products while fits are prepared.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from bench_cpu import cpu_model

import gblr
from gblr.conversion import refit
from gblr.data.tokens import Windows
from gblr.experiments.corpora import load_text_task
from gblr.models.load import load_model
from gblr.workflows.language_task import perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a language model, as gblr loads it")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/language"))
    parser.add_argument("--windows", type=int, default=12, help="of calibration text")
    parser.add_argument("--tested", type=int, default=8, help="windows that are judged")
    parser.add_argument("--costs", type=float, nargs="+", default=[0.5])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dense: Any = load_model(args.model).model.float().eval().requires_grad_(False)
    task: Any = load_text_task("smollm2", args.data, args.cache, args.model)
    batches = task.calibration(args.windows)
    tested = Windows(task.tests["wikitext2"][: args.tested].long())
    rows = [row for cost in args.costs for row in rows_of(dense, cost, batches, tested)]
    if args.out:
        record = {
            "command": "python benchmarks/bench_residual.py --model FILE.gguf --data DIR "
            "--out docs/results/residual.json",
            "what": f"perplexity of low rank with global ranks on {args.tested} windows of 1,024 tokens of WikiText-2, "
            f"fitted and refitted to {args.windows} windows of Wikipedia; dense: {perplexity(dense, tested):.4g}",
            "torch": torch.__version__, "cpu": cpu_model(), "rows": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def rows_of(dense: Any, cost: float, batches: list[Any], tested: Windows) -> Iterator[dict[str, Any]]:
    fitted = copy.deepcopy(dense)
    config = gblr.LowRankConfig(cost, allocation="global")
    with torch.autocast("cpu", torch.bfloat16):
        report = gblr.convert_(fitted, config, calibration=batches, sensitivity=True)
    yield row("none", cost, fitted, tested, 0.0)
    for goal, around in (("outputs", without_streams), ("sums", nullcontext)):
        model, begin = copy.deepcopy(fitted), time.perf_counter()
        with around(), torch.autocast("cpu", torch.bfloat16):
            gblr.heal_(model, dense, batches, sensitivity=report.sensitivity)
        yield row(goal, cost, model, tested, time.perf_counter() - begin)


def row(goal: str, cost: float, model: Any, tested: Windows, seconds: float) -> dict[str, Any]:
    found = {
        "goal": goal,
        "cost": cost,
        "perplexity": round(perplexity(model, tested), 3),
        "seconds": round(seconds, 1),
    }
    print(found, flush=True)
    return found


@contextmanager
def without_streams() -> Iterator[None]:
    """Refits as they were before there were sums: no layer has a stream."""
    find, refit.residual_streams = refit.residual_streams, lambda *_: {}
    try:
        yield
    finally:
        refit.residual_streams = find


if __name__ == "__main__":
    main()
