"""What a conversion did: a sequence of the converted names that prints as a table."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import overload

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One matrix of a report.

    `layer` is the name, with its part behind it where a fused layer was split (`c_attn[q]`); `shape` is (out, in);
    `what` is the format and its size, or why the layer stayed dense (`converted` is False then). `error` is relative to
    the dense weight, weighted by inputs if there was calibration; None where nothing was fitted. `seconds` are those of
    the fit. After `harden_`, `form` is what the layer multiplies by, and `form_seconds` the time of a call in each form
    that was measured.
    """

    layer: str
    shape: tuple[int, int]
    what: str
    error: float | None = None
    dense_mults: int = 0
    num_mults: int = 0
    seconds: float = 0.0
    converted: bool = True
    form: str | None = None
    form_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def relative_cost(self) -> float:
        return self.num_mults / self.dense_mults if self.dense_mults else 1.0


class Report(Sequence[str]):
    """A sequence of the converted layers' names that prints as a table; `rows` has one entry per matrix, skipped
    too. `sensitivity` holds what was measured of the outputs of each layer, if it was asked for; `heal_` takes it.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        names: Sequence[str],
        title: str,
        notes: Sequence[str] = (),
        sensitivity: Mapping[str, Tensor] = MappingProxyType({}),
    ):
        self.rows, self.title, self.notes = tuple(rows), title, tuple(notes)
        self.sensitivity = dict(sensitivity)
        self._names = tuple(names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._names)

    @property
    def skipped(self) -> dict[str, str]:
        """Layers that the filter chose but that had to stay, with the reason."""
        return {row.layer: row.what for row in self.rows if not row.converted}

    @property
    def relative_cost(self) -> float:
        """Of the converted layers; each counted once, whatever number of positions it sees (`gblr.cost` weighs
        them).
        """
        done = [row for row in self.rows if row.converted]
        return sum(row.num_mults for row in done) / max(1, sum(row.dense_mults for row in done))

    @property
    def mean_error(self) -> float | None:
        errors = [row.error for row in self.rows if row.error is not None]
        return sum(errors) / len(errors) if errors else None

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def to_dict(self) -> dict[str, object]:
        rows = [{**vars(row), "relative_cost": row.relative_cost} for row in self.rows]
        totals = {"relative_cost": self.relative_cost, "mean_error": self.mean_error, "seconds": self.seconds}
        return {"title": self.title, **totals, "rows": rows, "notes": list(self.notes)}

    def __rich__(self) -> Table:
        table = Table(title=self.title, caption="\n".join(self.notes) or None)
        for heading in ("layer", "shape", "what"):
            table.add_column(heading, overflow="fold")
        for heading in ("error", "cost", "seconds"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            error = "" if row.error is None else f"{row.error:.4f}"
            cost, seconds = (f"{row.relative_cost:.3f}", f"{row.seconds:.2f}") if row.converted else ("", "")
            layer, what = escape(row.layer), escape(row.what)  # "c_attn[q]" is a name, not markup
            table.add_row(layer, f"{row.shape[0]} x {row.shape[1]}", what, error, cost, seconds)
        error = "" if self.mean_error is None else f"{self.mean_error:.4f}"
        total = f"{len(self)} layer{'' if len(self) == 1 else 's'} converted"
        table.add_section()
        table.add_row(total, "", "of the converted layers", error, f"{self.relative_cost:.3f}", f"{self.seconds:.1f}")
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110, color_system=None)
        console.print(self)
        return console.file.getvalue()  # type: ignore[attr-defined]

    __repr__ = __str__
