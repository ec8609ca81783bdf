"""The random numbers of a process, python's, numpy's, torch's and the device's, as one state."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RngState = dict[str, Any]


def derived_seed(*key: int | str) -> int:
    """63 bits that follow from the key alone, on every machine; near keys give unrelated seeds."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every device's too


def rng_state(device: torch.device) -> RngState:
    """Tensors and plain values only: `torch.load(weights_only=True)` reads it back."""
    legacy: Any = np.random.get_state()
    name, keys, *rest = legacy
    state: RngState = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: RngState, device: torch.device) -> None:
    """What the state does not hold, the numbers of another kind of device, stays as it is."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


class Stream:
    """Random numbers of their own for one task: inside `active()` all draws are the stream's, outside none are."""

    def __init__(self, seed: int, device: torch.device):
        self._device = device
        before = rng_state(device)
        seed_all(seed)
        self._state = rng_state(device)
        set_rng_state(before, device)

    @contextmanager
    def active(self) -> Iterator[None]:
        before = rng_state(self._device)
        set_rng_state(self._state, self._device)
        try:
            yield
        finally:
            self._state = rng_state(self._device)
            set_rng_state(before, self._device)
