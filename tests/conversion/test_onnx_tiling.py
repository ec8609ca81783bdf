import itertools

import torch

from gblr.conversion.onnx_tiling import similar, touched_tiles
from gblr.ops.masks import boxcar_mask
from tests.helpers import all_whole


def test_touched_tiles_are_those_where_the_mask_is_not_zero():
    for length, tile in itertools.product((1, 5, 8), (1, 2, 3, 8)):
        width, location = (x.long()[length:] for x in all_whole(length))  # widths of 1 and above
        mask = boxcar_mask(width, location, length)
        padded = torch.nn.functional.pad(mask, (0, -length % tile))
        expected = padded.unflatten(1, (-1, tile)).any(2)
        assert torch.equal(touched_tiles(width, location, length, tile), expected)


def batches_cost(counts, batches, slot, batch):
    return sum(len(items) * int(counts[items].max()) * slot + batch for items in batches)


def test_batches_are_the_cheapest_of_all(generator):
    for _ in range(20):
        counts = torch.randint(0, 12, (7,), generator=generator)
        batches = similar(counts, slot=3, batch=5)
        assert torch.equal(torch.cat(batches).sort().values, torch.arange(7))
        order = counts.argsort(descending=True)
        cuts = itertools.chain.from_iterable(itertools.combinations(range(1, 7), k) for k in range(7))
        cheapest = min(batches_cost(counts, order.tensor_split(cut), 3, 5) for cut in cuts)
        assert batches_cost(counts, batches, 3, 5) == cheapest
