"""How smooth the masks of a layer are: sigma, and the tables from which masks of this sigma are read."""

import ctypes
import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from gblr.ops.checks import can_read_values, check_sigma, is_plain_eager
from gblr.ops.step import step_spectrum, step_table

_SAME_TABLE = 1e-5  # devices round differently; sharp and blurred tables differ by far more


class SmoothMasks(nn.Module):
    """`sigma` is stored, the tables are not: they follow it, whoever has written to it."""

    in_features: int
    out_features: int
    rounding: bool
    sigma: Tensor
    _row_table: Tensor
    _col_table: Tensor
    _marks: tuple[int, ...] | None = None  # of sigma and the tables, when these were made from it

    def add_sigma(self, device: torch.device) -> None:
        """Infinite at first; unknown on the meta device."""
        self.register_buffer("sigma", torch.empty((), device=device, dtype=torch.float32))
        row, col = self._tables(math.inf, device)
        self.register_buffer("_row_table", row, persistent=False)
        self.register_buffer("_col_table", col, persistent=False)
        if device.type != "meta":
            self.sigma.fill_(math.inf)
        self.mark_tables()

    @property
    def _axes(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def set_sigma(self, sigma: float) -> None:
        """Sets the smoothness of the masks, in place: compiled and captured steps see it.

        Masks are those of the float32 that is stored, so that a loaded layer has the same ones.
        """
        sigma = check_sigma(ctypes.c_float(check_sigma(sigma)).value)
        row, col = self._tables(sigma, self.sigma.device)
        self.sigma.fill_(sigma)
        self._row_table.copy_(row)
        self._col_table.copy_(col)
        self.mark_tables()

    def mark_tables(self) -> None:
        self._marks = _marks_of(self.sigma, self._row_table)

    def follow_sigma(self) -> None:
        """Averages of weights (EMA) that go over `state_dict()` write to sigma and not to the tables, which are not in
        it; those of all buffers average the tables too, into such as belong to no sigma. In training, where both were
        written to, they are taken for a pair, as processes that share their buffers write them: looking would wait for
        the device. Other tensors that are in their places for one call are not followed either.
        """
        now = _marks_of(self.sigma, self._row_table)
        if now is None or now == self._marks:  # compilers stop before they would guard the marks
            return
        before = self._marks
        if before is None or now[:2] != before[:2]:
            return
        looks = now[3] == before[3] or not (self.training and torch.is_grad_enabled())
        if looks and can_read_values(self.sigma) and (sigma := _stored(self.sigma)) > 0:
            self.set_sigma(sigma)  # loading tells of one that makes no mask
        self.mark_tables()

    def renew_other_tables(self) -> None:
        """Where tables are not those of sigma although nothing tells of a change: who writes to `.data`, as Lightning
        does when it takes an average for the model, leaves no mark. Waits for the device.
        """
        self.follow_sigma()
        if _marks_of(self.sigma, self._row_table) is None or not can_read_values(self.sigma, self._row_table):
            return
        sigma = _stored(self.sigma)
        if not sigma > 0:
            return
        pairs = zip(self._tables(sigma, self.sigma.device), (self._row_table, self._col_table), strict=True)
        if math.isnan(self.sigma) or not all(torch.allclose(a, b, rtol=0, atol=_SAME_TABLE) for a, b in pairs):
            self.set_sigma(sigma)

    def train(self, mode: bool = True) -> Self:
        if mode != self.training:
            self.renew_other_tables()
        return super().train(mode)

    def _tables(self, sigma: float, device: torch.device) -> tuple[Tensor, Tensor]:
        build = step_table if self.rounding else step_spectrum
        source = torch.device("cpu") if device.type == "meta" else device
        row, col = (build(n, sigma, torch.float32, source) for n in self._axes)
        return row.clone().to(device), col.clone().to(device)

    def renew_tables(self) -> None:
        """For a sigma that was loaded."""
        if self._row_table.is_meta:  # load_state_dict(..., assign=True)
            self._row_table, self._col_table = self._tables(_stored(self.sigma), self.sigma.device)
            self.mark_tables()
        else:
            self.set_sigma(_stored(self.sigma))

    def __getstate__(self) -> dict[str, Any]:
        self.renew_other_tables()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_tables()  # copies count what is written to them anew


def _marks_of(sigma: Tensor, table: Tensor) -> tuple[int, ...] | None:
    """Which tensors they are, and how often each was written to; None where torch does not tell."""
    if not is_plain_eager() or type(sigma) is not Tensor or sigma.is_inference() or table.is_inference():
        return None
    return sigma.data_ptr(), table.data_ptr(), sigma._version, table._version


def _stored(sigma: Tensor) -> float:
    """An average of infinities is NaN by torch's formula, inf + weight * (inf - inf)."""
    value = float(sigma)
    return math.inf if math.isnan(value) else value
