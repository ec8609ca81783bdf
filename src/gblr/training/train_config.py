"""What a training run is: lengths, rates, precision, regularization, and how often it reports and saves."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gblr.fitting.config import check_at_least, check_choice, check_number
from gblr.training.budget import Budget
from gblr.training.rates import RateShape
from gblr.training.schedules import SigmaSchedule, check_shares

Precision = Literal["no", "bf16", "fp16"]
Parallel = Literal["ddp", "fsdp"]
# what may differ between a run and its continuation: none of it changes what is computed
_FREE = frozenset(
    {"checkpoint_every", "num_workers", "compile", "channels_last", "parallel", "find_unused", "tensorboard"}
)
# Fractions of an axis a step, where a fit has put the blocks where they belong: the rate of the paper's fine-tuning.
# Rates ten times as high and more lost what the fit had won, on MiniLM and on ResNet-20.
FITTED_STRUCTURE_LR = 1e-4


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `gblr.train`.

    Length: `epochs` over the data, or `max_steps` optimizer steps, which then counts instead. `batch_size` is that of
    all processes together; a step takes `accumulate` such batches. What is left over at the end of an epoch is dropped.
    DataLoaders and other iterables of batches have a size of their own, also that of all processes.

    Rates: `lr` for contents and everything else, `structure_lr` for widths and locations; both rise over the share
    `warmup` of the steps and fall to the share `final_lr` of themselves along `schedule`. `betas` are AdamW's, but for
    structure, which has (0, 0.999). `weight_decay` reaches weights only. `clip_norm` bounds the gradient of everything
    but structure, whose optimizer is free of scale; None turns it off.

    Structure: with a `budget`, Gaudi layers learn theirs, `sigma` being the smoothness of their masks; without one it
    stays, as nothing would keep the cost. Models without Gaudi layers, such as a dense one to compare with, leave both
    aside.

    Images: `mixup` and `cutmix` are the parameters of the Beta distributions, as in timm, 0 for off; with both on, each
    takes half of the batches. `ema` is the decay of an average of the weights, which evaluation then uses; structure is
    copied, not averaged.

    `channels_last` keeps images and the weights of convolutions in the layout that vector lanes and matrix units read:
    the same numbers but for rounding, sooner, for networks of convolutions.

    `cuda_graphs` captures the step as a CUDA graph, one for each shape of batch, and replays it: for small models,
    whose kernels take longer to launch than to run. The model and a loss of yours must not wait for the device then,
    and batches should have few shapes: those after the first 64 are not captured. On one GPU, without `accumulate`,
    `mixup` and `cutmix`.

    Labels: `label_smoothing` is that of the built-in loss. Numbers: `precision` is "no" for float32, or the mixed
    precision "bf16" or "fp16". `seed` decides order and augmentation; `num_workers` processes load data. `compile` runs
    the model through `torch.compile`. `tensorboard` writes curves below `out`.

    `eval_every` and `checkpoint_every` count epochs, fractions allowed. `parallel` matters under `torchrun` only:
    "ddp", or "fsdp" to shard parameters too; None follows the environment variable GBLR_PARALLEL, else "ddp".
    `find_unused` is for DDP and models of which a step may leave parameters unused.

    A value out of its range, and options that do not go together, are a ValueError.

    >>> TrainConfig(epochs=30, batch_size=1024, budget=Budget(relative_cost=0.25), precision="bf16").lr
    0.001
    """

    epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 128
    accumulate: int = 1
    lr: float = 1e-3
    structure_lr: float = 5e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: RateShape = "cosine"
    warmup: float = 0.05
    final_lr: float = 0.0
    clip_norm: float | None = 1.0
    budget: Budget | None = None
    sigma: SigmaSchedule | None = None
    precision: Precision = "no"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    ema: float | None = None
    eval_every: float = 1.0
    checkpoint_every: float = 1.0
    seed: int = 0
    num_workers: int = 0
    compile: bool = False
    channels_last: bool = False
    cuda_graphs: bool = False
    parallel: Parallel | None = None
    find_unused: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, batch_size=self.batch_size, accumulate=self.accumulate)
        check_at_least(0, num_workers=self.num_workers, seed=self.seed)
        if self.max_steps is not None:
            check_at_least(1, max_steps=self.max_steps)
        check_choice("schedule", self.schedule, RateShape)
        check_choice("precision", self.precision, Precision)
        if self.parallel is not None:
            check_choice("parallel", self.parallel, Parallel)
        check_shares(warmup=self.warmup)
        _check_positive(epochs=self.epochs, eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)
        _check_not_negative(
            lr=self.lr, structure_lr=self.structure_lr, weight_decay=self.weight_decay, final_lr=self.final_lr,
            mixup=self.mixup, cutmix=self.cutmix,
        )  # fmt: skip
        if self.clip_norm is not None:
            _check_positive(clip_norm=self.clip_norm)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing` must lie in [0, 1); got {self.label_smoothing}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"`ema` is a decay in (0, 1), such as 0.999, or None for off; got {self.ema}.")
        if self.cuda_graphs and (self.accumulate > 1 or self.mixup or self.cutmix):
            raise ValueError("`cuda_graphs` captures one step as it is: leave out `accumulate`, `mixup` and `cutmix`.")
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise TypeError(f"`budget` must be a gblr.Budget, such as Budget(relative_cost=0.3); got {self.budget!r}.")
        if self.sigma is not None and self.budget is None:
            raise ValueError("`sigma` is the schedule of a learned structure: give a `budget` too.")

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it, for a checkpoint."""
        return json.loads(json.dumps(asdict(self), default=str))

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Fields in which the run of a checkpoint was another, each with both values."""
        mine = self.to_plain()
        names = [name for name in {**mine, **stored} if name not in _FREE]
        return [
            f"`{name}` was {stored.get(name)!r} and is {mine.get(name)!r}"
            for name in names
            if stored.get(name) != mine.get(name)
        ]


def _check_positive(**values: float) -> None:
    check_number(**values)
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"`{name}` must be above 0; got {value}.")


def _check_not_negative(**values: float) -> None:
    check_number(**values)
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"`{name}` must be 0 or above; got {value}.")
