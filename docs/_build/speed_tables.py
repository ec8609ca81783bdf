"""Tables of what was timed: kernels, layers, models, commands."""

from collections.abc import Callable, Sequence

from table_text import Column, Record, all_rows, markdown_table

MASKS: Sequence[Column] = (
    ("blocks", "blocks", ".0f"),
    ("length", "length", ".0f"),
    ("time of the FFT form / closed form", "fft_over_closed", ".2f"),
    ("plain torch / closed form", "plain_over_closed", ".2f"),
    ("bare passes over the memory / closed form", "passes_over_closed", ".2f"),
)
LEARNER: Sequence[Column] = (
    ("mode", "mode", ""),
    ("block_rank", "block_rank", ".0f"),
    ("budget", "method", ""),
    ("step, ms", "step_ms", ".1f"),
    ("learner, ms", "learner_ms", ".1f"),
    ("share", "share", ".3f"),
)

ONNX: Sequence[Column] = (
    ("model", "model", ""),
    ("input", "input", ""),
    ("block_rank", "block_rank", ".0f"),
    ("cost", "cost", ".2f"),
    ("options", "options", ""),
    ("operators", "operators", ".0f"),
    ("file / dense", "file_ratio", ".2f"),
    ("time / dense", "time_ratio", ".2f"),
    ("load, s", "load", ".2f"),
    ("load dense, s", "dense_load", ".2f"),
)
CALIBRATION: Sequence[Column] = (
    ("the model runs in", "precision", ""),
    ("calibration, s", "calibration", ".1f"),
    ("sensitivity, s", "sensitivity", ".1f"),
    ("refit, s", "refit", ".1f"),
    ("difference to dense", "difference", ".4f"),
)
RESIDUAL: Sequence[Column] = (
    ("goal at the end of a branch", "goal", ""),
    ("cost", "cost", "g"),
    ("perplexity", "perplexity", ".1f"),
)
CPU_FLOORS: Sequence[Column] = (
    ("matrix", "case", ""),
    ("batch", "batch", ".0f"),
    ("dense, us", "dense_us", ".0f"),
    ("packed, us", "packed_us", ".0f"),
    ("floor, us", "floor_us", ".0f"),
    ("packed / floor", "over_floor", ".2f"),
)
CPU_MODELS: Sequence[Column] = (
    ("model", "model", ""),
    ("cost", "cost", ".1f"),
    ("share of the layers in dense time", "share_of_layers", ".2f"),
    ("time over dense", "ratio", ".3f"),
    ("by Amdahl's law", "amdahl_ratio", ".3f"),
    ("time over that", "over_amdahl", ".3f"),
    ("at most", "target", ".3f"),
    ("kept packed", "packed_share", ".2f"),
)


def cpu_layers(record: Record) -> str:
    """One line per case, one column per batch: time over dense, bold where above the target, which follows."""
    batches = sorted({row["batch"] for row in record["rows"]})
    lines: dict[str, dict[int, str]] = {}
    for row in record["rows"]:
        text = f"{row['ratio']:.2f}"
        text = text if row["ratio"] <= row["target"] else f"**{text}**"
        lines.setdefault(row["case"], {})[row["batch"]] = f"{text} ({row['target']:.2f})"
    rows = [[case, *(cells[batch] for batch in batches)] for case, cells in lines.items()]
    return markdown_table(["matrix", *(f"batch {batch}" for batch in batches)], rows, num_left=1)


def cpu_models(record: Record) -> str:
    return all_rows(CPU_MODELS, num_left=1)({"rows": [row for row in record["models"] if "over_amdahl" in row]})


def gpu_layers(record: Record) -> str:
    """Speeds with their targets in brackets, bold where missed."""

    def judged(speed: float, target: float | None) -> str:
        text = f"{speed:.2f}" if target is None or speed >= target else f"**{speed:.2f}**"
        return text if target is None else f"{text} ({target:g})"

    heads = ["matrix", "tokens", "dense, us", "low rank, us", "GBLR, us", "speed / low rank", "speed / dense"]
    rows = []
    for row in record["rows"]:
        times = (f"{row[key]:.1f}" for key in ("dense_us", "low_rank_us", "packed_us"))
        speeds = judged(row["over_low_rank"], row["low_rank_target"]), judged(row["over_dense"], row["dense_target"])
        ends = f"{row['over_floor']:.1f}", f"{row['padding']:.2f}"
        rows.append([row["case"], f"{row['tokens']:,}", *times, *speeds, *ends])
    return markdown_table([*heads, "time / floor", "stored / needed"], rows, num_left=1)


def gpu_models(record: Record) -> str:
    rows = []
    for row in record["models"]:
        for key, target in row["targets"].items():
            way, value = target.rsplit(" ", 1)
            met = row[key] <= float(value) if way == "at most" else row[key] >= float(value)
            rows.append([row["model"], GPU_JUDGED[key], f"{row[key]:.2f}" if met else f"**{row[key]:.2f}**", target])
    return markdown_table(["model", "what", "measured", "target"], rows, num_left=2)


GPU_JUDGED = {
    "over_dense": "speed / dense",
    "over_dense_step": "time of a step / dense step",
    "fft_over_masks": "extra time with masks by FFT / with ours",
    "memory_over_dense": "peak memory / dense",
}


def command_times(record: Record) -> str:
    rows = [[row["what"], f"`{row['command']}`", f"{row['seconds']:.0f}"] for row in record["rows"]]
    return markdown_table(["what", "command", "seconds"], rows, num_left=2)


def command_results(record: Record, only: str = "") -> str:
    """The models that each command compared; `only` keeps the rows whose name begins so."""
    heads = [
        "run",
        "model",
        "measured",
        "cost",
        "cost of the model",
        "parameters",
        "file",
        "ms, batch 1",
        "ms, batch 64",
    ]
    rows = []
    for row in record["rows"]:
        for result in row["results"] if row["what"].startswith(only) and ": compressed" in row["what"] else ():
            name, unit = result["metric"], "%" if result["metric"] == "accuracy" else ""
            value = f"{name} {result['value']:.2f}{unit}" if unit else f"{name} {result['value']:.4f}"
            costs = (f"{result[key]:.3f}" for key in ("relative_cost", "model_relative_cost"))
            seconds = result["seconds_per_batch"] or {}
            times = (f"{seconds[batch] * 1e3:.3g}" if batch in seconds else "" for batch in ("1", "64"))
            size = f"{result['file_bytes'] / 1e3:,.0f} kB"
            what = row["what"].partition(": compressed")[0]
            rows.append([what, result["name"], value, *costs, f"{result['num_params']:,}", size, *times])
    return markdown_table(heads, rows, num_left=3)


def streaming(record: Record) -> str:
    """The most that each conversion took beyond the libraries; what it was allowed stands above."""

    def mb(count: int) -> str:
        return f"{count / 1e6:.0f}"

    bounds = ("model_bytes", "largest_bytes", "activation_bytes", "limit_bytes")
    heads = ["method", "calibration, windows", "most taken, MB", "within the limit"]
    rows = [
        [row["method"] + ", refitted" * ("refitted" in row), f"{row['calibration']}",
         mb(row["peak_bytes"]) if row["within"] else "", "yes" if row["within"] else "no, it fails"]
        for row in record["rows"]
    ]  # fmt: skip
    names = ("all weights {} MB", "largest layer {}", "a block's activations {}", "limit {}")
    told = ", ".join(name.format(mb(record[key])) for name, key in zip(names, bounds, strict=True))
    return f"{told}.\n\n{markdown_table(heads, rows, num_left=1)}"


def conv_layers(record: Record) -> str:
    """One line per layer and cost, one column per method: time over dense; for GBLR the form that was the fastest."""
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    lines: dict[tuple[str, float], dict[str, str]] = {}
    for row in record["rows"]:
        form = f" ({row['form']})" if row["form"] else ""
        lines.setdefault((row["layer"], row["cost"]), {})[row["method"]] = f"{row['ratio']:.2f}{form}"
    rows = [
        [layer, f"{cost:g}", *(cells.get(method, "") for method in methods)] for (layer, cost), cells in lines.items()
    ]
    return markdown_table(["layer", "cost", *methods], rows, num_left=1)


SPEED_TABLES: dict[tuple[str, str], Callable[[Record], str]] = {
    ("masks.json", ""): all_rows(MASKS),
    ("learner.json", ""): all_rows(LEARNER),
    ("calibration.json", ""): all_rows(CALIBRATION, num_left=1),
    ("residual.json", ""): all_rows(RESIDUAL, num_left=1),
    ("onnx.json", ""): all_rows(ONNX, num_left=2),
    ("gpu.json", ""): gpu_layers,
    ("gpu.json", "models"): gpu_models,
    ("commands.json", ""): command_times,
    ("commands.json", "results"): command_results,
    ("cpu.json", ""): cpu_layers,
    ("conv.json", ""): conv_layers,
    ("streaming.json", ""): streaming,
    ("streaming-refit.json", ""): streaming,
    ("cpu.json", "floors"): all_rows(CPU_FLOORS, num_left=1),
    ("cpu.json", "models"): cpu_models,
}
SPEED_COMMANDS = {
    "calibration.json": (
        "python benchmarks/bench_calibration.py --model FILE.gguf --data DIR --out docs/results/calibration.json"
    ),
    "residual.json": (
        "python benchmarks/bench_residual.py --model FILE.gguf --data DIR --out docs/results/residual.json"
    ),
    "masks.json": "python benchmarks/bench_masks.py --out docs/results/masks.json",
    "learner.json": "python benchmarks/bench_learner.py --out docs/results/learner.json",
    "onnx.json": "python benchmarks/bench_onnx.py --out docs/results/onnx.json",
    "gpu.json": "python benchmarks/bench_gpu.py --out docs/results/gpu.json",
    "commands.json": "python benchmarks/bench_commands.py --minilm MINILM --data DATA --out docs/results/commands.json",
    "cpu.json": "python benchmarks/bench_cpu.py --out docs/results/cpu.json",
    "conv.json": "python benchmarks/bench_conv.py --out docs/results/conv.json",
    "streaming.json": (
        "python benchmarks/bench_streaming.py --model FILE.gguf --data DIR --out docs/results/streaming.json"
    ),
    "streaming-refit.json": (
        "python benchmarks/bench_streaming.py --refit --only 'low rank' --model FILE.gguf --data DIR "
        "--out docs/results/streaming-refit.json"
    ),
}
