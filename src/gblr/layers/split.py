"""One input, several outputs side by side: how a fused projection (q, k, v in one matrix) is structured by parts."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.layers.arguments import one_input
from gblr.layers.structured import dense_linear


class SplitLinear(nn.Module):
    """Concatenates the outputs of its `parts`, linear layers on the same input. With several `runs`, the first few
    outputs of each part come first, then the next few of each: q, k and v of one head, then of the next.
    """

    runs = 1  # of layers that were pickled before there were several

    def __init__(self, parts: Sequence[nn.Module], runs: int = 1):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.runs = runs

    def forward(
        self, input: Float[Tensor, "*b in"] | None = None, *, x: Float[Tensor, "*b in"] | None = None
    ) -> Float[Tensor, "*b out"]:
        x = one_input(input, x)
        outputs = [part(x) for part in self.parts]
        if self.runs == 1:
            return torch.cat(outputs, dim=-1)
        return torch.cat([y.unflatten(-1, (self.runs, -1)) for y in outputs], dim=-1).flatten(-2)

    @property
    def rows(self) -> list[slice | Tensor]:
        """Of each part, in the weight of the whole."""
        return rows_of_parts([part.out_features for part in self.parts], self.runs)  # type: ignore[misc]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)  # type: ignore[misc]

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        return self._joined([part.weight for part in self.parts])  # type: ignore[misc]

    @property
    def bias(self) -> Float[Tensor, " out"] | None:
        biases = [part.bias for part in self.parts]
        return None if biases[0] is None else self._joined(biases)  # type: ignore[arg-type]

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.unflatten(0, (self.runs, -1)) for t in tensors], dim=1).flatten(0, 1)

    def to_dense_layer(self) -> nn.Linear:
        return dense_linear(self.weight, self.bias)


def rows_of_parts(sizes: Sequence[int], runs: int = 1) -> list[slice | Tensor]:
    """Which rows of the whole each part has, one part after the other; or in `runs`, some rows of each in turn.

    >>> [rows.tolist() for rows in rows_of_parts([4, 2], runs=2)]
    [[0, 1, 3, 4], [2, 5]]
    """
    if runs == 1:
        ends = list(itertools.accumulate(sizes))
        return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    rows = torch.arange(sum(sizes)).view(runs, -1)
    return [part.flatten() for part in rows.split([size // runs for size in sizes], dim=1)]
