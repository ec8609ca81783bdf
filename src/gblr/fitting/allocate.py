"""How much each layer of a model may cost, so that a given total is spent where it lowers the error most."""

import torch
from torch import Tensor


def allocate(
    spectra: list[Tensor], step_costs: list[float], dense_costs: list[float], total: float,
    importance: list[float] | None = None,
) -> list[float]:  # fmt: skip
    """Budgets of the layers, in the unit of `total`: the rank-selection kind of baseline (ALDS, Liebenwein et al.
    2021).

    `spectra[l]` are the singular values s_k of layer l (weighted, where inputs are known), `step_costs[l]` is what one
    more rank costs: multiplications times positions per sample. Minimises sum_l sum_{k >= r_l} s_lk^2 / ||W_l||^2, the
    sum of squared relative errors, each times the layer's `importance` where that is given, over ranks 1 <= r_l <= full
    with sum_l r_l step_costs[l] <= total; no layer may cost more than dense. As spectra descend, taking ranks in the
    order of gain per multiplication is exact for the cost that it reaches; what is left over goes to layers whose steps
    still fit.

    >>> allocate([torch.tensor([3.0, 0.1]), torch.tensor([2.0, 2.0])], [10, 10], [20, 20], total=30)
    [10.0, 20.0]
    """
    if not len(spectra) == len(step_costs) == len(dense_costs):
        raise ValueError(
            "`spectra`, `step_costs` and `dense_costs` must have one entry for each layer; got "
            f"{len(spectra)}, {len(step_costs)} and {len(dense_costs)}."
        )
    first = [min(step, dense) for step, dense in zip(step_costs, dense_costs, strict=True)]
    if sum(first) > total:
        raise ValueError(
            f"rank 1 in every layer takes {sum(first) / sum(dense_costs):.3g} of the dense cost; the total is "
            f"{total / sum(dense_costs):.3g}. Raise `relative_cost` or convert fewer layers."
        )
    layer, density = _steps(spectra, step_costs, dense_costs, importance or [1.0] * len(spectra))
    cost = torch.tensor(step_costs, dtype=torch.float64)[layer]
    order = density.argsort(descending=True, stable=True)  # stable: the ranks of one layer stay in their order
    layer, cost = layer[order], cost[order]
    extra, left = torch.zeros(len(spectra), dtype=torch.long), total - sum(first)
    while True:  # ends: each round leaves out at least the dearest steps of the one before
        fits = cost <= left
        layer, cost = layer[fits], cost[fits]
        taken = cost.cumsum(0) <= left
        if not bool(taken.any()):
            break
        extra += torch.bincount(layer[taken], minlength=len(spectra))
        left -= float(cost[taken].sum())
        layer, cost = layer[~taken], cost[~taken]
    return [float(base + int(n) * step) for base, n, step in zip(first, extra, step_costs, strict=True)]


def _steps(
    spectra: list[Tensor], step_costs: list[float], dense_costs: list[float], importance: list[float]
) -> tuple[Tensor, Tensor]:
    """Layer of every step above rank 1, and its gain s_k^2 / ||W||^2 per multiplication."""
    layers, densities = [], []
    layers_of = zip(spectra, step_costs, dense_costs, importance, strict=True)
    for index, (spectrum, step, dense, weight) in enumerate(layers_of):
        energy = spectrum.detach().double().cpu().square()
        gain = energy / energy.sum().clamp(min=torch.finfo(torch.float64).tiny)
        density = weight * gain[1 : max(1, int(dense / step + 1e-9))] / step
        layers.append(torch.full(density.shape, index))
        densities.append(density)
    return torch.cat(layers), torch.cat(densities)
