"""What converted layers are called with: models may pass the input by the name that the dense layer has for it."""

from torch import Tensor


def one_input(input: Tensor | None, x: Tensor | None) -> Tensor:
    """`nn.Linear` calls it `input`, `Conv1D` of transformers `x`."""
    if (input is None) == (x is None):
        raise TypeError("a layer takes one input, as its first argument, or by name as `input` or `x`.")
    return x if input is None else input  # type: ignore[return-value]
