"""How much each layer of a model may cost, so that a given total is spent where it lowers the error most."""

import functools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.config import Config, GaudiConfig


@functools.singledispatch
def rank_costs(config: Config, shape: tuple[int, int]) -> Float[Tensor, " q"]:
    """Multiplications of the first rank of a matrix, of the second, and so on: m + n of each."""
    return torch.full((min(shape),), float(sum(shape)), dtype=torch.float64)


@rank_costs.register
def _(config: GaudiConfig, shape: tuple[int, int]) -> Float[Tensor, " q"]:
    """Each takes two numbers less than the one before, in the gauge of `gauge.py`."""
    return sum(shape) - 2 * torch.arange(min(shape), dtype=torch.float64)


def allocate(
    spectra: Sequence[Tensor], step_costs: Sequence[float | Tensor], dense_costs: Sequence[float], total: float,
    importance: Sequence[float] | None = None,
) -> list[float]:  # fmt: skip
    """Budgets of the layers, in the unit of `total`: the rank-selection kind of baseline (ALDS, Liebenwein et al.
    2021).

    `spectra[l]` are the singular values s_k of layer l (weighted, where inputs are known), `step_costs[l]` is what each
    rank costs, one number if all cost the same: multiplications times positions per sample. Minimises sum_l sum_{k >=
    r_l} s_lk^2 / ||W_l||^2, the sum of squared relative errors, each times the layer's `importance` where that is
    given, over ranks 1 <= r_l <= full whose steps cost `total` at most; no layer may cost more than dense. Ranks are
    taken in the order of gain per multiplication, a rank never before those that it needs: exact for the cost that it
    reaches, as spectra descend, where all ranks of a layer cost the same. What is left over goes to layers whose steps
    still fit.

    >>> allocate([torch.tensor([3.0, 0.1]), torch.tensor([2.0, 2.0])], [10, 10], [20, 20], total=30)
    [10.0, 20.0]
    """
    if not len(spectra) == len(step_costs) == len(dense_costs):
        raise ValueError(
            "`spectra`, `step_costs` and `dense_costs` must have one entry for each layer; got "
            f"{len(spectra)}, {len(step_costs)} and {len(dense_costs)}."
        )
    costs = [torch.as_tensor(c, dtype=torch.float64).expand(len(s)) for c, s in zip(step_costs, spectra, strict=True)]
    first = [min(float(steps[0]), dense) for steps, dense in zip(costs, dense_costs, strict=True)]
    if sum(first) > total:
        raise ValueError(
            f"rank 1 in every layer takes {sum(first) / sum(dense_costs):.3g} of the dense cost; the total is "
            f"{total / sum(dense_costs):.3g}. Raise `relative_cost` or convert fewer layers."
        )
    layer, cost, density = _steps(spectra, costs, dense_costs, importance or [1.0] * len(spectra))
    order = density.argsort(descending=True, stable=True)  # stable: the ranks of one layer stay in their order
    layer, cost = layer[order], cost[order]
    budgets, left = torch.tensor(first, dtype=torch.float64), total - sum(first)
    while True:  # ends: each round leaves out at least the dearest steps of the one before
        fits = cost <= left
        layer, cost = layer[fits], cost[fits]
        taken = cost.cumsum(0) <= left
        if not bool(taken.any()):
            break
        budgets.index_add_(0, layer[taken], cost[taken])
        left -= float(cost[taken].sum())
        layer, cost = layer[~taken], cost[~taken]
    return budgets.tolist()


def _steps(
    spectra: Sequence[Tensor], costs: Sequence[Tensor], dense_costs: Sequence[float], importance: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer of every step above rank 1, its cost, and its gain s_k^2 / ||W||^2 per multiplication."""
    layers, steps, densities = [], [], []
    layers_of = zip(spectra, costs, dense_costs, importance, strict=True)
    for index, (spectrum, cost, dense, weight) in enumerate(layers_of):
        energy = spectrum.detach().double().cpu().square()
        gain = energy / energy.sum().clamp(min=torch.finfo(torch.float64).tiny)
        affordable = max(1, int((cost.cumsum(0) <= dense * (1 + 1e-9)).sum()))
        density = (weight * gain / cost).cummin(0).values[1:affordable]
        layers.append(torch.full(density.shape, index))
        steps.append(cost[1:affordable])
        densities.append(density)
    return torch.cat(layers), torch.cat(steps), torch.cat(densities)
