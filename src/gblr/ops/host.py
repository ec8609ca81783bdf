"""Where tensors are made that name no device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_host() -> Iterator[None]:
    """On the CPU, also after `torch.set_default_device("cuda")`: plans and tables are made there, and moved.

    >>> with torch.device("meta"), on_host():
    ...     torch.arange(2).device
    device(type='cpu')
    """
    if torch.get_default_device().type == "cpu":  # entered, the context would cost every call of torch 1 us
        yield
        return
    with torch.device("cpu"):
        yield
