"""Content, structure and the rest: three kinds of parameters, each with its own learning rate and decay."""

from typing import Any

from torch import nn

from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule

STRUCTURE_BETAS = (0.0, 0.999)  # no momentum: the proximal step would fight it (the authors' code; the paper is silent)
_NORMS = ("Norm",)  # LayerNorm, BatchNorm2d, RMSNorm, LlamaRMSNorm, ...


def param_groups(
    model: nn.Module, lr: float, structure_lr: float = 5e-3, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer that takes `betas`: `content`, `no_decay` (biases, norms) and `structure`.

    Widths and locations are fractions of their axis and `structure_lr` is in that unit: AdamW moves them by about this
    much in a step. Frozen parameters are left out, and so is a group that would be empty.

    >>> from gblr import GaudiLinear
    >>> model = nn.Sequential(nn.LayerNorm(8), GaudiLinear(8, 12))
    >>> [(group["name"], len(group["params"]), group["lr"]) for group in param_groups(model, lr=1e-3)]
    [('content', 2, 0.001), ('no_decay', 3, 0.001), ('structure', 2, 0.005)]
    """
    for name, value in (("lr", lr), ("structure_lr", structure_lr), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"`{name}` must be 0 or above; got {value}.")
    structure = {id(p) for m in model.modules() if isinstance(m, GaudiModule) for p in m.structure_parameters()}
    norms = {id(p) for m in model.modules() if _is_norm(m) for p in m.parameters(recurse=False)}
    contents = {id(p) for m in model.modules() if isinstance(m, MatrixModule) for p in _contents(m)}
    kinds: dict[str, list[nn.Parameter]] = {"content": [], "no_decay": [], "structure": []}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        plain = id(p) not in contents and (p.dim() < 2 or id(p) in norms or name.endswith("bias"))
        kinds["structure" if id(p) in structure else "no_decay" if plain else "content"].append(p)
    options: dict[str, dict[str, Any]] = {
        "content": {"lr": lr, "weight_decay": weight_decay},
        "no_decay": {"lr": lr, "weight_decay": 0.0},
        "structure": {"lr": structure_lr, "weight_decay": 0.0, "betas": STRUCTURE_BETAS},
    }
    groups = [{"name": kind, "params": params, **options[kind]} for kind, params in kinds.items() if params]
    if not groups:
        raise ValueError("the model has no trainable parameter.")
    return groups


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.rstrip("123d").endswith(_NORMS)


def _contents(layer: MatrixModule) -> list[nn.Parameter]:
    """Whatever their shape: those of packed blocks are one long vector each."""
    return [p for name, p in layer.named_parameters(recurse=False) if name != "bias"]
