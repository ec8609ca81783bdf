"""Draws Figures 1, 2, 3 and 7 of the paper with gblr, and the baselines beside them.

    python examples/paper_figures.py --out runs/figures
    python examples/paper_figures.py --smoke            # small pictures, to see that it works

Takes a few seconds.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

import gblr
from gblr.reports import figures

SIZE, TILE = 64, 16
BUDGET = 2 * SIZE * SIZE // TILE  # multiplications of 4 x 4 tiles of rank 1; every panel of Figure 1 costs as much


def smooth(*shape: int, generator: torch.Generator) -> Tensor:
    """Random contents that vary slowly along the last axis, so that rank 1 can be seen in a picture."""
    phase = torch.rand(*shape[:-1], 3, 1, generator=generator) * 2 * math.pi
    cycles = torch.rand(*shape[:-1], 3, 1, generator=generator) * 3.5 + 0.5  # in SIZE elements
    position = torch.arange(shape[-1]) / SIZE
    return torch.sin(2 * math.pi * cycles * position + phase).sum(-2)


def random_blocks(num_blocks: int, generator: torch.Generator) -> gblr.GBLRMatrix:
    """Blocks of rank 1 anywhere, whose widths add up to the budget: any share of it may go to any block."""
    share = torch.rand(2, num_blocks, generator=generator) + 0.25
    width = (share / share.sum() * BUDGET).floor().long().clamp(max=SIZE)
    width[0, 0] += BUDGET - width.sum()
    location = torch.randint(0, SIZE, (2, num_blocks), generator=generator)
    structure = gblr.Structure(width[0], location[0], width[1], location[1])
    u, v = (smooth(num_blocks, 1, SIZE, generator=generator) for _ in range(2))
    return gblr.GBLRMatrix(structure, u, v)


def outlines(matrix: gblr.GBLRMatrix) -> Tensor:
    """(distinct blocks, 4): row_width, row_location, col_width, col_location."""
    s = matrix.structure
    return torch.unique(torch.stack([s.row_width, s.row_location, s.col_width, s.col_location], 1).long(), dim=0)


def gblr_panel(title: str, note: str, matrix: gblr.GBLRMatrix) -> figures.MatrixPanel:
    note = f"{note}\n{matrix.num_mults} multiplications as GBLR"
    return figures.MatrixPanel(title, note, matrix.to_dense().numpy(), outlines(matrix).numpy())


def figure1() -> figures.Figure:
    generator = torch.Generator().manual_seed(4)
    sizes, rows, cols = [(12, 12), (8, 8), (4, 12), (4, 4)], [8, 44, 30, 22], [14, 8, 44, 32]
    blocks = [torch.randn(*size, generator=generator) for size in sizes]
    tiles = SIZE // TILE
    u, v = (smooth(tiles, tiles, 1, TILE, generator=generator) for _ in range(2))
    sparse = gblr.GBLRMatrix.from_block_sparse(blocks, rows, cols, (SIZE, SIZE))
    tiled = gblr.GBLRMatrix.from_block_low_rank(u, v)
    free = random_blocks(12, generator)
    return figures.draw_matrices(
        [
            gblr_panel("block sparse", "4 dense blocks, no overlap", sparse),
            gblr_panel("block low rank", "16 equal tiles of rank 1", tiled),
            gblr_panel("generalized block low rank", "12 overlapping blocks of rank 1, any size", free),
        ],
        f"Three formats, one budget: {SIZE} x {SIZE} at {BUDGET / SIZE**2:.1%} of the dense multiplications",
    )


def figure2() -> figures.Figure:
    generator = torch.Generator().manual_seed(1)
    places = torch.tensor([[22, 4, 34, 6], [26, 16, 18, 30], [14, 36, 30, 20], [18, 56, 24, 32]])
    u, v = (smooth(4, 1, SIZE, generator=generator) for _ in range(2))
    matrix = gblr.GBLRMatrix(gblr.Structure(*places.T), u, v)
    return figures.draw_blocks_and_product(
        matrix.to_dense().numpy(), places.numpy(), "A GBLR matrix of four overlapping blocks, and its product with x"
    )


def figure3() -> figures.Figure:
    width, location, length = torch.tensor([128.0]), torch.tensor([192.0]), 512
    sigmas = (1.0, 3.0, 10.0, 100.0)
    masks = torch.cat([gblr.gaudi_mask(width, location, sigma, length) for sigma in sigmas])
    return figures.draw_mask_family(
        masks.numpy(),
        [f"\N{GREEK SMALL LETTER SIGMA} = {sigma:g}" for sigma in sigmas],
        gblr.boxcar_mask(width, location, length)[0].numpy(),
        "Gaudi masks tend to the boxcar as sigma grows (n = 512, width 128, location 192)",
    )


def figure7() -> figures.Figure:
    cases = [
        (128.0, 192.0, math.inf, "whole numbers: the boxcar itself"),
        (128.5, 191.8, math.inf, "real numbers: spikes at the edges"),
        (128.5, 191.8, 100.0, "smoothing takes the spikes away"),
    ]
    panels = []
    for w, l, sigma, note in cases:
        width, location = torch.tensor([w], dtype=torch.float64), torch.tensor([l], dtype=torch.float64)
        mask = gblr.gaudi_mask(width, location, sigma, 512)[0]
        boxcar = gblr.boxcar_mask(width.round(), location.round(), 512)[0]
        title = f"w = {w:g}, l = {l:g}, \N{GREEK SMALL LETTER SIGMA} = {sigma:g}"
        panels.append(figures.MaskPanel(title, note, mask.numpy(), boxcar.numpy()))
    return figures.draw_mask_panels(panels, "Gaudi masks of whole and of real parameters (n = 512)")


def baselines() -> figures.Figure:
    """The other formats at about the same cost, on contents of the same kind."""
    generator = torch.Generator().manual_seed(2)
    rows, cols = gblr.butterfly_support(grid=(16, 16), max_stride=4)

    def draw(*shape: int) -> Tensor:
        return smooth(*shape, generator=generator)

    matrices = {
        "low rank": gblr.LowRankMatrix(draw(8, SIZE), draw(8, SIZE)),
        "Monarch": gblr.MonarchMatrix(left=draw(8, 8, 8).mT, right=draw(8, 8, 8)),
        "Pixelfly": gblr.PixelflyMatrix(
            2 * torch.randn(len(rows), 4, 4, generator=generator),
            rows,
            cols,
            draw(2, SIZE) / 3,
            draw(2, SIZE),
            (16, 16),
        ),
        "BLAST": gblr.BlastMatrix(
            u=draw(4, 7, 16).mT, v=draw(4, 7, 16).mT, s=torch.randn(4, 4, 7, generator=generator)
        ),
    }
    panels = [
        figures.MatrixPanel(name, f"relative cost {matrix.relative_cost:.3f}", matrix.to_dense().numpy())
        for name, matrix in matrices.items()
    ]
    return figures.draw_matrices(panels, f"The baseline formats, {SIZE} x {SIZE}")


PICTURES = {
    "figure1_formats.png": (figure1, "Fig. 1: block sparse, block low rank and GBLR at the same cost"),
    "figure2_gblr_product.png": (figure2, "Fig. 2: four overlapping blocks, and W x through cropped factors"),
    "figure3_gaudi_masks.png": (figure3, "Fig. 3: Gaudi masks for several sigma over the boxcar"),
    "figure7_real_parameters.png": (
        figure7,
        "Fig. 7: clean for whole w and l, spikes for real ones, sigma = 100 heals",
    ),
    "baselines.png": (baselines, "besides: low rank, Monarch, Pixelfly and BLAST as dense matrices"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/figures", help="folder for the PNG files (runs/figures)")
    parser.add_argument("--dpi", type=int, default=110, help="dots per inch, 20 to 600 (110)")
    parser.add_argument("--smoke", action="store_true", help="small pictures")
    args = parser.parse_args()
    args.dpi = 30 if args.smoke else args.dpi
    if not 20 <= args.dpi <= 600:
        parser.error(f"--dpi must lie between 20 and 600; got {args.dpi}")
    if not args.out.strip():
        parser.error("--out must name a folder; got an empty name")
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (draw, what) in PICTURES.items():
            draw().savefig(folder / name, dpi=args.dpi)
            print(f"{folder / name}\n    {what}")
    except OSError as error:
        parser.error(f"--out must be a folder that can be written to; got '{args.out}' ({error})")


if __name__ == "__main__":
    main()
