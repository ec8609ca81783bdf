"""One input, several outputs side by side: how a fused projection (q, k, v in one matrix) is structured part by

part.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.layers.structured import dense_linear


class SplitLinear(nn.Module):
    """Concatenates the outputs of its `parts`, linear layers on the same input."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)  # type: ignore[misc]

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        return torch.cat([part.weight for part in self.parts])  # type: ignore[misc]

    @property
    def bias(self) -> Float[Tensor, " out"] | None:
        biases = [part.bias for part in self.parts]
        return None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]

    def to_dense_layer(self) -> nn.Linear:
        return dense_linear(self.weight, self.bias)
