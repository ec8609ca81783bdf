"""What is done to torch's ONNX program before it becomes a file."""

import importlib
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 1_900_000_000  # a protocol buffer ends at 2 GiB; larger weights go to a file beside it
_MAX_FOLDED = 256  # numbers: enough for shapes


def optimize(model: Any) -> None:
    """As torch does, but constants of some size are not folded: blocks would come back at full size."""
    importlib.import_module("onnxscript.optimizer").optimize_ir(model, output_size_limit=_MAX_FOLDED)


def check_domains(model: Any) -> None:
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes() if node.domain})
    if foreign or model.functions:
        raise RuntimeError(f"the model has operators that plain ONNX does not know: {', '.join(foreign)}.")


def save(program: Any, file: Path) -> None:
    onnx = importlib.import_module("onnx")
    _strip(program.model)
    size = sum(weight.const_value.nbytes for weight in program.model.graph.initializers.values())
    program.save(file, external_data=size > MAX_FILE_BYTES)
    onnx.checker.check_model(str(file), full_check=True)


def _strip(model: Any) -> None:
    """Without the exporter's notes on where in the source each operator comes from: 2 kB for each, with paths."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for owner in (model, model.graph, *model.graph.inputs, *model.graph.initializers.values()):
        owner.metadata_props.clear()
