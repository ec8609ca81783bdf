"""What the page's scripts draw: plain lists, rounded, with the text of read-outs made here."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gblr.reports.numbers import count, duration, metric_value, percent, size
from gblr.reports.overlaps import overlap_counts
from gblr.reports.record import SERIES, History, Layer, Record, Result
from gblr.reports.runs import Run
from gblr.reports.sections import shape_text

MAX_POINTS = 800  # of a curve: more than a screen has pixels for


def payload(runs: Sequence[Run]) -> dict[str, Any]:
    metric = runs[0].record.metric
    return {
        "metric": {"name": metric.name, "unit": metric.unit, "higher": metric.higher_is_better},
        "runs": [_run(run, like=runs[0].record) for run in runs],
    }


def _run(run: Run, like: Record) -> dict[str, Any]:
    """Results of another metric than the first run's are in the tables, not in the chart."""
    record = run.record
    results = record.results if record.metric == like.metric else ()
    return {
        "label": run.label,
        "results": [_result(result, record) for result in results if result.value is not None],
        "history": _history(record.history),
        "layers": [_layer(layer) for layer in record.layers],
    }


def _result(result: Result, record: Record) -> dict[str, Any]:
    facts = [(record.metric.name, metric_value(result.value, record.metric)), ("cost", percent(result.relative_cost))]
    if result.num_params is not None:
        facts.append(("parameters", count(result.num_params)))
    if result.file_bytes is not None:
        facts.append(("file", size(result.file_bytes)))
    facts += [(f"batch {batch}", duration(seconds)) for batch, seconds in result.seconds_per_batch.items()]
    return {
        "name": result.name,
        "main": result.main,
        "dense": result.dense,
        "value": result.value,
        "cost": result.relative_cost,
        "facts": facts,
    }


def _history(history: History) -> dict[str, Any]:
    kept = _kept(len(history.step))
    thin = {name: [_rounded(getattr(history, name)[i]) for i in kept] for name in SERIES if getattr(history, name)}
    value = [[_rounded(number) for number in history.value[i]] for i in _kept(len(history.value))]
    return {"step": [_rounded(history.step[i]) for i in kept], "value": value, **thin}


def _kept(length: int) -> list[int]:
    """At most MAX_POINTS positions at even steps, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, MAX_POINTS)).round().astype(int)).tolist()


def _layer(layer: Layer) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": layer.name, "type": layer.type, "shape": layer.shape, "cost": layer.relative_cost}
    entry |= {"rank": layer.rank, "facts": _facts(layer)}
    if layer.blocks:
        counts = overlap_counts(layer.block_array(), layer.shape)
        entry |= {"blocks": layer.blocks, "most": int(counts.max())}
        entry["facts"].append(("most blocks at an entry", str(int(counts.max()))))
        entry["facts"].append(("entries in some block", percent(float((counts > 0).mean()))))
    if layer.singular:
        entry |= {"singular": _short(layer.singular), "dense": _short(layer.singular_dense)}
    return entry


def _facts(layer: Layer) -> list[tuple[str, str]]:
    found = [("shape", shape_text(layer)), ("cost", percent(layer.relative_cost))]
    if layer.live_blocks is not None:
        of = f" of {layer.num_blocks}" if layer.num_blocks is not None else ""
        rank = f", rank {layer.block_rank} each" if layer.block_rank not in (None, 1) else ""
        found.append(("live blocks", f"{layer.live_blocks}{of}{rank}"))
    if layer.num_mults is not None:
        found.append(("multiplications", count(layer.num_mults)))
    if layer.rank is not None:
        found.append(("rank", f"{layer.rank} of {min(layer.shape)}"))
    if layer.error is not None:
        found.append(("error of fit", f"{layer.error:.3f}"))
    return found


def _short(values: Sequence[float]) -> list[float | None]:
    return [_rounded(value, 4) for value in values]


def _rounded(value: float | None, digits: int = 6) -> float | None:
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
