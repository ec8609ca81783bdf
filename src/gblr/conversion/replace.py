"""Putting a converted layer into its place."""

from torch import nn


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Sets the submodule `name`, and turns off what torch's own modules around it do past their layers.

    In eval mode `nn.TransformerEncoderLayer` reads the weights itself for a fused kernel, and `nn.TransformerEncoder`
    hands padded batches on as nested tensors, which that kernel alone takes.
    """
    parts = name.split(".")
    for depth in range(len(parts)):
        around = model.get_submodule(".".join(parts[:depth]))
        if isinstance(around, nn.TransformerEncoderLayer):
            around.activation_relu_or_gelu = 0
        elif isinstance(around, nn.TransformerEncoder):
            around.use_nested_tensor = False
    setattr(around, parts[-1], layer)
