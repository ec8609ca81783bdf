"""What a refitted layer aims at: the weight that comes nearest to the teacher's outputs, as far as other inputs bear it
out.

A layer of a compressed model sees inputs X' that differ from the teacher's. Of all weights, W + D with the correction
D = (Y X'^T - W X' X'^T) (X' X'^T + damping)^-1 gives outputs nearest to the teacher's Y. Taken whole, that is too much
for a deep model: on other text the layers before it err in other ways, and the corrections of many layers pile up. Half
of it is better (QEP, arXiv 2504.09629, takes a constant part of the same correction, for quantised weights), and more
where D explains more of what is missing: all of it where inputs are merely scaled or turned.

A wide layer has more directions than a few tokens tell apart, and D may then do harm on inputs that were not used to
find it. So D is found from either half of the inputs and tried on the other. The error there is least for the share
<M, D> / |D|^2 of it, M being what is missing there, and the same as without any at twice that share: no more is taken.
What of |D|^2 is chance, |D|^2 - <M, D>, is half as much in a correction from all samples. To take that best share
itself was worse on whole models, and so was a damping chosen by such a trial: few tokens, with very large inputs,
decide it, so that other halves gave other weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.conversion.grams import gram_of
from gblr.fitting.precision import full_precision

_DAMPING = 1e-2  # of the mean diagonal
_ROUNDING = 1e-10  # of the mean diagonal before centring: no more than that cannot be told from rounding


@dataclass(frozen=True)
class Inputs:
    """Some input vectors about their mean, and their X^T X: layers that are given the same share it.

    Products are in the dtype of the vectors, as float64 takes twice the time on a CPU, and far more on most GPUs; about
    the mean, as Gram matrices are centred later, and what is left of large means would be rounding.
    """

    vectors: Float[Tensor, "n in"]  # less `mean`
    mean: Float[Tensor, " in"]  # rounded
    rest: Float[Tensor, " in"]  # sum of `vectors`, in float64: not quite 0
    gram: Float[Tensor, "in in"]  # in float64, of the inputs as they are

    @classmethod
    def of(cls, x: Float[Tensor, "n in"]) -> "Inputs":
        mean = x.sum(0) / max(1, len(x))
        vectors = x - mean
        m, rest = mean.double(), vectors.sum(0, dtype=torch.float64)
        half = rest + len(x) / 2 * m
        gram = gram_of(vectors).double()
        return cls(vectors, mean, rest, gram.addmm_(torch.stack([m, half], 1), torch.stack([half, m])))


@dataclass
class Moments:
    """Sums over positions, in float64: what is needed to find the best weight, with a bias or without."""

    gram: Float[Tensor, "in in"]
    cross: Float[Tensor, "out in"]
    inputs: Float[Tensor, " in"]
    outputs: Float[Tensor, " out"]
    squares: Float[Tensor, " out"]
    count: int = 0

    @classmethod
    def zeros(cls, in_features: int, out_features: int, device: torch.device) -> "Moments":
        def new(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        gram, cross = new(in_features, in_features), new(out_features, in_features)
        return cls(gram, cross, new(in_features), new(out_features), new(out_features))

    @full_precision()
    def add(self, x: Inputs, y: Float[Tensor, "n out"]) -> None:
        n, y = len(x.vectors), y.to(x.vectors.dtype)
        y_mean, y_sum, x_mean = y.sum(0) / max(1, n), y.sum(0, dtype=torch.float64), x.mean.double()
        self.gram += x.gram
        self.cross += (y - y_mean).T @ x.vectors
        self.cross.addmm_(torch.stack([y_sum, y_mean.double()], 1), torch.stack([x_mean, x.rest]))
        self.inputs += x.rest + n * x_mean
        self.outputs += y_sum
        self.squares += y.double().square().sum(0)
        self.count += n

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def centred(self) -> "Moments":
        """Without the means, which a bias takes care of."""
        n = max(1, self.count)
        gram = self.gram - torch.outer(self.inputs, self.inputs) / n
        cross = self.cross - torch.outer(self.outputs, self.inputs) / n
        differ = gram.diagonal().mean() > _ROUNDING * self.gram.diagonal().mean()
        gram, cross = gram * differ, cross * differ  # of inputs that are all alike only rounding is left
        squares = self.squares - self.outputs.square() / n
        return Moments(gram, cross, 0 * self.inputs, 0 * self.outputs, squares, self.count)

    def of_outputs(self, rows: slice | Tensor) -> "Moments":
        return Moments(self.gram, self.cross[rows], self.inputs, self.outputs[rows], self.squares[rows], self.count)


@dataclass
class Halves:
    """Moments of the first and of the other samples of every batch."""

    first: Moments
    second: Moments

    @classmethod
    def zeros(cls, in_features: int, out_features: int, device: torch.device) -> "Halves":
        return cls(*(Moments.zeros(in_features, out_features, device) for _ in range(2)))

    def __iter__(self) -> Iterator[Moments]:
        return iter((self.first, self.second))

    def add(self, x: tuple[Inputs, Inputs], y: Float[Tensor, "n out"]) -> None:
        middle = len(x[0].vectors)
        self.first.add(x[0], y[:middle])
        self.second.add(x[1], y[middle:])

    def centred(self) -> "Halves":
        return Halves(*(half.centred() for half in self))

    def of_outputs(self, rows: slice | Tensor) -> "Halves":
        return Halves(*(half.of_outputs(rows) for half in self))

    def whole(self) -> Moments:
        return self.first + self.second


@full_precision()
def halves_of(x: Float[Tensor, "n in"]) -> tuple[Inputs, Inputs]:
    middle = len(x) // 2
    return Inputs.of(x[:middle]), Inputs.of(x[middle:])


def goal(dense: Float[Tensor, "out in"], halves: Halves, whole: Moments) -> Float[Tensor, "out in"]:
    """The dense weight with as much of the correction as can be relied upon; none, if none holds on other inputs."""
    share, explained = _borne_out(dense, halves)
    share = min(2 * share, (1 + explained) / 2)
    return dense + share * _correction(dense, whole) if share else dense


def _borne_out(dense: Float[Tensor, "out in"], halves: Halves) -> tuple[float, float]:
    """The share of the correction that lowers the error of the other half the most, and how much of the squared error
    it then explains.
    """
    pull = size = 0.0
    for seen, other in ((halves.first, halves.second), (halves.second, halves.first)):
        change = _correction(dense, seen)
        pull += float((_missing(dense, other) * change).sum())
        size += float(((change @ other.gram) * change).sum())
    size = (size + pull) / 2 if size > pull else size  # of all samples
    if pull <= 0 or size <= 0:
        return 0.0, 0.0
    share, error = min(1.0, pull / size), sum(_error(dense, half) for half in halves)
    gain = share * (2 * pull - share * size)
    return share, gain / max(gain, error)  # an error of 0 may come out below it


def _error(dense: Float[Tensor, "out in"], moments: Moments) -> float:
    return float(moments.squares.sum() - ((_missing(dense, moments) + moments.cross) * dense).sum())


def _missing(dense: Float[Tensor, "out in"], moments: Moments) -> Float[Tensor, "out in"]:
    return moments.cross - dense @ moments.gram


def _correction(dense: Float[Tensor, "out in"], moments: Moments) -> Float[Tensor, "out in"]:
    damped = moments.gram.clone()
    damped.diagonal().add_(_DAMPING * max(float(damped.diagonal().mean()), 1e-30))
    return torch.cholesky_solve(_missing(dense, moments).T, torch.linalg.cholesky(damped)).T
