"""What a newcomer runs, with the time each command takes and what comes out of it.

    python benchmarks/bench_commands.py --minilm DIR --data DIR --out docs/results/commands.json

    python benchmarks/bench_commands.py --only digits --out docs/results/commands.json    # renews these rows alone

`--minilm` is a directory of all-MiniLM-L6-v2, `--data` one with `stsb` and `cifar10` in it. Without them only the demo
on digits is run. Nothing else should run on the machine. Folders of the runs stay under runs/commands.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gblr.workflows.describe import cpu_name

RUNS = Path("runs/commands")
DEMO = "--train 40 --lr 0.001 --baseline low-rank --baseline monarch --threads 1"


def steps(minilm: str | None, data: str | None) -> list[tuple[str, str]]:
    """What is shown, and the arguments of `gblr`; {run} is the folder of the runs."""
    found = [
        ("digits: dense", "train vit:digits --data digits --epochs 40 --threads 1 --out {run}/digits-dense"),
        ("digits: compressed", f"compress {{run}}/digits-dense --data digits --cost 0.2 {DEMO} --out {{run}}/digits"),
        ("digits: page", "report {run}/digits --out {run}/digits.html"),
    ]
    if minilm and data:
        what = "compress {minilm} --data {data}/stsb --cost 0.5 --calibration 512 --out {run}/minilm"
        found += [("MiniLM: compressed, no training", what), ("MiniLM: page", "report {run}/minilm")]
    if data:
        few = "--data cifar10:{data}/cifar10 --max-train 10000 --max-eval 2000"
        found += [
            ("ViT from a config: dense", f"train {VIT} {few} --epochs 3 --lr 0.001 --out {{run}}/vit-dense"),
            (
                "ViT from a config: compressed",
                f"compress {{run}}/vit-dense {few} --cost 0.3 --train 1 --out {{run}}/vit",
            ),
        ]
    return found


VIT = "python:examples.models.vit_from_config:vit"


def run(arguments: str, places: dict[str, str]) -> float:
    command = [str(Path(sys.executable).with_name("gblr")), *shlex.split(arguments.format(**places))]
    begin = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - begin


def _folder(arguments: str) -> Path:
    return Path(arguments.format(run=RUNS, minilm="", data="").rpartition("--out ")[2])


def results(folder: Path) -> list[dict[str, Any]]:
    """Of the models that the run compared."""
    if not (folder / "run.json").exists():
        return []
    record = json.loads((folder / "run.json").read_text())
    kept = ("name", "value", "relative_cost", "model_relative_cost", "num_params", "file_bytes", "seconds_per_batch")
    metric = record["metric"]["name"]
    return [{"metric": metric} | {key: result.get(key) for key in kept} for result in record["results"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm")
    parser.add_argument("--data")
    parser.add_argument("--only", default="", help="beginning of the names of the rows to run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.only:
        shutil.rmtree(RUNS, ignore_errors=True)
    rows = []
    for what, arguments in steps(args.minilm, args.data):
        if not what.startswith(args.only):
            continue
        shutil.rmtree(_folder(arguments), ignore_errors=True)
        seconds = run(arguments, {"run": str(RUNS), "minilm": args.minilm or "", "data": args.data or ""})
        shown = "gblr " + arguments.format(run="runs", minilm="MINILM", data="DATA")
        found = results(_folder(arguments))
        rows.append({"what": what, "command": shown, "seconds": round(seconds, 1), "results": found})
        print(f"{what}: {seconds:.0f} s", flush=True)
    if args.only and args.out and args.out.exists():
        renewed = {row["what"]: row for row in rows}
        rows = [renewed.get(row["what"], row) for row in json.loads(args.out.read_text())["rows"]]
    record = {
        "command": "python benchmarks/bench_commands.py --minilm MINILM --data DATA --out docs/results/commands.json",
        "torch": torch.__version__,
        "cpu": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
