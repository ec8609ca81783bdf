"""After learning: `harden_` folds masks into cropped blocks, `densify_` goes back to plain layers."""

from typing import Any, Literal, get_args

from torch import Tensor, nn

from gblr.conversion.report import Report, Row
from gblr.layers.conv import GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule, StructuredLinear
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.packed import PackedGBLR

Plan = Literal["auto", "packed"]


def harden_(model: nn.Module, example_inputs: Any = None, plan: Plan = "auto") -> Report:
    """Replaces Gaudi layers, and structured ones over a `GBLRMatrix`, by packed ones, in place: no mask is left.

    Masks are folded into the contents, contents cropped to where a mask is above 1e-3, dead blocks dropped. Outputs
    are the same up to that threshold, exactly so at sigma = inf. The packed form is the one there is so far, so
    `plan` and `example_inputs` (for measuring alternatives) change nothing yet.
    """
    if plan not in get_args(Plan):
        raise ValueError(f"`plan` must be one of {get_args(Plan)}; got {plan!r}.")
    targets = [(name, module) for name, module in model.named_modules() if _can_harden(module)]
    if not targets:
        raise ValueError("the model has no Gaudi or GBLR layer to harden; convert it first with `convert_`.")
    hardened = [(name, module, _packed_layer(module)) for name, module in targets]
    for name, module, layer in hardened:
        _like(module, layer)
        model.set_submodule(name, layer)
    rows = [_row(name, layer) for name, _, layer in hardened]
    return Report(rows, [name for name, _ in targets], "hardened: masks folded, blocks cropped and packed")


def densify_(model: nn.Module) -> Report:
    """Replaces every structured layer by a plain `nn.Linear` or `nn.Conv2d` of the same weight, in place."""
    kinds = (GaudiModule, MatrixModule, SplitLinear)
    targets: list[tuple[str, Any]] = [(n, module) for n, module in model.named_modules() if isinstance(module, kinds)]
    parents = {name for name, module in targets if isinstance(module, SplitLinear)}
    targets = [
        (name, module) for name, module in targets if name.rpartition(".parts.")[0] not in parents or name in parents
    ]
    if not targets:
        raise ValueError("the model has no structured layer; there is nothing to make dense.")
    dense = [(name, module.to_dense_layer()) for name, module in targets]
    rows = []
    for (name, module), (_, layer) in zip(targets, dense, strict=True):
        _like(module, layer)
        model.set_submodule(name, layer)
        shape = tuple(layer.weight.flatten(1).shape)
        size = shape[0] * shape[1]
        rows.append(Row(name, (shape[0], shape[1]), type(layer).__name__, None, size, size))
    return Report(rows, [name for name, _ in targets], "made dense")


def _like(module: nn.Module, layer: nn.Module) -> None:
    """Training mode and frozen weights carry over."""
    layer.train(module.training)
    layer.requires_grad_(any(parameter.requires_grad for parameter in module.parameters()))


def _can_harden(module: nn.Module) -> bool:
    return isinstance(module, GaudiModule) or (
        isinstance(module, MatrixModule) and isinstance(module._template, GBLRMatrix)
    )


def _packed_layer(module: Any) -> MatrixModule:
    matrix = module.to_matrix() if isinstance(module, GaudiModule) else module.matrix
    assert isinstance(matrix, GBLRMatrix)
    packed = PackedGBLR.from_gblr(matrix)
    bias: Tensor | None = module.bias
    if isinstance(module, GaudiConv2d | StructuredConv2d):
        return StructuredConv2d(packed, module.geometry, bias)
    return StructuredLinear(packed, bias)


def _row(name: str, layer: MatrixModule) -> Row:
    matrix = layer.matrix
    assert isinstance(matrix, PackedGBLR)
    what = f"packed, {matrix.structure.num_blocks} blocks of rank {matrix.block_rank}"
    return Row(name, matrix.shape, what, None, matrix.shape[0] * matrix.shape[1], matrix.num_mults)
