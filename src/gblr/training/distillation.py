"""Losses that aim at the outputs of a dense model, the teacher: alone, or beside the labels."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gblr.conversion.calls import batch_call, padding_of
from gblr.conversion.outputs import output_kind, output_tensor
from gblr.training.batches import tensors_in
from gblr.training.divergence import divergence
from gblr.training.objective import logits_of, own_loss, pair, zero_without_labels
from gblr.training.train_config import Precision

Match = Literal["auto", "logits", "hidden"]
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def distillation_loss(
    teacher: nn.Module, match: Match = "auto", temperature: float = 1.0, precision: Precision = "no"
) -> Callable[[nn.Module, Any], Tensor]:
    """A loss for `gblr.train`: how far the model's outputs on a batch are from the teacher's. Dropout is turned off: it
    would be an error that nothing can learn away. `precision` is that of the teacher's products, as in `TrainConfig`.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        without_dropout(model)
        found = batch_call(model, batch)
        goal = _asked(teacher, precision, model, lambda: batch_call(teacher, batch))
        kind = match if match != "auto" else output_kind(goal)
        goal, found = output_tensor(goal, kind), output_tensor(found, kind)
        if kind == "logits":
            goal, found = (_classes_of_pixels_last(scores, batch) for scores in (goal, found))
        weight = _weights(padding_of(batch, "decoder", teacher), goal)  # where there is one, outputs are the decoder's
        if kind == "logits":
            return divergence(found, goal, temperature, weight)
        goal = goal.float()
        missing, size = ((values.square().sum(-1) * weight).sum() for values in (found.float() - goal, goal))
        return missing / size.clamp(min=1e-30)

    return loss


class TaughtLoss:
    """A loss for `gblr.train` on data with labels: `share` of it is how far the model's scores are from those of
    `teacher`, its dense original, the rest is the loss of the labels.

    Batches are (inputs, labels), or mappings for which the model computes its loss, as `gblr.train` takes them without
    a loss. A compressed model learns faster from both than from labels alone: the teacher's scores say more of a
    sample than its class. `temperature` softens them; 4 suits classes, 1 the next token of a text. `precision` is that
    of the teacher's products, as in `TrainConfig`. The teacher is put into evaluation mode. Labels are not looked at
    where `share` is 1.

        dense = copy.deepcopy(model)
        gblr.convert_(model, gblr.GaudiConfig(relative_cost=0.3), calibration=batches)
        gblr.train(model, train_data, config=config, loss=gblr.TaughtLoss(dense))
    """

    def __init__(
        self, teacher: nn.Module, share: float = 0.9, temperature: float = 4.0, label_smoothing: float = 0.0,
        precision: Precision = "no",
    ):  # fmt: skip
        if not 0 <= share <= 1:
            raise ValueError(
                f"`share` must lie in [0, 1], 0 for labels alone and 1 for the teacher alone; got {share:g}."
            )
        if not temperature > 0:
            raise ValueError(f"`temperature` must be above 0; got {temperature:g}.")
        self.teacher = teacher.eval()
        self.share, self.temperature = share, temperature
        self.label_smoothing, self.precision = label_smoothing, precision

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        weight: Tensor | None = None
        if isinstance(batch, Mapping):
            output = model(**batch)
            scores = _classes_of_pixels_last(logits_of(output), batch)
            aims = _asked(self.teacher, self.precision, model, lambda: logits_of(self.teacher(**batch)))
            aims = _classes_of_pixels_last(aims, batch)
            weight = _weights(padding_of(batch, "decoder", self.teacher), scores)
        else:
            inputs, labels = pair(batch)
            output = model(inputs)
            scores = _classes_last(logits_of(output))
            aims = _asked(self.teacher, self.precision, model, lambda: _classes_last(logits_of(self.teacher(inputs))))
        by_teacher = divergence(scores, aims, self.temperature, weight)
        if self.share == 1:  # the loss of labels is NaN where none counts, and so would be 0 times it
            return by_teacher
        if isinstance(batch, Mapping):
            by_labels = zero_without_labels(own_loss(output), batch.get("labels"))
        else:
            by_labels = zero_without_labels(self._cross_entropy(logits_of(output), labels), labels)
        return (1 - self.share) * by_labels + self.share * by_teacher

    def _cross_entropy(self, scores: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)


def _classes_last(scores: Tensor) -> Tensor:
    """Of (batch, classes, ...), as cross entropy takes them."""
    return scores.movedim(1, -1) if scores.dim() > 2 else scores


def _classes_of_pixels_last(scores: Tensor, batch: Any) -> Tensor:
    """Of models that say themselves what they give: texts have classes last, pixels of images along axis 1."""
    has_images = any(tensor.dim() == 4 for tensor in tensors_in(batch))
    return scores.movedim(1, -1) if has_images and scores.dim() == 4 else scores


def _asked(teacher: nn.Module, precision: Precision, model: nn.Module, call: Callable[[], Any]) -> Any:
    """What the teacher gives, where the model is: `gblr.train` may have taken that to a GPU."""
    device = next(model.parameters()).device
    if next(teacher.parameters()).device != device:
        teacher.to(device)
    with torch.no_grad(), torch.autocast(device.type, _DTYPES[precision], enabled=precision != "no"):
        return call()


def _weights(real: Tensor | None, outputs: Tensor) -> Tensor:
    """Of each position, 0 for padding. Products with it do what an index would wait for the device for."""
    weight = torch.ones(outputs.shape[:-1], device=outputs.device)
    if real is None or weight.shape[: real.dim()] != real.shape:
        return weight
    return weight * real.to(weight).view(*real.shape, *[1] * (weight.dim() - real.dim()))


def without_dropout(model: nn.Module) -> None:
    """All as in evaluation but the layers of gblr, and batch norms, whose statistics follow the compressed model.
    Attention has a dropout of its own besides the modules for it, so that looking for these is not enough.
    """
    for module in model.modules():
        if type(module).__module__.split(".")[0] != "gblr" and not isinstance(module, _BatchNorm):
            module.training = False
