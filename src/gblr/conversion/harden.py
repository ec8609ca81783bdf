"""After learning: `harden_` folds masks into cropped blocks, `densify_` goes back to plain layers."""

from typing import Any, Literal, get_args

from torch import Tensor, nn

from gblr.conversion.planner import Times, fastest, measure_forms, record_inputs
from gblr.conversion.refit import structured_layers
from gblr.conversion.replace import replace_everywhere
from gblr.conversion.report import Report, Row
from gblr.fitting.precision import full_precision
from gblr.layers.conv import GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule, StructuredLinear
from gblr.matrices.forms import FORMS, reason_against_packed
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.packed import PackedGBLR

Plan = Literal["auto", "packed", "factors", "dense"]
_BARE = "the model is itself the layer, so nothing holds it that could hold another; wrap it in nn.Sequential"
_SOFT = 1.1  # times the cost of the widths; edges that cost more are worth a line


def harden_(model: nn.Module, example_inputs: Any = None, plan: Plan = "auto", captured: bool = False) -> Report:
    """Replaces Gaudi layers, and structured ones over a `GBLRMatrix`, by packed ones, in place: no mask is left.

    Masks are folded into the contents, contents cropped to where a mask is above 1e-3, dead blocks dropped. Outputs
    are the same up to that threshold, exactly so at sigma = inf. Layers that are packed already are planned anew.

    A packed layer multiplies by compiled kernels over its blocks ("packed"), by two plain products ("factors") or by
    one ("dense"); what is stored and saved is the same. With `example_inputs` (a tensor, a tuple of positional
    arguments or a mapping of named ones) the model is run once, the forms are measured for each layer, and the
    fastest is kept; the report has the times. Without, multiplications are counted. Another `plan` forces a form.

    On a GPU, `captured` measures CUDA graphs, for models that will run as such (`torch.cuda.graph`,
    `torch.compile(mode="reduce-overhead")`): packed blocks take longer to launch than plain products, which a graph
    hides and a plain call of a small layer does not.

    A model without a Gaudi or GBLR layer is a ValueError.

    >>> model = nn.Sequential(gblr.GaudiLinear(32, 64, relative_cost=0.3), nn.ReLU(), gblr.GaudiLinear(64, 8))
    >>> report = harden_(model, example_inputs=torch.randn(16, 32))
    >>> list(report), sorted(report.rows[0].form_seconds)[:2]
    (['0', '2'], ['dense', 'factors'])
    """
    if plan not in get_args(Plan):
        raise ValueError(f"`plan` must be one of {get_args(Plan)}; got {plan!r}.")
    targets = {name: module for name, module in model.named_modules() if can_harden(module)}
    if not targets:
        raise ValueError("the model has no Gaudi or GBLR layer to harden; convert it first with `convert_`.")
    if "" in targets and not getattr(model, "is_packed", False):
        raise ValueError(f"{_BARE}.")
    measured = example_inputs is not None and plan == "auto"
    if captured:
        _check_captured(targets, measured)
    inputs = record_inputs(model, targets, example_inputs) if measured else {}
    with full_precision():
        layers = {name: _packed_layer(module) for name, module in targets.items()}
    if plan == "packed":
        _check_kernels(layers)
    times = measure_forms(layers, inputs, captured)
    for name, layer in layers.items():
        layer.planned = fastest(times.get(name, {})) if plan == "auto" else plan
        with full_precision():  # what is prepared here serves outside of an autocast region, too
            layer.prepare()
    replace_everywhere(model, {targets[name]: layer for name, layer in layers.items()})
    rows = [_row(name, layer, times.get(name, {})) for name, layer in layers.items()]
    notes = _notes(rows, measured) + _notes_on_edges(targets, rows)
    return Report(rows, list(layers), "hardened: masks folded, blocks cropped and packed", notes)


def _check_captured(targets: dict[str, Any], measured: bool) -> None:
    if not measured:
        raise ValueError("`captured` says how forms are measured: give `example_inputs`, and leave `plan` at 'auto'.")
    found = {parameter.device.type for module in targets.values() for parameter in module.parameters()}
    if found != {"cuda"}:
        raise ValueError(f"`captured` measures CUDA graphs, and the model is on {', '.join(sorted(found))}.")


def _check_kernels(layers: dict[str, MatrixModule]) -> None:
    for name, layer in layers.items():
        if reason := reason_against_packed(layer.matrix):  # type: ignore[arg-type]
            raise RuntimeError(f"layer {name!r} cannot multiply packed blocks: {reason}. Use plan='auto'.")


@full_precision()
def densify_(model: nn.Module) -> Report:
    """Replaces every structured layer by a plain `nn.Linear` or `nn.Conv2d` of the same weight, in place. A model
    without one is a ValueError.

    >>> model = nn.Sequential(gblr.GaudiLinear(32, 64), nn.ReLU())
    >>> list(densify_(model)), model[0]
    (['0'], Linear(in_features=32, out_features=64, bias=True))
    """
    targets: dict[str, Any] = structured_layers(model)
    if not targets:
        raise ValueError("the model has no structured layer; there is nothing to make dense.")
    if "" in targets:
        raise ValueError(f"{_BARE}, or take what its `to_dense_layer()` returns.")
    layers = {name: module.to_dense_layer() for name, module in targets.items()}
    replace_everywhere(model, {targets[name]: layer for name, layer in layers.items()})
    rows = []
    for name, layer in layers.items():
        shape = tuple(layer.weight.flatten(1).shape)
        size = shape[0] * shape[1]
        rows.append(Row(name, (shape[0], shape[1]), type(layer).__name__, None, size, size))
    return Report(rows, list(layers), "made dense")


def can_harden(module: nn.Module) -> bool:
    """Whether `harden_` makes another layer of it, or plans it anew."""
    return isinstance(module, GaudiModule) or (
        isinstance(module, MatrixModule) and isinstance(module._template, (GBLRMatrix, PackedGBLR))
    )


def _packed_layer(module: Any) -> MatrixModule:
    matrix = module.to_matrix() if isinstance(module, GaudiModule) else module.matrix
    if isinstance(matrix, PackedGBLR):
        return module
    packed = PackedGBLR.from_gblr(matrix)
    bias: Tensor | None = module.bias
    if isinstance(module, GaudiConv2d | StructuredConv2d):
        return StructuredConv2d(packed, module.geometry, bias)
    return StructuredLinear(packed, bias)


def _row(name: str, layer: MatrixModule, times: Times) -> Row:
    matrix = layer.matrix
    assert isinstance(matrix, PackedGBLR)
    what = f"{layer.form or 'packed'}, {matrix.structure.num_blocks} blocks of rank {matrix.block_rank}"
    if times:
        what += ": " + ", ".join(f"{form} {seconds * 1e6:.0f} us" for form, seconds in times.items())
    dense = matrix.shape[0] * matrix.shape[1]
    seconds: dict[str, float] = {form: times[form] for form in times}
    return Row(name, matrix.shape, what, None, dense, matrix.num_mults, form=layer.form, form_seconds=seconds)


def _notes(rows: list[Row], measured: bool) -> list[str]:
    total = max(1, sum(row.dense_mults for row in rows))
    shares = {form: sum(row.dense_mults for row in rows if row.form == form) / total for form in FORMS}
    shown = ", ".join(f"{form} {share:.0%}" for form, share in shares.items() if share)
    how = "measured on the example inputs" if measured else "not measured; give `example_inputs` to measure them"
    return [f"forms by share of the dense cost: {shown or 'none'} ({how})"]


def _notes_on_edges(targets: dict[str, Any], rows: list[Row]) -> list[str]:
    """Says so where blurred masks cost far more than the widths that were learned, as in the midst of a training."""
    soft = [(targets[row.layer], row) for row in rows if isinstance(targets[row.layer], GaudiModule)]
    widths = sum(module.num_mults for module, _ in soft)
    kept, dense = (sum(getattr(row, name) for _, row in soft) for name in ("num_mults", "dense_mults"))
    if kept <= _SOFT * max(1, widths):
        return []
    sigma = min(float(module.sigma) for module, _ in soft)
    return [
        f"masks were still blurred (sigma {sigma:g}): their soft edges cost {kept / dense:.3f} where the widths alone "
        f"cost {widths / dense:.3f}. Train to the end of a schedule that ends sharp, or sharpen masks before, by "
        "`layer.set_sigma(math.inf)` for each Gaudi layer, which changes the outputs."
    ]
