"""How much each layer of a model may cost, so that a given total is spent where it lowers the error most."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Choice(NamedTuple):
    """A rank that a layer may have, and what it costs: multiplications times positions per sample."""

    rank: int
    cost: float


def choices_from(smallest: float, choices: Sequence[Choice]) -> list[Choice]:
    """None cheaper than the smallest matrix that a format has: what costs less becomes one choice at its cost.

    >>> choices_from(25, [Choice(1, 10), Choice(2, 20), Choice(3, 30)])
    [Choice(rank=2, cost=25), Choice(rank=3, cost=30)]
    """
    below = [choice for choice in choices if choice.cost < smallest]
    return [*(Choice(choice.rank, smallest) for choice in below[-1:]), *choices[len(below) :]]


class _Step(NamedTuple):
    """To a choice of a layer from the one before it."""

    density: float  # error that goes, per multiplication
    layer: int
    choice: int


def allocate(
    spectra: Sequence[Float[Tensor, " rank"]], choices: Sequence[Sequence[Choice]], dense_costs: Sequence[float],
    total: float, importance: Sequence[float] | None = None,
) -> list[float]:  # fmt: skip
    """Budgets of the layers, in the unit of `total`: the rank-selection kind of baseline (ALDS, Liebenwein et al.
    2021).

    `spectra[l]` are the singular values s_k of layer l (weighted, where inputs are known), `choices[l]` the ranks that
    it may have, of ascending cost. Minimises sum_l sum_{k >= r_l} s_lk^2 / ||W_l||^2, the sum of squared relative
    errors, each times the layer's `importance` where that is given, with costs that add up to at most `total`; no layer
    may cost more than dense.

    Steps from choice to choice are taken in the order of gain per multiplication: exact for the cost that they reach
    where all steps of a layer cost the same, as spectra descend. Where later ranks are cheaper (triangular factors),
    they come after the dear ones that they need. What is left over goes to layers whose next choices still fit, and
    what pays for no choice to the layer that would gain most by one: formats that are more than low rank can use it.

    >>> steps = [Choice(1, 10), Choice(2, 20)]
    >>> allocate([torch.tensor([3.0, 0.1]), torch.tensor([2.0, 2.0])], [steps, steps], [20, 20], total=30)
    [10.0, 20.0]
    """
    if not len(spectra) == len(choices) == len(dense_costs):
        raise ValueError(
            "`spectra`, `choices` and `dense_costs` must have one entry for each layer; got "
            f"{len(spectra)}, {len(choices)} and {len(dense_costs)}."
        )
    costs = [
        [float(min(of_layer[0].cost, dense)), *(float(c.cost) for c in of_layer[1:] if c.cost <= dense)]
        for of_layer, dense in zip(choices, dense_costs, strict=True)
    ]
    taken, left = [0] * len(costs), total - sum(of_layer[0] for of_layer in costs)
    if left < 0:
        raise ValueError(
            f"rank 1 in every layer takes {(total - left) / sum(dense_costs):.3g} of the dense cost; the total is "
            f"{total / sum(dense_costs):.3g}. Raise `relative_cost` or convert fewer layers."
        )
    steps: list[_Step] = []
    weights = importance or [1.0] * len(costs)
    for layer, (spectrum, of_layer, weight) in enumerate(zip(spectra, choices, weights, strict=True)):
        errors = [weight * error for error in _errors(spectrum, of_layer[: len(costs[layer])])]
        steps += _steps(layer, costs[layer], errors)
    steps.sort(key=lambda step: -step.density)  # stable: those of one layer stay in their order
    for step in steps:
        price = costs[step.layer][step.choice] - costs[step.layer][step.choice - 1]
        if taken[step.layer] == step.choice - 1 and price <= left:
            taken[step.layer], left = step.choice, left - price
    budgets = [mine[choice] for mine, choice in zip(costs, taken, strict=True)]
    for step in steps:
        if taken[step.layer] == step.choice - 1:
            budgets[step.layer] += left
            break
    return budgets


def _errors(spectrum: Float[Tensor, " rank"], choices: Sequence[Choice]) -> list[float]:
    """What each rank leaves of ||W||^2."""
    energy = spectrum.detach().double().cpu().square()
    rest = torch.cat([energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)])
    rest /= rest[0].clamp(min=torch.finfo(torch.float64).tiny)
    return rest[torch.tensor([min(choice.rank, len(energy)) for choice in choices])].tolist()


def _steps(layer: int, costs: Sequence[float], errors: Sequence[float]) -> Iterator[_Step]:
    """From each choice to the next: by what they gain per cost, but never more than those before them."""
    density = math.inf
    for i in range(1, len(costs)):
        density = min(density, (errors[i - 1] - errors[i]) / (costs[i] - costs[i - 1]))
        yield _Step(density, layer, i)
