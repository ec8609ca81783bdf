"""The loss of a batch in training, and what is summed over batches in evaluation."""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gblr.conversion.measure import undisturbed
from gblr.training.batches import Part, cut, num_samples
from gblr.training.mixing import draw_mix, mix_inputs, mix_targets
from gblr.training.processes import sum_over_processes
from gblr.training.rng import derived_seed
from gblr.training.train_config import TrainConfig

Loss = Callable[[Any, Any], Tensor]  # (model, batch) -> mean loss
Sums = Callable[[Any, Any], Mapping[str, Any]]  # (model, batch) -> sums over samples, their number as "count"
_NO_LABEL = -100  # Hugging Face's mark for positions that count nothing


class Objective:
    """Mean loss of a training batch: cross entropy of (inputs, labels), or what the model itself returns as `.loss`.

    `custom`, a function (model, batch) -> loss, takes the place of both.
    """

    def __init__(self, config: TrainConfig, custom: Loss | None = None):
        self.config, self.custom = config, custom
        self.mixes = config.mixup > 0 or config.cutmix > 0
        if custom is not None and (self.mixes or config.label_smoothing):
            raise ValueError("`mixup`, `cutmix` and `label_smoothing` belong to the built-in loss; do them in `loss`.")

    def __call__(self, model: nn.Module, batch: Any, number: int) -> Tensor:
        """`number` is that of the batch in the run: mixing follows from it and the seed."""
        if self.custom is not None:
            return self.custom(model, batch)
        if isinstance(batch, Mapping):
            return self._own_loss(model, batch)
        inputs, targets = pair(batch)
        if not self.mixes:
            return self._cross_entropy(logits_of(model(inputs)), targets)
        mix = self._draw(inputs, number)
        logits = logits_of(model(mix_inputs(inputs, mix)))
        return self._cross_entropy(logits, mix_targets(targets, logits.shape[-1], mix))

    def _own_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        if self.mixes or self.config.label_smoothing:
            raise ValueError(
                "`mixup`, `cutmix` and `label_smoothing` need batches (inputs, labels); got a mapping, for which the "
                "model computes its loss itself."
            )
        return zero_without_labels(own_loss(model(**batch)), batch.get("labels"))

    def _draw(self, inputs: Tensor, number: int) -> Any:
        height, width = inputs.shape[-2:] if inputs.dim() >= 3 else (0, 0)
        if self.config.cutmix > 0 and height * width == 0:
            raise ValueError(f"`cutmix` needs images (batch, channels, height, width); got {tuple(inputs.shape)}.")
        rng = random.Random(derived_seed(self.config.seed, "mix", number))
        return draw_mix(self.config.mixup, self.config.cutmix, height, width, rng)

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(logits, targets, label_smoothing=self.config.label_smoothing)
        return zero_without_labels(loss, targets)


def mean_metrics(model: nn.Module, parts: Iterable[Part], sums_of: Sums) -> dict[str, float]:
    """Means over all samples of all processes. Sums are kept in float64: in half precision they soon stop growing."""
    totals: dict[str, Any] = {}
    device = next(model.parameters()).device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    with undisturbed(model):
        for batch, num_real in parts:
            sums = sums_of(model, cut(batch, 0, max(1, num_real)))
            if "count" not in sums:
                raise ValueError(
                    f"`evaluate` must return sums and the number of samples as 'count'; got {sorted(sums)}."
                )
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + (torch.as_tensor(value, dtype=dtype) if num_real else 0.0)
    names = sorted(totals)
    values = sum_over_processes(
        torch.stack([torch.as_tensor(totals[name], dtype=dtype, device=device) for name in names])
    )
    found = dict(zip(names, values.tolist(), strict=True))
    count = found.pop("count")
    means = {name: value / max(count, 1.0) for name, value in found.items()}
    if "log_perplexity" in means:
        means["perplexity"] = math.exp(min(700.0, means.pop("log_perplexity")))  # above, exp overflows
    return means


def default_sums(custom: Loss | None) -> Sums:
    """Loss and accuracy of a classifier, loss and perplexity of a language model; of a custom loss that loss alone."""
    if custom is None:
        own_sums = _OwnSums()
        return lambda model, batch: own_sums(model, batch) if isinstance(batch, Mapping) else _class_sums(model, batch)

    def sums(model: nn.Module, batch: Any) -> dict[str, Any]:
        count = num_samples(batch)
        return {"loss": _in_full(custom(model, batch)) * count, "count": count}

    return sums


def _class_sums(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Classes lie along axis 1, as cross entropy has them, and labels are classes or a probability for each."""
    inputs, labels = pair(batch)
    logits = _in_full(logits_of(model(inputs)))
    is_soft = labels.is_floating_point()
    classes = labels.argmax(1) if is_soft else labels
    loss = functional.cross_entropy(logits, labels.to(logits.dtype) if is_soft else labels, reduction="sum")
    return {"loss": loss, "accuracy": (logits.argmax(1) == classes).sum(), "count": (classes != _NO_LABEL).sum()}


class _OwnSums:
    """Of a model that computes its loss. Classes, of positions or of samples, weigh batches by labels that count."""

    def __init__(self) -> None:
        self._first_counts: bool | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        output = model(**batch)
        loss, labels = _in_full(own_loss(output)), batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() not in (1, 2):
            size = num_samples(batch)
            return {"loss": loss * size, "count": size}
        counted = labels[:, 1:] if labels.dim() == 2 and not self._counts_first(model, batch, loss) else labels
        count = (counted != _NO_LABEL).sum()
        total = torch.where(count > 0, loss * count, 0.0)  # the mean over no label is NaN
        if labels.dim() == 2:
            return {"loss": total, "log_perplexity": total, "count": count}
        logits = getattr(output, "logits", None)
        accuracy = {} if logits is None else {"accuracy": (logits.argmax(-1) == labels).sum()}
        return {"loss": total, "count": count} | accuracy

    def _counts_first(self, model: nn.Module, batch: Mapping[str, Any], loss: Tensor) -> bool:
        """Whether the loss depends on the first label of a sequence: that of causal models does not, as they shift
        labels by one. No name tells; another first label does, tried once, on all processes.
        """
        if self._first_counts is None:
            labels = batch["labels"].clone()
            labels[:, 0] = labels[:, 0] == 0  # class 1 in place of 0, and 0 in place of any other
            other = _in_full(own_loss(model(**{**batch, "labels": labels})))
            self._first_counts = not torch.allclose(other, loss, rtol=1e-6, atol=0.0, equal_nan=True)
        return self._first_counts


def _in_full(values: Any) -> Tensor:
    """In float32 at least: sums over a batch do not fit into half precision."""
    values = torch.as_tensor(values)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            "a batch must be (inputs, labels) or a mapping of the model's keyword arguments; got "
            f"{type(batch).__name__}. Give `loss` (and `evaluate`) for any other."
        )
    inputs, labels = batch
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        raise TypeError(
            f"the labels of a batch are a tensor with one for each sample; got {labels!r}. Samples in a list become "
            "batches by DataLoader(samples, batch_size=...)."
        )
    return inputs, labels


def logits_of(output: Any) -> Any:
    """What a model calls logits, else the first of several tensors that it returns.

    >>> logits_of({"features": torch.zeros(2, 7), "logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"]
    if hasattr(output, "logits"):
        return output.logits
    several = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((value for value in several if isinstance(value, Tensor)), output)


def zero_without_labels(loss: Tensor, labels: Any) -> Tensor:
    """0 in place of NaN, the mean over no label: its gradients are 0 already. Causal models leave the first label of a
    sequence out.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return loss
    counted = labels[:, 1:] if labels.dim() == 2 else labels
    return torch.where(loss.isnan() & (counted == _NO_LABEL).all(), 0.0, loss)


def own_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ValueError("the model returned no `.loss` for a mapping; put `labels` into the batches, or give `loss=`.")
    return loss
