"""What a conversion cannot reach: weights of many matrices in one parameter, as mixtures of experts have them, and
layers that the model does not call.
"""

from collections.abc import Mapping

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from gblr.conversion.statistics import Statistics

_NO_STACKS = (nn.Conv1d, nn.ConvTranspose1d, ParametrizationList)  # weights of three axes all the same
_SHARE = 0.01  # of all parameters; less is not worth a line


def notes_on_stacks(model: nn.Module) -> list[str]:
    """Says which stacks of matrices stay dense, and what share of the model they are; nothing where they are few.

    >>> notes_on_stacks(nn.Linear(4, 4))
    []
    """
    found = {
        f"{name}.{key}" if name else key: parameter.numel()
        for name, module in model.named_modules()
        if not isinstance(module, _NO_STACKS)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and min(parameter.shape) > 1
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    share = sum(found.values()) / max(1, total)
    if share < _SHARE:
        return []
    first, rest = next(iter(found)), len(found) - 1
    more = f" and {rest} more" if rest else ""
    return [
        f"{first}{more}: stacks of matrices in one parameter (experts of a mixture, as a rule) stay dense; they hold "
        f"{share:.0%} of all parameters"
    ]


def notes_on_uncalled(statistics: Mapping[str, Statistics]) -> list[str]:
    """A line for the user if calibration met no call of some layers.

    >>> notes_on_uncalled({"fc": Statistics(torch.zeros(8, 8), 0), "out": Statistics(torch.eye(4), 5)})
    ['`calibration` met no call of fc: fitted without inputs. If the model reads the weight itself, it multiplies by \
the dense one, and nothing is saved: `exclude` such layers.']
    """
    uncalled = [name for name, found in statistics.items() if not found.positions]
    if not uncalled:
        return []
    more = f" (and {len(uncalled) - 1} more layer{'s' if len(uncalled) > 2 else ''} likewise)" if uncalled[1:] else ""
    return [
        f"`calibration` met no call of {uncalled[0]}{more}: fitted without inputs. If the model reads the weight "
        "itself, it multiplies by the dense one, and nothing is saved: `exclude` such layers."
    ]
