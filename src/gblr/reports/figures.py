"""Drawings of structured matrices and masks. Arrays come in, matplotlib figures go out; nothing here knows of torch.

Colours are from the Okabe-Ito palette and from maps that stay apart for colour-blind readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Polygon, Rectangle
except ImportError as error:
    raise ImportError("drawing needs matplotlib, which is not installed: pip install 'gblr[report]'.") from error

BLOCK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT, PAPER = "#222222", "#8A8A8A", "#E4E4E4"
MATRIX_MAP = "PuOr"  # white at zero, so what a format leaves out stays white


@dataclass(frozen=True)
class MatrixPanel:
    """One matrix of a row of matrices. `blocks` has (row_width, row_location, col_width, col_location) per outline."""

    title: str
    note: str
    dense: Float[np.ndarray, "out in"]
    blocks: Int[np.ndarray, "num_blocks 4"] | None = None


@dataclass(frozen=True)
class MaskPanel:
    """A mask over the elements of an axis, with the boxcar that it stands for."""

    title: str
    note: str
    mask: Float[np.ndarray, " length"]
    boxcar: Float[np.ndarray, " length"]


def cyclic_runs(location: int, width: int, length: int) -> list[tuple[int, int]]:
    """(start, size) of the pieces of a cyclic run: two where it crosses the end of the axis.

    >>> cyclic_runs(location=6, width=4, length=8)
    [(6, 2), (0, 2)]
    """
    start = location % length
    pieces = [(start, min(width, length - start)), (0, start + width - length)]
    return [(begin, size) for begin, size in pieces if size > 0]


def draw_matrices(panels: Sequence[MatrixPanel], title: str) -> Figure:
    """Matrices side by side, on one colour scale each, blocks outlined."""
    figure = Figure(figsize=(3.3 * len(panels) + 0.2, 4.25), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _show_matrix(axes, panel.dense)
        if panel.blocks is not None:
            for block in panel.blocks:
                _outline(axes, block, panel.dense.shape, INK, linewidth=0.7)
        axes.set_title(panel.title, fontsize=11, fontweight="bold", color=INK)
        axes.set_xlabel(panel.note, fontsize=9, color=INK)
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


def draw_blocks_and_product(
    dense: Float[np.ndarray, "out in"], blocks: Int[np.ndarray, "num_blocks 4"], title: str
) -> Figure:
    """Left: the matrix, its blocks and their masks along both axes. Right: y = W x through the cropped factors."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.08))
    _draw_blocks_with_masks(left, dense, blocks)
    _draw_cropped_product(right, dense.shape, blocks)
    return figure


def draw_mask_family(
    masks: Float[np.ndarray, "masks length"], labels: Sequence[str], boxcar: Float[np.ndarray, " length"], title: str
) -> Figure:
    """Several masks over the boxcar they tend to."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    position = np.arange(len(boxcar))
    axes.fill_between(position, boxcar, step="mid", color=PAPER, label="boxcar")
    styles = ("-", "--", "-.", (0, (5, 1.5, 1, 1.5, 1, 1.5)), ":")
    for i, (mask, label) in enumerate(zip(masks, labels, strict=True)):
        colour, style = BLOCK_COLOURS[i % len(BLOCK_COLOURS)], styles[i % len(styles)]
        axes.plot(position, mask, color=colour, linestyle=style, linewidth=2, label=label)
    axes.set_title(title, fontsize=12, color=INK)
    axes.set_xlabel("element of the axis")
    axes.set_ylabel("mask")
    axes.legend(loc="upper right", frameon=False)
    _tidy(axes, len(boxcar))
    return figure


def draw_mask_panels(panels: Sequence[MaskPanel], title: str) -> Figure:
    """Masks side by side on one scale, each over its boxcar."""
    figure = Figure(figsize=(3.7 * len(panels), 3.7), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for i, (axes, panel) in enumerate(zip(all_axes, panels, strict=True)):
        position = np.arange(len(panel.mask))
        axes.fill_between(position, panel.boxcar, step="mid", color=PAPER)
        axes.plot(position, panel.mask, color=BLOCK_COLOURS[i % len(BLOCK_COLOURS)], linewidth=1.1)
        axes.set_title(panel.title, fontsize=11, color=INK)
        axes.set_xlabel(f"element of the axis\n{panel.note}", fontsize=9)
        _tidy(axes, len(panel.mask))
    all_axes[0].set_ylabel("mask")
    return figure


def _tidy(axes: Axes, length: int) -> None:
    axes.set_xlim(0, length - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(0, color=FAINT, linewidth=0.6, zorder=0)
    axes.grid(axis="y", color=PAPER, linewidth=0.6)
    axes.set_axisbelow(True)


def _show_matrix(axes: Axes, dense: np.ndarray) -> None:
    # a few large entries should not wash out all others
    limit = float(np.quantile(np.abs(dense[dense != 0]), 0.98)) if dense.any() else 1.0
    axes.imshow(dense, cmap=MATRIX_MAP, vmin=-limit, vmax=limit, extent=(0, dense.shape[1], dense.shape[0], 0))
    axes.spines[:].set_color(FAINT)


def _outline(axes: Axes, block: np.ndarray, shape: tuple[int, ...], colour: str, linewidth: float) -> None:
    row_width, row_location, col_width, col_location = (int(value) for value in block)
    for row, height in cyclic_runs(row_location, row_width, shape[0]):
        for col, width in cyclic_runs(col_location, col_width, shape[1]):
            axes.add_patch(Rectangle((col, row), width, height, fill=False, edgecolor=colour, linewidth=linewidth))


def _draw_blocks_with_masks(axes: Axes, dense: np.ndarray, blocks: np.ndarray) -> None:
    """The matrix with one bar per block and axis outside of it: the ones of its boxcar masks."""
    rows, cols = dense.shape
    bar, gap = 0.028 * cols, 0.042 * cols
    _show_matrix(axes, dense)
    for k, block in enumerate(blocks):
        colour = BLOCK_COLOURS[k % len(BLOCK_COLOURS)]
        row_width, row_location, col_width, col_location = (int(value) for value in block)
        _outline(axes, block, dense.shape, colour, linewidth=2.2)
        offset = -gap * (k + 1) - 0.01 * cols
        axes.add_patch(Rectangle((offset, 0), bar, rows, color=PAPER, linewidth=0))
        axes.add_patch(Rectangle((0, offset), cols, bar, color=PAPER, linewidth=0))
        for start, size in cyclic_runs(row_location, row_width, rows):
            axes.add_patch(Rectangle((offset, start), bar, size, color=colour, linewidth=0))
        for start, size in cyclic_runs(col_location, col_width, cols):
            axes.add_patch(Rectangle((start, offset), size, bar, color=colour, linewidth=0))
    edge = -gap * (len(blocks) + 1)
    axes.set_xlim(edge - 0.05 * cols, cols + 0.01 * cols)
    axes.set_ylim(rows + 0.01 * rows, edge - 0.05 * rows)
    axes.text(cols / 2, edge + 0.02 * rows, "column masks (inputs)", ha="center", va="bottom", fontsize=9)
    axes.text(edge + 0.02 * cols, rows / 2, "row masks (outputs)", ha="right", va="center", rotation=90, fontsize=9)
    axes.set_axis_off()


def _draw_cropped_product(axes: Axes, shape: tuple[int, ...], blocks: np.ndarray) -> None:
    """Each block reads one run of x into one number z_k, and adds z_k times its cropped u to one run of y."""
    rows, cols = shape
    lane = 0.3  # one lane per block inside the bars of x and y, so that runs that overlap stay apart
    bar = lane * (len(blocks) + 0.5)
    for at, name, length in ((-bar, "x", cols), (10.0, "y", rows)):
        axes.add_patch(Rectangle((at, 0), bar, length, facecolor=PAPER, edgecolor=FAINT, linewidth=0.8))
        axes.text(at + bar / 2, -0.02 * length, name, ha="center", va="bottom", fontsize=13, style="italic")
    for k, block in enumerate(blocks):
        colour, node = BLOCK_COLOURS[k % len(BLOCK_COLOURS)], (k + 0.5) / len(blocks) * rows
        row_width, row_location, col_width, col_location = (int(value) for value in block)
        for start, size in cyclic_runs(col_location, col_width, cols):
            _fan(axes, -bar + lane * (k + 0.25), 0.0, lane, (start, size), node, colour)
        for start, size in cyclic_runs(row_location, row_width, rows):
            _fan(axes, 10.0 + lane * (k + 0.25), 10.0, lane, (start, size), node, colour)
        axes.plot(5.0, node, "o", color="white", markeredgecolor=colour, markeredgewidth=2, markersize=25, zorder=3)
        axes.text(5.0, node, f"$z_{k + 1}$", ha="center", va="center", fontsize=12, zorder=4)
    read, add = "$z_k$ = cropped $v_k$ \u00b7 its run of $x$", "its run of $y$ += $z_k$ \u00b7 cropped $u_k$"
    axes.text(1.9, rows * 1.02, read, ha="center", va="top", fontsize=10)
    axes.text(8.1, rows * 1.02, add, ha="center", va="top", fontsize=10)
    mults, dense_mults = int(blocks[:, 0].sum() + blocks[:, 2].sum()), rows * cols
    cost = f"{mults} multiplications instead of {dense_mults} ({mults / dense_mults:.1%})"
    axes.text(5.0, rows * 1.1, cost, ha="center", va="top", fontsize=10, fontweight="bold")
    axes.set_xlim(-bar - 0.2, 10.2 + bar)
    axes.set_ylim(rows * 1.15, -0.09 * rows)
    axes.set_axis_off()


def _fan(axes: Axes, lane_at: float, edge: float, lane: float, run: tuple[int, int], node: float, colour: str) -> None:
    """A run in its lane of a bar, and the triangle from the bar's edge to the block's number."""
    start, size = run
    axes.add_patch(Rectangle((lane_at, start), lane * 0.8, size, facecolor=colour, linewidth=0))
    corners = [(edge, start), (edge, start + size), (5.0, node)]
    axes.add_patch(Polygon(corners, facecolor=colour, edgecolor=colour, alpha=0.25, linewidth=0.8))
