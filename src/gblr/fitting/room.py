"""How much a fit may hold in memory at once."""

import torch

_NUMBERS = 1 << 27  # half a gigabyte in float32
_SHARE = 16  # of what is free on a GPU: other programs may use it too


def room(device: torch.device) -> int:
    """How many numbers in float32. On a GPU steps take as long for one matrix as for many, so all that can be are
    taken together.
    """
    if device.type != "cuda":
        return _NUMBERS
    free, _ = torch.cuda.mem_get_info(device)
    return max(_NUMBERS, free // (4 * _SHARE))
