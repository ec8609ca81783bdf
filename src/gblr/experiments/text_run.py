"""Runs on text as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gblr.conversion.refit_parts import Freedom
from gblr.experiments.run import Kind, Method, StructuredRun
from gblr.fitting.config import STIFF_GROWTH, GaudiInit
from gblr.training.train_config import FITTED_STRUCTURE_LR

Aim = Literal["data", "teacher"]
_TRAINABLE = "-trainable"


@dataclass(frozen=True)
class TextRun(StructuredRun):
    """A model with trained weights, converted, and then refitted and trained, or not. What stands here decides its
    result.

    `calibration` counts samples whose inputs weigh the errors of the fit. `refit` then takes layer after layer once
    more, each on the inputs that the compressed model gives it. `precision` is that of the model's products in both.
    `epochs` of training follow: towards the `data`, or towards the outputs of the dense model, the `teacher`.
    `structure` is free to move in refits and training, or frozen.
    """

    source: str = "weights"
    init: GaudiInit = "correlation"
    start_cost: float | None = None
    budget_start: float = 0.0
    sigma: tuple[float, float] | None = None
    structure_lr: float = FITTED_STRUCTURE_LR
    refit: bool = False
    precision: str = "float32"
    structure: Freedom = "free"
    aim: Aim = "data"
    epochs: float = 0.0
    batch_size: int = 16
    lr: float = 3e-4
    weight_decay: float = 0.01
    warmup: float = 0.05  # of the steps
    clip: float = 1.0

    @property
    def fit(self) -> dict[str, Any]:
        return super().fit | {name: getattr(self, name) for name in ("refit", "precision", "structure", "seed")}


def trained(model: str, one: Kind, suffix: str, aim: Aim) -> Kind:
    """That kind, trained further; it waits for the run of `model` without training, if one is named, for its fit."""
    waits = model and dict(one.options).get("refit")
    after = (("after", f"{model}-{one.label}-[0-9]*-seed0"),) if waits else ()
    label = one.label.removesuffix(_TRAINABLE)
    return Kind(f"{label}-{suffix}", one.method, (*one.options, ("aim", aim), *after))


def kind(label: str, method: Method, **options: Any) -> Kind:
    return Kind(label, method, tuple(options.items()))


def fitted_kinds(calibration: int) -> tuple[Kind, ...]:
    """Every method fitted to trained weights, with errors weighted by so many samples and by what they do to the
    predictions, and refitted.
    """
    how: dict[str, Any] = {"calibration": calibration, "sensitivity": True, "refit": True}
    everywhere: dict[str, Any] = {"allocation": "global", **how}
    stiff: dict[str, Any] = {"max_growth": STIFF_GROWTH}  # what these runs end with is not trained
    return (
        kind("low-rank", "low rank", **how),
        kind("low-rank-global", "low rank", **everywhere),
        kind("monarch", "monarch", **how),
        kind("blast", "blast", **how),
        kind("blast-global", "blast", **everywhere),
        kind("gblr-1", "gaudi", **how, **stiff),
        kind("gblr-1-global", "gaudi", **everywhere, **stiff),
        kind(f"gblr-1-global{_TRAINABLE}", "gaudi", **everywhere),
        kind("gblr-16", "gaudi", block_rank=16, **how, **stiff),
        kind("gblr-16-global", "gaudi", block_rank=16, **everywhere, **stiff),
        kind(f"gblr-16-global{_TRAINABLE}", "gaudi", block_rank=16, **everywhere),
    )


def trained_kinds(fitted: Sequence[Kind]) -> tuple[Kind, ...]:
    """Those that are worth training: budgets that follow the sensitivity, and Monarch, which cannot; blocks that bear
    it.
    """
    chosen = {"monarch", "low-rank-global", "blast-global"}
    return tuple(one for one in fitted if one.label in chosen or one.label.endswith(_TRAINABLE))
