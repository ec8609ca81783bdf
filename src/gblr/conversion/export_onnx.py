"""Hardened models as ONNX files of plain operators, as small as their cost."""

import contextlib
import copy
import importlib
import importlib.util
import inspect
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gblr.conversion.blocks import without_cache
from gblr.conversion.onnx_check import difference_to_torch
from gblr.conversion.onnx_file import check_domains, optimize, save
from gblr.conversion.onnx_plain import plain_layer
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule


@dataclass(frozen=True)
class OnnxExport:
    """What `export_onnx` wrote."""

    path: Path
    num_bytes: int  # of the file, and of the one with its weights where there are two
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: Mapping[str, int] = field(repr=False)  # how often each occurs
    difference: float | None  # largest one from torch, relative to the largest output; None: not checked

    @property
    def num_operators(self) -> int:
        return sum(self.operators.values())

    def __str__(self) -> str:
        checked = "not checked" if self.difference is None else f"{self.difference:.1e} off torch"
        size = f"{self.num_bytes / 1e6:.2f} MB, {self.num_operators} operators of opset {self.opset}"
        return f"{self.path}: {size}, {checked}"


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    max_padding: float = 1.25,
    compose: bool = True,
    check: bool = True,
) -> OnnxExport:
    """Writes `model`, as it is in evaluation mode, to an ONNX file that needs no custom operator.

    `example_inputs` is what one call takes: a tuple of positional arguments, a mapping of named ones, such as a
    tokenizer returns, or a single tensor. The first axis of each tensor is dynamic; `dynamic_shapes`, in the form of
    `torch.export`, says otherwise, by position or by name as the inputs are given. The cache of a transformers model
    is left out.

    Blocks are stored in dense tiles with zeros at their rims, `max_padding` times their numbers at most: more makes
    them faster. Layers for which one dense product is expected to be faster are stored as blocks and composed when the
    file is loaded; `compose=False` keeps blocks in memory too.

    With `check`, outputs are compared with torch's to 1e-4 of the largest, where onnxruntime is installed. The model
    is not changed, and after an error `path` is as it was. Layers that still learn are an error: `gblr.harden_` first.

        export = gblr.export_onnx(model, dict(tokenizer(texts, return_tensors="pt")), "small.onnx")
        print(export)  # size, operators, difference from torch
    """
    path, model = Path(path), getattr(model, "_orig_mod", model)  # what torch.compile wraps
    _check_packages()
    inputs, names = _by_position(model, example_inputs)
    _check_arguments(model, inputs, path, max_padding)
    shapes = dynamic_shapes
    if dynamic_shapes is None:
        inputs, shapes = _with_dynamic_batch(inputs)
    elif isinstance(dynamic_shapes, Mapping) and names:
        shapes = tuple(dynamic_shapes.get(name) for name in names)
    with without_cache(model):  # the copies have none: a file has no place for keys and values of earlier tokens
        reference = _evaluation_copy(model, lambda layer: layer)
        plain = _evaluation_copy(model, lambda layer: plain_layer(layer, max_padding, compose))
    with torch.no_grad(), _without_noise():
        outputs = _output_names(reference(*inputs))
        options: Any = {"dynamic_shapes": shapes, "output_names": outputs, "dynamo": True, "verbose": False}
        program: Any = torch.onnx.export(plain, inputs, **options, optimize=False)
        optimize(program.model)
    check_domains(program.model)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        file = Path(folder) / path.name
        save(program, file)
        difference = None
        if check and importlib.util.find_spec("onnxruntime"):
            difference = difference_to_torch(file, reference, _samples(inputs, dynamic_shapes))
        return _published(program.model, file, path, difference)


def _check_packages() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"`export_onnx` needs {' and '.join(missing)}: pip install 'gblr[onnx]'.")


def _by_position(model: nn.Module, example_inputs: Any) -> tuple[tuple[Any, ...], list[str]]:
    """The arguments as a tuple, with None for those between named ones; and, of a mapping, their names."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), []
    if isinstance(example_inputs, tuple):
        return example_inputs, []
    if not isinstance(example_inputs, Mapping) or not example_inputs:
        raise TypeError(
            "`example_inputs` must be a tuple of the model's arguments, a mapping of named ones, or a tensor; got "
            f"{'an empty' if isinstance(example_inputs, Mapping) else 'a'} {type(example_inputs).__name__}."
        )
    parameters = inspect.signature(model.forward).parameters
    known = [name for name, one in parameters.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if strange := [name for name in example_inputs if name not in known]:
        raise ValueError(
            f"{', '.join(strange)}: no such argument of the model's forward that has a place of its own; it has "
            f"{', '.join(known)}. Leave it out, or export a module whose forward takes it."
        )
    names = known[: 1 + max(known.index(name) for name in example_inputs)]
    return tuple(example_inputs.get(name) for name in names), names


def _check_arguments(model: nn.Module, example_inputs: tuple[Any, ...], path: Path, max_padding: float) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of `path` does not exist: {path.parent}.")
    if path.is_dir():
        raise IsADirectoryError(f"`path` must be a file, such as {path / 'model.onnx'}; got a folder.")
    if not max_padding >= 1:
        raise ValueError(f"`max_padding` must be at least 1; got {max_padding}.")
    soft = [name for name, module in model.named_modules() if isinstance(module, GaudiModule)]
    if soft:
        raise ValueError(
            f"the structure of {soft[0] or 'the model'!r} is still trainable (Gaudi layers: {len(soft)}). Call "
            "`gblr.harden_(model)` first."
        )
    tensors = {"the model": model.parameters(), "`example_inputs`": pytree.tree_leaves(example_inputs)}
    for owner, found in tensors.items():
        for tensor in found:
            _check_tensor(owner, tensor)


def _check_tensor(owner: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        return
    if tensor.is_meta:
        raise ValueError(f"{owner} has tensors on the meta device, without numbers: load the weights first.")
    if tensor.is_floating_point() and tensor.dtype != torch.float32:
        raise ValueError(
            f"{owner} has tensors in {tensor.dtype}; expected float32, since onnxruntime lacks CPU kernels for others. "
            "Export `copy.deepcopy(model).float()`."
        )


def _with_dynamic_batch(example_inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """Inputs with at least two samples, as torch.export takes a size of 1 for a constant, and their first axes as
    dynamic: one name for axes of one size.
    """
    sizes = {x.shape[0] for x in pytree.tree_leaves(example_inputs) if isinstance(x, Tensor) and x.dim()}
    names = {size: "batch" if i == 0 else f"batch_{i}" for i, size in enumerate(sorted(sizes))}

    def doubled(x: Any) -> Any:
        return torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() and x.shape[0] == 1 else x

    def shape(x: Any) -> Any:
        return {0: names[x.shape[0]]} if isinstance(x, Tensor) and x.dim() else None

    return pytree.tree_map(doubled, example_inputs), pytree.tree_map(shape, example_inputs)


def _samples(inputs: tuple[Any, ...], dynamic_shapes: Any) -> list[tuple[Any, ...]]:
    """What to compare on: the inputs, and one sample of them where the first axis is dynamic by default."""
    if dynamic_shapes is not None:
        return [inputs]
    first = pytree.tree_map(lambda x: x[:1] if isinstance(x, Tensor) and x.dim() else x, inputs)
    return [inputs, first]


def _evaluation_copy(model: nn.Module, replace: Callable[[MatrixModule], nn.Module]) -> nn.Module:
    """A copy in evaluation mode that shares all tensors, with every structured layer replaced."""
    layers = {id(module): module for module in model.modules() if isinstance(module, MatrixModule)}
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo |= {key: replace(layer) for key, layer in layers.items()}
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        if id(module) not in layers:
            module.training = False
    return made


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """torch's exporter warns of its own deprecated calls and of torchvision where that is absent, its optimizer of
    infinities in constants.
    """
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.filterwarnings("ignore", ".*axis name: .* will not be used")
            yield
    finally:
        logger.setLevel(level)


def _output_names(outputs: Any) -> list[str] | None:
    """transformers' outputs have names; one tensor is the `output`."""
    strange = [leaf for leaf in pytree.tree_leaves(outputs) if not isinstance(leaf, Tensor | int | float | None)]
    if strange:
        raise ValueError(
            f"the model's outputs hold a {type(strange[0]).__name__}; expected tensors. Caches of transformers' models "
            "are left out, as by `model.config.use_cache = False`; leave others out of what `forward` returns."
        )
    if isinstance(outputs, Tensor):
        return ["output"]
    if isinstance(outputs, Mapping) and all(isinstance(value, Tensor) for value in outputs.values()):
        return [str(name) for name in outputs]
    return None


def _published(model: Any, file: Path, path: Path, difference: float | None) -> OnnxExport:
    """Moves the files to their place, the one that refers to the other at last."""
    files = sorted(file.parent.iterdir(), key=lambda written: written == file)
    num_bytes = sum(written.stat().st_size for written in files)
    for written in files:
        os.replace(written, path.parent / written.name)
    graph = model.graph
    return OnnxExport(
        path,
        num_bytes,
        model.opset_imports[""],
        tuple(value.name for value in graph.inputs),
        tuple(value.name for value in graph.outputs),
        dict(Counter(node.op_type for node in graph.all_nodes())),
        difference,
    )
