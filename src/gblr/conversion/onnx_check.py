"""Whether an ONNX file computes what the model does."""

import copy
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

TOLERANCE = 1e-4  # relative to the largest number of an output
_USUAL_ROUNDING = 2e-5  # of torch itself; with more of it, more is allowed: onnxruntime adds in another order


def difference_to_torch(file: Path, model: nn.Module, samples: Sequence[tuple[Any, ...]]) -> float:
    """The largest difference between the outputs of the file in onnxruntime and those of the model, relative to the
    largest number of each output; raises if it is above 1e-4. Where rounding alone moves torch's outputs by much, as
    with factors that are larger than their product (`max_growth`), it may be five times that.
    """
    session = _session(file)
    worst = max(_difference(_run_torch(model, inputs), _run_file(session, inputs)) for inputs in samples)
    if worst <= TOLERANCE:
        return worst
    allowed = TOLERANCE * max(1.0, _rounding(model, samples) / _USUAL_ROUNDING)
    if not worst <= allowed:
        raise RuntimeError(
            f"outputs in onnxruntime differ from torch's by {worst:.1e} of the largest; expected {allowed:.0e} at "
            "most. Nothing was written; `gblr.export_onnx(..., check=False)` writes the file all the same."
        )
    return worst


def _rounding(model: nn.Module, samples: Sequence[tuple[Any, ...]]) -> float:
    """How far torch's outputs are from those in float64; 0 for a model that cannot run in it."""

    def precise(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    try:
        exact = copy.deepcopy(model).double()
        return max(
            _difference(_run_torch(exact, pytree.tree_map(precise, inputs)), _run_torch(model, inputs))
            for inputs in samples
        )
    except (RuntimeError, TypeError, ValueError):  # its code names float32, say
        return 0.0


def _session(file: Path) -> Any:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _run_torch(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        return _tensors(model(*inputs))


def _run_file(session: Any, inputs: tuple[Any, ...]) -> list[Tensor]:
    names = [value.name for value in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, _tensors(inputs), strict=True)}
    return [torch.as_tensor(y, device="cpu") for y in session.run(None, feed)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach().cpu() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    worst = 0.0
    for e, a in zip(expected, actual, strict=True):
        if tuple(e.shape) != tuple(a.shape):
            raise RuntimeError(f"an output has shape {tuple(a.shape)} in onnxruntime; expected {tuple(e.shape)}.")
        e, a = e.double(), a.double()
        off = torch.where(e == a, 0.0, e - a).abs()  # infinities of a mask are equal
        if off.numel():
            worst = max(worst, float(off.max() / e[e.isfinite()].abs().max().clamp(min=1e-30)))
    return worst
