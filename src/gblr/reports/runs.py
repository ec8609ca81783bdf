"""Runs on a page: each has a number, a name of its own, and is compared with its dense model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gblr.reports.markup import Html, tag
from gblr.reports.record import Layer, Record, TypeCost


@dataclass(frozen=True)
class Run:
    record: Record
    label: str
    index: int

    @property
    def swatch(self) -> Html:
        """A patch of the run's colour; charts use the same."""
        return tag("i", class_=f"swatch run{self.index % 6}", aria_hidden="true")

    @property
    def name(self) -> Html:
        return tag("span", self.swatch, self.label, class_="run-name")


def number_runs(records: Sequence[Record]) -> list[Run]:
    """Equal titles get a number behind them."""
    total, seen = Counter(record.title for record in records), Counter[str]()
    runs = []
    for index, record in enumerate(records):
        seen[record.title] += 1
        more = f" ({seen[record.title]})" if total[record.title] > 1 else ""
        runs.append(Run(record, record.title + more, index))
    return runs


def speedups(record: Record) -> dict[int, float]:
    """Batch size to seconds of dense over seconds of this run's model, where both were measured."""
    main, dense = record.main, record.dense
    if main is None or dense is None:
        return {}
    ours, theirs = main.seconds_per_batch, dense.seconds_per_batch
    return {batch: theirs[batch] / ours[batch] for batch in ours if batch in theirs}


def type_costs(record: Record) -> tuple[TypeCost, ...]:
    """As recorded, or counted from the layers."""
    if record.by_type:
        return record.by_type
    groups: dict[str, list[Layer]] = {}
    for layer in record.layers:
        if layer.relative_cost is not None:
            groups.setdefault(layer.type, []).append(layer)
    return tuple(_type_cost(name, group) for name, group in groups.items())


def _type_cost(name: str, group: list[Layer]) -> TypeCost:
    costs = [layer.relative_cost for layer in group if layer.relative_cost is not None]
    mults, dense = (sum(values) for values in zip(*(_mults(layer) for layer in group), strict=True))
    return TypeCost(name, len(group), min(costs), sum(costs) / len(costs), max(costs), mults / dense)


def _mults(layer: Layer) -> tuple[float, float]:
    dense = layer.dense_mults or layer.shape[0] * layer.shape[1]
    return (layer.relative_cost or 0.0) * dense, dense
