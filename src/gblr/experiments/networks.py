"""The networks of the experiments by name, in full size and tiny, and which of their layers are converted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.filters import Filter, conv_layers, linear_layers
from gblr.models.load import load_model
from gblr.models.mixer import Mixer
from gblr.models.resnet_cifar import MEAN, STD, CifarResNet
from gblr.models.vit import ViT
from gblr.training.objective import logits_of

_ATTENTION_AND_MLP = linear_layers(include=("query", "key", "value", "fc1", "fc2"))
# timm's, transformers' and our own names of q, k, v and both MLP matrices; the attention output stays dense
_ANY_VIT = linear_layers(
    include=("query", "key", "value", "qkv", "fc1", "fc2", "intermediate.dense", "output.dense"),
    exclude=("attention.output",),
)
_STAGES = conv_layers(
    include=("layer1", "layer2", "layer3", "layer4", "encoder.stages"), exclude=("downsample", "shortcut")
)


@dataclass(frozen=True)
class Network:
    """`build(num_classes=..., **sizes)`; `tiny` sizes are for smoke tests. `where` chooses the layers to convert."""

    build: Callable[..., nn.Module]
    where: Filter
    sizes: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)


_TINY_VIT = {"width": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0}
_TINY_RESNET = {"depth": 8, "widths": (8, 16, 16)}
NETWORKS: dict[str, Network] = {
    "vit384": Network(ViT, _ATTENTION_AND_MLP, {}, _TINY_VIT),
    "vit768": Network(ViT, _ATTENTION_AND_MLP, {"width": 768, "depth": 8, "num_heads": 8, "mlp_ratio": 3.0}, _TINY_VIT),
    "mixer": Network(Mixer, linear_layers(include=("fc1", "fc2")), {}, {"width": 32, "depth": 1}),
    "vit-base": Network(
        ViT,
        _ATTENTION_AND_MLP,
        {"image_size": 224, "patch_size": 16, "width": 768, "depth": 12, "num_heads": 12},
        _TINY_VIT | {"patch_size": 8},
    ),
    **{f"resnet{depth}": Network(CifarResNet, _STAGES, {"depth": depth}, _TINY_RESNET) for depth in (20, 32, 44, 56)},
    "loaded-vit": Network(ViT, _ANY_VIT, {}, _TINY_VIT | {"patch_size": 8}),
    "loaded-resnet": Network(CifarResNet, _STAGES, {}, _TINY_RESNET),
}


def build_network(name: str, num_classes: int, tiny: bool, drop_path: float = 0.0) -> nn.Module:
    """With random weights; `drop_path` is for vision transformers."""
    network = NETWORKS[name]
    more = {"drop_path": drop_path} if network.build is ViT else {}
    return network.build(num_classes=num_classes, **(network.tiny if tiny else network.sizes), **more)


def load_network(name: str, source: str) -> nn.Module:
    """With trained weights: `source` is a folder of ResNets for CIFAR, or what `gblr.models.load` understands."""
    if not name.startswith("loaded"):
        depth = int(name.removeprefix("resnet"))
        folder = Path(source)
        place = next((p for p in (folder, folder / "resnet_cifar10") if (p / f"{name}.safetensors").exists()), None)
        if place is None:
            raise FileNotFoundError(f"no {name}.safetensors in {folder} or its subfolder resnet_cifar10.")
        return CifarResNet.from_file(place / f"{name}.safetensors", depth)
    loaded = load_model(source, task=None if ":" in source else "image-classification")
    return Scores(loaded.model.float(), loaded.image_mean or MEAN, loaded.image_std or STD)


class Scores(nn.Module):
    """A model of another library: it may have a normalisation of its own, and wrap its scores in an object."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.model = model
        given, own = torch.tensor([MEAN, STD]), torch.tensor([mean, std])
        self.register_buffer("scale", (given[1] / own[1])[:, None, None])
        self.register_buffer("shift", ((given[0] - own[0]) / own[1])[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return logits_of(self.model(images * self.scale + self.shift))
