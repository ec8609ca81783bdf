"""What a model is good for: inputs to calibrate on, data to train on, and one number that says how well it does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from gblr.conversion.measure import undisturbed
from gblr.models.load import LoadedModel
from gblr.training.batches import to_device
from gblr.training.objective import Loss, logits_of

TaskName = Literal[
    "image classification",
    "language modelling",
    "text classification",
    "sentence similarity",
    "outputs of the dense model",
]

_CPU = torch.device("cpu")


class Samples(Protocol):
    """Inputs of the training part, by number."""

    def __len__(self) -> int: ...

    def inputs(self, index: Sequence[int]) -> Any:
        """A batch as the model is called with it, without labels."""


@dataclass(frozen=True)
class Request:
    """Which data for which model; the most samples to train and to evaluate on, None for what suits the task."""

    source: str
    loaded: LoadedModel
    seed: int = 0
    max_train: int | None = None
    max_eval: int | None = None


@dataclass
class Task:
    """Data that suits a model, and how the model is judged on it.

    `train_data` (and `eval_data`) are what `gblr.train` takes, with `loss` if the loss is not its own;
    `train_defaults` are arguments of `TrainConfig` that are sensible for it, `distill` is the share of the loss that
    had better aim at the dense model's scores. `example` is a small batch as the model is called with it: a tensor or a
    dict. Batches lie on `device`; `to` changes it. Pixels of 0 to 1 are normalised by `image_mean` and `image_std`.
    """

    name: TaskName
    source: str
    what: str
    metric: str
    unit: str
    higher_is_better: bool
    samples: Samples
    score: Callable[[nn.Module], float]
    train_data: Any | None = None
    eval_data: Any | None = None
    loss: Loss | None = None
    train_defaults: dict[str, Any] = field(default_factory=dict)
    distill: float = 0.0
    batch_size: int = 32  # of calibration
    seed: int = 0
    device: torch.device = _CPU
    example: Any = None
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    remark: str = ""  # for the user, on what of the data is not used as it is

    def __post_init__(self) -> None:
        if self.example is None:
            self.example = self.batch(min(2, len(self.samples)))

    @property
    def note(self) -> str:
        """For the user: how images are normalised, and the remark on the data."""
        if self.image_mean is None or self.image_std is None:
            return self.remark
        mean, std = (" ".join(f"{value:.3g}" for value in values) for values in (self.image_mean, self.image_std))
        how = f"images: scaled to [0, 1], mean {mean}, std {std}; `image_mean` and `image_std` of your model change it"
        return "\n".join(filter(None, (how, self.remark)))

    def evaluate(self, model: nn.Module) -> float:
        """The metric on the evaluation part; the model is left as it was."""
        with undisturbed(model):
            return self.score(model)

    def calibration(self, num: int) -> list[Any]:
        """`num` samples of the training part without labels, in batches; the same ones for the same seed."""
        if num < 1:
            raise ValueError(f"`num` must be 1 or more; got {num}.")
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.seed))
        parts = order[:num].split(self.batch_size)
        return [to_device(self.samples.inputs(part.tolist()), self.device) for part in parts]

    def batch(self, size: int) -> Any:
        """Inputs of that batch size, e.g. for timing; samples repeat if there are too few."""
        batch = self.samples.inputs([i % len(self.samples) for i in range(size)])
        return to_device(batch, self.device)

    def to(self, device: torch.device | str) -> "Task":
        self.device = torch.device(device)
        self.example = to_device(self.example, self.device)
        return self


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: named arguments from a mapping, positional ones from a tuple."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def length_of(batch: Any) -> int | None:
    """Tokens of each text of a batch, padding included; None where there are none."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() == 2 else None


def main_output(output: Any) -> Tensor:
    """Scores or hidden states, whatever the model calls them."""
    hidden = getattr(output, "last_hidden_state", None)
    found = hidden if isinstance(hidden, Tensor) and not hasattr(output, "logits") else logits_of(output)
    if not isinstance(found, Tensor):
        raise TypeError(f"the model must return a tensor, or an object with one; got {type(output).__name__}.")
    return found


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
