import numpy as np
import pytest

from gblr.reports.overlaps import overlap_counts


def by_loops(blocks, shape):
    counts = np.zeros(shape, dtype=np.int32)
    for row, height, col, width in blocks:
        counts[np.ix_((row + np.arange(height)) % shape[0], (col + np.arange(width)) % shape[1])] += 1
    return counts


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 48), (3, 200)])
def test_counts_agree_with_loops(shape):
    rng = np.random.default_rng(0)
    starts = [rng.integers(0, length, 30) for length in shape]
    widths = [rng.integers(0, length + 1, 30) for length in shape]  # dead, full and wrapping ones among them
    blocks = np.stack([starts[0], widths[0], starts[1], widths[1]], axis=1)
    np.testing.assert_array_equal(overlap_counts(blocks, shape), by_loops(blocks, shape))


def test_no_blocks_cover_nothing():
    assert overlap_counts(np.zeros((0, 4), dtype=np.uint16), (3, 4)).sum() == 0
