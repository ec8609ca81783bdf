"""Draws what a run of `gblr compress` or `gblr train` learned: where the blocks of its layers lie, and its curves.

    gblr train vit:digits --data digits --method gaudi --cost 0.2 --out runs/scratch
    python examples/draw_run.py runs/scratch --out docs/images

    python examples/draw_run.py --smoke         # a made-up run, to see that it works

`learned_masks.png` shows how many blocks overlap at each element of a weight (paper Fig. 6), `learning.png` the curves
of training. `gblr report` has all of it on one page, for the eye; this is for papers and slides.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gblr.reports.overlaps import overlap_counts
from gblr.reports.record import Layer, Record, encode_blocks, load_record, parse_record

INK = "#222222"
SERIES = (("loss", "training loss"), ("relative_cost", "cost"), ("sigma", "sigma"), ("live_blocks", "live blocks"))


def draw_masks(record: Record, num_layers: int) -> Figure:
    """A panel for each of `num_layers` layers: the first of every type, then the next of every type, and so on."""
    layers = chosen_layers([layer for layer in record.layers if layer.blocks], num_layers)
    counts = [overlap_counts(layer.block_array(), layer.shape) for layer in layers]
    most = max(int(count.max()) for count in counts)
    figure = Figure(figsize=(1.75 * len(layers) + 0.8, 2.5), layout="constrained")
    widths = [max(layer.shape[1] / layer.shape[0], 0.7) for layer in layers]
    panels = figure.subplots(1, len(layers), squeeze=False, width_ratios=widths)[0]
    for axes, layer, count in zip(panels, layers, counts, strict=True):
        image = axes.imshow(count, cmap="cividis", vmin=0, vmax=most, interpolation="nearest")
        axes.set_title(
            f"{layer.name}\n{layer.live_blocks} blocks, cost {layer.relative_cost:.2f}", fontsize=7, color=INK
        )
        axes.set(xticks=[], yticks=[])
    figure.colorbar(image, ax=list(panels), shrink=0.8, aspect=25).set_label("overlapping blocks", fontsize=7)
    return figure


def chosen_layers(layers: list[Layer], number: int) -> list[Layer]:
    """In the order of the model."""
    seen: dict[str, int] = {}
    turns = []
    for place, layer in enumerate(layers):
        turns.append((seen.setdefault(layer.type, 0), place))
        seen[layer.type] += 1
    return [layers[place] for place in sorted(place for _, place in sorted(turns)[:number])]


def draw_learning(record: Record) -> Figure:
    history = record.history
    shown = [(name, title) for name, title in SERIES if any(v is not None for v in getattr(history, name))]
    figure = Figure(figsize=(2.6 * len(shown), 2.2), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        values = [np.nan if value is None else value for value in getattr(history, name)]
        axes.plot(history.step, values, color="#0072B2", linewidth=1.5)
        if name == "relative_cost" and record.cost is not None:
            axes.axhline(record.cost, color="#D55E00", linestyle="--", linewidth=1, label="budget")
            axes.legend(frameon=False, fontsize=8)
        if name == "relative_cost":
            axes.set_ylim(bottom=0)
        if name == "sigma":
            axes.set_yscale("log")
        axes.set_title(title, fontsize=9, color=INK)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def made_up_run() -> Record:
    draw = np.random.default_rng(0)
    blocks = np.stack(
        [draw.integers(0, 32, 9), draw.integers(1, 20, 9), draw.integers(0, 48, 9), draw.integers(1, 9, 9)], 1
    )
    layer = {"shape": [32, 48], "live_blocks": 9, "relative_cost": 0.2, "blocks": encode_blocks(blocks)}
    layers = [layer | {"name": f"layer.{i}.{kind}", "type": kind} for i in range(2) for kind in ("q", "fc1")]
    history = {"step": [1, 2, 3], "loss": [3.0, 2.0, 1.0], "relative_cost": [1.0, 0.5, 0.2], "sigma": [1.0, 10.0, None]}
    return parse_record({"format": 1, "title": "made up", "cost": 0.2, "layers": layers, "history": history})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, default=Path("runs/pictures"), help="folder for the PNG files")
    parser.add_argument("--layers", type=int, default=6, help="how many (6)")
    parser.add_argument("--dpi", type=int, default=110)
    parser.add_argument("--smoke", action="store_true", help="draw a made-up run")
    args = parser.parse_args()
    if args.run is None and not args.smoke:
        parser.error("name the folder of a run, e.g. runs/demo/small")
    try:
        record = made_up_run() if args.smoke else load_record(args.run)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    pictures = {}
    if any(layer.blocks for layer in record.layers):
        pictures["learned_masks.png"] = draw_masks(record, args.layers)
    if record.history.step:
        pictures["learning.png"] = draw_learning(record)
    if not pictures:
        parser.error(f"{args.run} has neither blocks nor a training history: nothing to draw")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        figure.savefig(args.out / name, dpi=args.dpi)
        print(args.out / name)


if __name__ == "__main__":
    main()
