"""Compress a real sentence encoder without training, and see what it costs and what is left of it.

Converts all 36 encoder matrices of all-MiniLM-L6-v2 at several costs with every method, without calibration and with
two kinds of unlabelled text, and measures Spearman's correlation on the STS benchmark (dense: 0.8203).

    python examples/compress_minilm.py --model DIR --data DIR            # everything; minutes on a GPU, hours on a CPU
    python examples/compress_minilm.py --model DIR --data DIR --smoke    # one cost, two methods: minutes on a CPU

DIR of --model holds the Hugging Face files of all-MiniLM-L6-v2; DIR of --data (or the variable GBLR_DATA) holds
stsb/{train,test} and imdb/unsupervised* as parquet, or as .json with the same columns. Results go to --out, one file
for the task, one for the errors of the fits alone; a run that was interrupted goes on where it stopped.
"""

import argparse
import copy
import json
import os
import random
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import gblr
from gblr.experiments.provenance import code_commit

COSTS = (0.7, 0.5, 0.3)
METHODS: dict[str, Any] = {
    "GBLR": lambda cost: gblr.GaudiConfig(cost, allocation="global"),
    "GBLR uniform": lambda cost: gblr.GaudiConfig(cost),
    "GBLR rank 16": lambda cost: gblr.GaudiConfig(cost, block_rank=16, align=16, allocation="global"),
    "low rank uniform": lambda cost: gblr.LowRankConfig(cost),
    "low rank global": lambda cost: gblr.LowRankConfig(cost, allocation="global"),
    "Monarch": lambda cost: gblr.MonarchConfig(cost),
    "BLAST": lambda cost: gblr.BlastConfig(cost),
    "BLAST global": lambda cost: gblr.BlastConfig(cost, allocation="global"),
}
FIT_METHODS: dict[str, Any] = {
    "low rank": lambda: gblr.LowRankConfig(0.3),
    "GBLR, low_rank start": lambda: gblr.GaudiConfig(0.3, init="low_rank"),
    "GBLR, full start": lambda: gblr.GaudiConfig(0.3, init="full"),
    "GBLR, correlation start": lambda: gblr.GaudiConfig(0.3, init="correlation"),
    "GBLR, printed gamma and tau": lambda: gblr.GaudiConfig(0.3, smoothing_std=1.0, threshold_ratio=0.98),
    "GBLR, gradient refinement": lambda: gblr.GaudiConfig(0.3, init="low_rank", refine="gradient"),
    "GBLR, rank 16": lambda: gblr.GaudiConfig(0.3, block_rank=16),
    "GBLR, rank 16 aligned 16": lambda: gblr.GaudiConfig(0.3, block_rank=16, align=16),
    "Monarch": lambda: gblr.MonarchConfig(0.3),
    "Pixelfly": lambda: gblr.PixelflyConfig(0.3),
    "BLAST": lambda: gblr.BlastConfig(0.3),
}
ENCODER = gblr.linear_layers(include=("encoder",))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, default=os.environ.get("GBLR_DATA"), help="directory with stsb/ and imdb/")
    parser.add_argument("--out", type=Path, default=Path("runs/minilm"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--redraw", type=Path, metavar="JSON", help="draw the picture of a stored result and stop")
    parser.add_argument("--fits", nargs="+", metavar="NAME", help="only the fits of these names, without calibration")
    parser.add_argument("--smoke", action="store_true", help="one cost, two methods, a part of the data")
    args = parser.parse_args()
    if args.redraw:
        draw(args.redraw, args.redraw.with_suffix(".png"))
        return 0
    for name, folder in (("--model", args.model), ("--data", args.data)):
        if folder is None or not Path(folder).is_dir():
            parser.error(f"{name} must be an existing directory; got {folder}. See the top of this file.")
    args.out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(args.model, args.device)
    if args.fits:
        if unknown := set(args.fits) - set(FIT_METHODS):
            parser.error(f"--fits must name some of {list(FIT_METHODS)}; got {sorted(unknown)}.")
        compare_fits(encoder, {"none": None}, args.out / "fit.json", args.device, args.fits)
        return 0
    test = read_columns(Path(args.data) / "stsb", "test")
    if args.smoke:
        test = {name: values[:200] for name, values in test.items()}
    texts = {"none": None, **calibration_texts(Path(args.data))}
    costs, methods = (COSTS, list(METHODS)) if not args.smoke else ((0.5,), ["GBLR", "low rank global"])
    compare_on_task(encoder, test, texts, costs, methods, args.out / "minilm-stsb.json", args.device)
    kinds = {kind: texts[kind] for kind in ("none", "stsb")}
    compare_fits(encoder, kinds, args.out / "fit.json", args.device, list(FIT_METHODS)[: 2 if args.smoke else None])
    draw(args.out / "minilm-stsb.json", args.out / "minilm-stsb.png")
    return 0


def draw(results: Path, picture: Path) -> None:
    """Spearman against the cost reached, one panel per kind of calibration."""
    result = json.loads(results.read_text())
    kinds = [kind for kind in ("none", "imdb", "stsb") if any(row["calibration"] == kind for row in result["rows"])]
    figure, axes = plt.subplots(1, len(kinds), figsize=(4 * len(kinds), 3.6), sharey=True, squeeze=False)
    styles = ["o-", "s-", "D-", "o--", "s--", "^:", "v:", "<:"]
    for panel, kind in zip(axes[0], kinds, strict=True):
        for method, style in zip(METHODS, styles, strict=True):
            rows = sorted(
                (row["relative_cost"], row["spearman"])
                for row in result["rows"]
                if (row["method"], row["calibration"]) == (method, kind)
            )
            if rows:
                panel.plot(*zip(*rows, strict=True), style, label=method, markersize=5)
        panel.axhline(result["dense_spearman"], color="black", linewidth=0.8)
        panel.set(title=f"calibration: {kind}", xlabel="cost of the converted layers")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("Spearman on STS-B test (line: dense)")
    axes[0][-1].legend(fontsize=7)
    figure.savefig(picture, dpi=90, bbox_inches="tight")
    print(f"picture: {picture}")


def compare_on_task(
    encoder: "Encoder",
    test: dict[str, list[Any]],
    texts: dict[str, Any],
    costs: Any,
    methods: list[str],
    out: Path,
    device: str,
) -> None:
    result = load_result(out, device)
    dense = spearman_on(encoder, encoder.model, test)
    result["dense_spearman"] = round(dense, 4)
    print(f"dense: Spearman {dense:.4f}", flush=True)
    for calibration, sentences in texts.items():
        batches = None if sentences is None else encoder.batches(sentences)
        for cost in costs:
            for method in methods:
                key = {"method": method, "cost": cost, "calibration": calibration}
                if any(all(row[k] == v for k, v in key.items()) for row in result["rows"]):
                    continue
                model = copy.deepcopy(encoder.model)
                config = METHODS[method](cost)
                begin = time.perf_counter()
                report = gblr.convert_(model, config, ENCODER, calibration=batches)
                seconds = time.perf_counter() - begin
                if isinstance(config, gblr.GaudiConfig):
                    gblr.harden_(model)
                reached = gblr.cost(model, **encoder.batches(test["sentence1"][:1])[0]).relative_cost
                row = {
                    **key,
                    "relative_cost": round(reached, 4),
                    "allocation": config.allocation,
                    "spearman": round(spearman_on(encoder, model, test), 4),
                    "mean_error": round(report.mean_error or 0.0, 4),
                    "seconds": round(seconds, 1),
                    "commit": result["commit"],
                }
                result["rows"].append(row)
                save_result(out, result)
                print(row, flush=True)


def compare_fits(encoder: "Encoder", texts: dict[str, Any], out: Path, device: str, names: list[str]) -> None:
    """Mean relative error over the 36 matrices at cost 0.3: what the format and the algorithm give, before any task."""
    result = load_result(out, device)
    for calibration, sentences in texts.items():
        batches = None if sentences is None else encoder.batches(sentences)
        low_rank = FIT_METHODS["low rank"]()
        svd_error = gblr.convert_(copy.deepcopy(encoder.model), low_rank, ENCODER, calibration=batches).mean_error
        for name in names:
            config = FIT_METHODS[name]()
            begin = time.perf_counter()
            report = gblr.convert_(copy.deepcopy(encoder.model), config, ENCODER, calibration=batches)
            error = report.mean_error or 0.0
            row = {
                "method": name,
                "init": getattr(config, "init", ""),
                "refine": getattr(config, "refine", ""),
                "block_rank": getattr(config, "block_rank", ""),
                "calibration": calibration,
                "relative_cost": round(report.relative_cost, 4),
                "mean_error": round(error, 4),
                "svd_error": round(svd_error, 4),
                "ratio": round(error / svd_error, 4),
                "seconds": round(time.perf_counter() - begin, 1),
            }
            result["rows"] = [r for r in result["rows"] if (r["method"], r["calibration"]) != (name, calibration)] + [
                row
            ]
            save_result(out, result)
            print(row, flush=True)


class Encoder:
    """Mean-pooled, normalised sentence embeddings."""

    def __init__(self, directory: Path, device: str):
        self.model = AutoModel.from_pretrained(directory).eval().to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.device = device

    def batches(self, sentences: list[str], size: int = 64) -> list[dict[str, torch.Tensor]]:
        made = []
        for i in range(0, len(sentences), size):
            tokens = self.tokenizer(
                sentences[i : i + size], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            made.append({name: value.to(self.device) for name, value in tokens.items()})
        return made

    @torch.no_grad()
    def embed(self, model: torch.nn.Module, sentences: list[str]) -> torch.Tensor:
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        found = []
        for batch in self.batches([sentences[i] for i in order]):
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        embedded = torch.cat(found).cpu()
        return embedded[torch.tensor(order).argsort()]


def spearman_on(encoder: Encoder, model: torch.nn.Module, pairs: dict[str, list[Any]]) -> float:
    first, second = (encoder.embed(model, pairs[name]) for name in ("sentence1", "sentence2"))
    return spearman((first * second).sum(1), torch.tensor(pairs["similarity_score"]))


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson's correlation of the ranks, equal values sharing their mean rank."""

    def ranks(x: torch.Tensor) -> torch.Tensor:
        _, inverse, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True)
        return (counts.cumsum(0) - (counts - 1) / 2)[inverse].double()

    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def calibration_texts(data: Path) -> dict[str, list[str]]:
    """256 reviews of IMDb, and 512 sentences of STS-B's training split without their scores."""
    train = read_columns(data / "stsb", "train")
    reviews = read_columns(data / "imdb", "unsupervised")["text"]
    sentences = train["sentence1"] + train["sentence2"]
    draw = random.Random(0)
    return {"imdb": draw.sample(reviews, 256), "stsb": draw.sample(sentences, 512)}


def read_columns(folder: Path, split: str) -> dict[str, list[Any]]:
    json_file = folder / f"{split}.json"
    if json_file.exists():
        return json.loads(json_file.read_text())
    files = sorted(folder.glob(f"{split}*.parquet"))
    if not files:
        raise SystemExit(f"no {split}.json or {split}*.parquet in {folder}; see the top of this file.")
    import pyarrow.parquet as parquet  # comes with `datasets`; not needed for .json files

    columns: dict[str, list[Any]] = {}
    for file in files:
        for name, values in parquet.read_table(file).to_pydict().items():
            columns.setdefault(name, []).extend(values)
    return columns


def load_result(file: Path, device: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": []}
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    command = "python examples/compress_minilm.py --model DIR --data DIR"
    if "--fits" in sys.argv:
        command += " " + shlex.join(sys.argv[sys.argv.index("--fits") :])
    meta = {"command": command, "device": gpu, "torch": torch.__version__, "commit": code_commit(), "seed": 0}
    return {**meta, **{k: v for k, v in found.items() if k not in meta}}


def save_result(file: Path, result: dict[str, Any]) -> None:
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    file.write_text(head[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
