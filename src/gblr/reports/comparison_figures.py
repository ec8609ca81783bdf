"""Drawings of comparisons: a measure against cost with the spread over seeds, and where layers put their blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gblr.reports.figures import BLOCK_COLOURS, FAINT, INK, PAPER

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("drawing needs matplotlib, which is not installed: pip install 'gblr[report]'.") from error

_MARKERS = "osD^vPX*<>"
_COLOURS = (*BLOCK_COLOURS, "#000000", "#7F3C8D", "#A5AA99", "#6F4E37")


@dataclass(frozen=True)
class Line:
    """A method: costs reached, and mean and standard deviation of the measure at each."""

    label: str
    cost: Sequence[float]
    mean: Sequence[float]
    spread: Sequence[float]


def draw_against_cost(
    lines: Sequence[Line],
    dense: tuple[float, float] | None,
    measure: str,
    title: str,
    higher_is_better: bool = True,
) -> Figure:
    """`dense` is the mean and the spread at cost 1, drawn as a band across. Where less is better, bad methods may be
    orders of magnitude away: the axis is logarithmic.
    """
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    if dense is not None:
        axes.axhspan(dense[0] - dense[1], dense[0] + dense[1], color=PAPER, zorder=0)
        axes.axhline(dense[0], color=FAINT, linestyle="--", linewidth=1.2, label="dense")
    for i, line in enumerate(lines):
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        style: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": 1.6, "capsize": 3, "markersize": 5}
        axes.errorbar(line.cost, line.mean, yerr=line.spread, label=line.label, **style)
    axes.set_title(title, fontsize=12, color=INK)
    axes.set_xlabel("cost: multiplications over dense")
    axes.set_ylabel(measure)
    axes.grid(color=PAPER, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not higher_is_better:
        axes.set_yscale("log")
    figure.legend(frameon=False, fontsize=9, loc="outside right center")  # lines may be anywhere
    return figure


@dataclass(frozen=True)
class OverlapPanel:
    """How many blocks lie over each element of a weight."""

    title: str
    note: str
    counts: Int[np.ndarray, "out in"]


def draw_overlaps(rows: Sequence[Sequence[OverlapPanel]], title: str) -> Figure:
    """A row for each layer, a panel for each of its weights; bright is many blocks, each panel on its own scale."""
    figure = Figure(figsize=(2.1 * len(rows[0]), 2.4 * len(rows) + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    for line, panels in zip(figure.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        for axes, panel in zip(line, panels, strict=True):
            axes.imshow(_shrunk(panel.counts), cmap="inferno", aspect="auto", vmin=0)
            axes.set_title(panel.title, fontsize=8, color=INK)
            axes.set_xlabel(panel.note, fontsize=7, color=INK)
            axes.set_xticks([])
            axes.set_yticks([])
    return figure


def _shrunk(counts: np.ndarray, most: int = 192) -> np.ndarray:
    """Means over tiles, so that the file stays small."""
    rows, cols = (max(1, -(-size // most)) for size in counts.shape)
    cut = counts[: counts.shape[0] // rows * rows, : counts.shape[1] // cols * cols]
    return cut.reshape(cut.shape[0] // rows, rows, cut.shape[1] // cols, cols).mean((1, 3))
