"""What a model shows of its layers on real inputs, measured once for any number of conversions."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gblr.atomic import appearing
from gblr.conversion.choosing import check_model, choose
from gblr.conversion.filters import Filter, linear_layers
from gblr.conversion.sensitivity import collect_sensitivity
from gblr.conversion.sources import Source
from gblr.conversion.statistics import Statistics, collect
from gblr.conversion.tensor_files import CheckpointError, save_file

_FORMAT = "gblr calibration 1"


@dataclass(frozen=True)
class Calibration:
    """By the names of layers: the inputs that they see (`statistics`), and how much each of their outputs does to what
    the model predicts (`sensitivity`, empty if it was not measured).
    """

    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    sensitivity: Mapping[str, Tensor] = field(default_factory=dict)

    def of(self, sources: Sequence[Source], sensitivity: bool) -> "Calibration":
        """What is there of these layers, on their devices; an error if something is missing or of other sizes."""
        if sensitivity and not self.sensitivity:
            raise ValueError("`calibration` has no sensitivity: measure it by `gblr.calibrate(..., sensitivity=True)`.")
        missing = [source.name for source in sources if source.name not in self.statistics]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"`calibration` has nothing of {missing[0]!r}{more}, which `where` chose. Measure with the same "
                "`where`: `gblr.calibrate(model, batches, where)`."
            )
        statistics, rows = {}, {}
        for source in sources:
            out_features, in_features = source.weight.shape
            found = self.statistics[source.name]
            sizes = (len(self.sensitivity[source.name]) if sensitivity else out_features, len(found.gram))
            if sizes != (out_features, in_features):
                raise ValueError(
                    f"`calibration` was made of another model: {source.name!r} is {sizes[0]} x {sizes[1]} there and "
                    f"{out_features} x {in_features} here (outputs x inputs)."
                )
            statistics[source.name] = replace(found, gram=found.gram.to(source.weight.device))
            if sensitivity:
                rows[source.name] = self.sensitivity[source.name]
        return Calibration(statistics, rows)

    def save(self, file: str | Path) -> None:
        """As one safetensors file, in float64; inputs that layers share are stored once."""
        file, tensors, layers = Path(file), {}, {}
        file.parent.mkdir(parents=True, exist_ok=True)
        last = ""  # layers that share their inputs come one after the other
        for name, found in self.statistics.items():
            if not last or not _same(self.statistics[last], found):
                last, tensors[f"{name}.gram"] = name, found.gram.detach().cpu().contiguous()
            layers[name] = {"gram": f"{last}.gram", "positions": found.positions}
        tensors |= {f"{name}.sensitivity": rows.detach().cpu().contiguous() for name, rows in self.sensitivity.items()}
        metadata = {"format": _FORMAT, "layers": json.dumps(layers), "sensitivity": json.dumps(list(self.sensitivity))}
        with appearing(file) as new:
            save_file(tensors, new, metadata)

    @classmethod
    def load(cls, file: str | Path) -> "Calibration":
        """What `save` has written, on the CPU."""
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                told = opened.metadata() or {}
                if told.get("format") != _FORMAT:
                    raise CheckpointError(f"{file} is no calibration that `gblr.Calibration.save` has written.")
                layers = json.loads(told["layers"])
                grams = {key: opened.get_tensor(key) for key in {layer["gram"] for layer in layers.values()}}
                rows = {name: opened.get_tensor(f"{name}.sensitivity") for name in json.loads(told["sensitivity"])}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is missing, truncated or no safetensors file: {error}") from error
        return cls({name: Statistics(grams[found["gram"]], found["positions"]) for name, found in layers.items()}, rows)


def _same(one: Statistics, other: Statistics) -> bool:
    return one.positions == other.positions and torch.equal(one.gram, other.gram)


def calibrate(
    model: nn.Module, batches: Iterable[Any], where: Filter | None = None, sensitivity: bool = False
) -> Calibration:
    """Runs the dense `model` on `batches` and keeps what `convert_` asks of them: give it the result as `calibration`.

    So several costs and formats are tried after one measurement, and `Calibration.save` keeps it for another day.
    `where` and `batches` are those of `convert_`. The layers that are converted must be among those measured here; the
    sensitivity is used by conversions that ask for it.

    >>> from copy import deepcopy
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    >>> measured = calibrate(model, [torch.randn(100, 32)])
    >>> for cost in (0.5, 0.25):
    ...     report = gblr.convert_(deepcopy(model), gblr.LowRankConfig(cost), calibration=measured)
    ...     print(round(report.relative_cost, 2))
    0.47
    0.23
    """
    where = linear_layers() if where is None else where
    check_model(model, where)
    sources, _ = choose(model, where, split_fused=True)
    return measure(model, sources, batches, sensitivity)


def measure(model: nn.Module, sources: Sequence[Source], batches: Iterable[Any], sensitivity: bool) -> Calibration:
    check_batches(batches)
    if sensitivity:
        batches = list(batches)  # run twice
    statistics = collect(model, sources, batches)
    return Calibration(statistics, collect_sensitivity(model, sources, batches) if sensitivity else {})  # type: ignore[arg-type]


def check_batches(batches: object) -> None:
    """What is easily taken for batches."""
    if isinstance(batches, (str, os.PathLike)):
        raise ValueError(
            f"`calibration` must yield batches; got the path {str(batches)!r}. `gblr.Calibration.load` reads what "
            "`Calibration.save` has written."
        )
    if isinstance(batches, Mapping):
        raise ValueError("`calibration` must yield batches; got one batch, a mapping. Put it into a list: [batch].")
    if not isinstance(batches, Iterable):
        raise ValueError(f"`calibration` must yield batches, as a list does; got {type(batches).__name__}.")
