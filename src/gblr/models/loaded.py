"""A model with what its data needs to know."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["images", "causal language model", "text classifier", "text encoder", "unknown"]


@dataclass
class LoadedModel:
    """A model in evaluation mode, and how to feed it. None and "unknown" where nothing tells: the data decides then.

    `kind` is what goes in and comes out. `image_mean` and `image_std` are for pixels of 0 to 1; `crop_share` is the
    share of the shorter side that the model's makers kept in evaluation. `max_length` counts tokens; `pooling` is how
    one vector comes of many. `label_names` are the classes in the order of the outputs. `pretrained` is False for
    random weights; `note` is a line for the user.
    """

    model: nn.Module
    source: str
    architecture: str
    tokenizer: Any | None = None
    image_size: int | None = None
    in_channels: int | None = None
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    crop_share: float = 1.0
    max_length: int | None = None
    pooling: Literal["mean", "first"] = "mean"
    label_names: tuple[str, ...] | None = None
    kind: Kind = "unknown"
    pretrained: bool = True
    note: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))
