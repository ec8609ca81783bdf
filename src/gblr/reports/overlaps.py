"""How many blocks overlap at each entry of a matrix (paper Fig. 6)."""

import numpy as np
from jaxtyping import Int32, Integer


def overlap_counts(blocks: Integer[np.ndarray, "live_blocks 4"], shape: tuple[int, int]) -> Int32[np.ndarray, "out in"]:
    """Blocks are (row_start, row_width, col_start, col_width), cyclic on both axes.

    Corners of all rectangles are marked first; two cumulative sums then fill them.

    >>> overlap_counts(np.array([[0, 2, 0, 2], [1, 1, 2, 2]]), (2, 3))  # the second block wraps around
    array([[1, 1, 0],
           [2, 1, 1]], dtype=int32)
    """
    corners = np.zeros((shape[0] + 1, shape[1] + 1), dtype=np.int32)
    blocks = blocks.astype(np.int64)
    for top, bottom in _pieces(blocks[:, 0], blocks[:, 1], shape[0]):
        for left, right in _pieces(blocks[:, 2], blocks[:, 3], shape[1]):
            for rows, cols, sign in ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1)):
                np.add.at(corners, (rows, cols), sign)
    return corners.cumsum(axis=0, dtype=np.int32).cumsum(axis=1, dtype=np.int32)[:-1, :-1]


def _pieces(start: np.ndarray, width: np.ndarray, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """From and to of the part before the end of the axis and of the part that goes on at its begin; may be empty."""
    end = start + width
    return [(start, np.minimum(end, length)), (np.zeros_like(start), np.maximum(end - length, 0))]
