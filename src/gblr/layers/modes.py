"""Training modes of the modules of a model: kept, and put back one by one, as parts may be frozen in evaluation."""

from torch import nn

Modes = list[tuple[nn.Module, bool]]


def modes_of(model: nn.Module) -> Modes:
    return [(module, module.training) for module in model.modules()]


def restore_modes(modes: Modes) -> None:
    """By their own `train` where there is nothing below them: hardened layers notice a change of mode there alone."""
    for module, mode in modes:
        if next(module.children(), None) is None:
            module.train(mode)
        module.training = mode
