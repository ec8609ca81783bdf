"""What a run is, and what a recipe is: plain values, no work."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gblr.fitting.config import TRAINABLE_GROWTH, Allocation, GaudiInit
from gblr.training.budget import Budget, Scope, Weights
from gblr.training.budget import Method as BudgetMethod
from gblr.training.schedules import SigmaSchedule, SigmaShape

TWIN = "twin-"  # begins the names of runs that trials start from; they are no results
CHANGED = "changed-"  # begins the labels of kinds that change one thing of another
Method = Literal["dense", "low rank", "monarch", "pixelfly", "blast", "gaudi"]


@dataclass(frozen=True)
class StructuredRun:
    """What every run has, whatever its data. The defaults are what docs/results/cifar10.md found.

    `source` says where weights come from: "" for none, "recipe/run" for the trained model of another run, "weights" for
    published ones. `trials` is a pattern of runs that choose `lr`: the best of those there are, on samples held out of
    the training set; `held_out` samples are so set aside. `after` is a pattern of runs that are to be made first.
    `relative_cost` means the converted layers, or the whole model with `scope="model"`. `start_cost` is where GBLR
    begins; None is at the target. `sensitivity` weighs fits by the model's predictions (`gblr.convert_`);
    `max_growth` is that of `GaudiConfig`.
    """

    model: str
    method: Method
    relative_cost: float = 1.0
    seed: int = 0
    block_rank: int = 1
    budget: BudgetMethod = "projection"
    init: GaudiInit = "scratch"
    source: str = ""
    scope: Scope = "layers"
    allocation: Allocation = "uniform"
    calibration: int = 0
    sensitivity: bool = False
    max_growth: float = TRAINABLE_GROWTH
    start_cost: float | None = 1.0
    budget_start: float = 0.1
    budget_end: float | None = None
    weights: Weights = "gradient"
    max_shrinkage: float | None = None
    sigma: tuple[float, float] | None = (1.0, 100.0)  # first and last; None: infinite throughout
    sigma_shape: SigmaShape = "geometric"
    sigma_warmup: float = 0.0
    sigma_end: float = 0.85
    sigma_sharp: float = 0.05
    structure_lr: float = 5e-3
    lr: float = 1e-3
    trials: str = ""
    after: str = ""
    held_out: int = 0
    weight_decay: float = 0.05

    @property
    def sigma_schedule(self) -> SigmaSchedule:
        if self.sigma is None:
            return SigmaSchedule.constant(float("inf"))
        return SigmaSchedule(
            *self.sigma, shape=self.sigma_shape, warmup=self.sigma_warmup, end=self.sigma_end, sharp=self.sigma_sharp
        )

    def learned_to(self, target: float) -> Budget:
        """The budget of a run whose converted layers may cost that in the end."""
        return Budget(
            target, method=self.budget, start=self.budget_start, end=self.budget_end, weights=self.weights,
            max_shrinkage=self.max_shrinkage,
        )  # fmt: skip

    @property
    def fit(self) -> dict[str, Any]:
        """What decides the model before any training: runs that agree in this share it."""
        names = (
            "model", "method", "relative_cost", "block_rank", "init", "source", "scope", "allocation", "calibration",
            "sensitivity", "max_growth", "start_cost",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def fit_key(self) -> str:
        """A name for files with that."""
        return hashlib.sha256(json.dumps(self.fit, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Run(StructuredRun):
    """One training run on images. What stands here decides its result."""

    epochs: int = 60
    batch_size: int = 1024
    warmup_epochs: float = 5.0
    clip: float = 1.0
    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 1.0
    mixed_share: float = 0.5  # of the batches
    drop_path: float = 0.0
    distilled: float = 0.0  # share of the loss that aims at the outputs of the network it starts from
    eval_every: int = 5

    @property
    def fit(self) -> dict[str, Any]:
        return super().fit | {"held_out": self.held_out}


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper: its runs by name, for a number of seeds, on one data set.

    `runs` are listed in the order in which they should be made. `folder` is where results lie: that of another recipe
    where the same runs serve both. `model` is the default of --model, for networks that users bring. `result` is the
    name of its published file, else that of the recipe. `options` are those of its command that users must give.
    """

    name: str
    what: str
    data: str
    runs: Callable[[int], Mapping[str, StructuredRun]]
    module: str
    folder: str = ""
    seeds: int = 3
    model: str = ""
    result: str = ""
    options: str = "--data DIR"

    @property
    def place(self) -> Path:
        return Path(self.folder or self.name)

    @property
    def result_file(self) -> str:
        return f"{self.result or self.name}.json"


@dataclass(frozen=True)
class Kind:
    """A line of a comparison: a method with the options that make it that line."""

    label: str  # in names of runs
    method: Method
    options: tuple[tuple[str, Any], ...] = ()

    def run(self, model: str, relative_cost: float, make: Callable[..., Any] = Run, **more: Any) -> Any:
        """Options of the kind itself win: they are what makes it that kind."""
        return make(model, self.method, relative_cost, **{**more, **dict(self.options)})


BASELINES = tuple(Kind(method.replace(" ", "-"), method) for method in ("low rank", "monarch", "pixelfly", "blast"))
LEARNED = (
    Kind("gblr-1", "gaudi"),
    Kind("gblr-16", "gaudi", (("block_rank", 16),)),
    Kind("gblr-1-shrinkage", "gaudi", (("budget", "shrinkage"), ("budget_start", 0.0))),
)
DENSE = Kind("dense", "dense")
