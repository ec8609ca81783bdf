"""Where the learner's metrics go: a callback for TensorBoard; any other function of a dict will do as well."""

from typing import Any, Protocol

from gblr.training.learner import Callback


class ScalarWriter(Protocol):
    """`torch.utils.tensorboard.SummaryWriter`, or whatever else has this method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def to_tensorboard(writer: ScalarWriter) -> Callback:
    """`StructureLearner(..., callback=to_tensorboard(writer))` draws each metric as `gblr/<name>` over the steps.

    >>> class Printer:
    ...     def add_scalar(self, tag, scalar_value, global_step):
    ...         print(global_step, tag, scalar_value)
    >>> to_tensorboard(Printer())({"step": 3, "relative_cost": 0.5, "sigma": 10.0})
    3 gblr/relative_cost 0.5
    3 gblr/sigma 10.0
    """

    def write(metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        for name, value in metrics.items():
            if name != "step":
                writer.add_scalar(f"gblr/{name}", value, step)

    return write
