"""What a saved model is made of, read from its files; the dense model is not needed."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from gblr.conversion.checkpoint import MANIFEST
from gblr.conversion.layer_types import layer_type
from gblr.conversion.placement import filled_layers
from gblr.conversion.tensor_files import CheckpointError, read_tensors
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule
from gblr.workflows.model_source import check_finished, check_there


def inspect_folder(folder: Path) -> dict[str, Any]:
    """Layers with their structure, and totals by layer type."""
    check_there(folder)
    place = folder / "model" if (folder / "model" / MANIFEST).is_file() else folder
    if not (place / MANIFEST).is_file():
        check_finished(folder)
        raise CheckpointError(f"{folder} has no {MANIFEST}: expected a run, or what `gblr.save_pretrained` wrote.")
    manifest = json.loads((place / MANIFEST).read_text())
    values = read_tensors(place, manifest["tensors"] | manifest["buffers"])
    rows = [_row(*item) for layer in filled_layers(manifest, values) for item in _matrices(*layer)]
    return {"folder": str(folder), "architecture": manifest["architecture"], "layers": rows, "types": _types(rows)}


def _matrices(name: str, layer: nn.Module) -> list[tuple[str, Any]]:
    """The layer itself, or the parts of a fused one."""
    if isinstance(layer, SplitLinear):
        return [(f"{name}.parts.{i}", part) for i, part in enumerate(layer.parts) if not isinstance(part, nn.Linear)]
    return [(name, layer)]


def _row(name: str, layer: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "type": layer_type(name, layer, 1),
        "shape": [layer.out_features, layer.in_features],
    }
    dense = layer.out_features * layer.in_features
    if isinstance(layer, GaudiModule):
        matrix: Any = layer.to_matrix()
        row["format"] = "Gaudi"
    else:
        assert isinstance(layer, MatrixModule)
        matrix = layer.matrix
        row["format"] = type(matrix).__name__.removesuffix("Matrix")
    row |= {"relative_cost": round(matrix.num_mults / dense, 5), "num_mults": matrix.num_mults, "dense_mults": dense}
    structure = getattr(matrix, "structure", None)
    if structure is not None:
        live = structure.live
        row |= {"num_blocks": structure.num_blocks, "live_blocks": int(live.sum()), "block_rank": matrix.block_rank}
        row["row_width"] = _quartiles(structure.row_width[live], layer.out_features)
        row["col_width"] = _quartiles(structure.col_width[live], layer.in_features)
    return row


def _quartiles(width: Tensor, length: int) -> list[float]:
    """Smallest, median and largest width, in fractions of the axis."""
    if not len(width):
        return []
    shares = torch.quantile(width.double() / length, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    return [round(share, 4) for share in shares.tolist()]


def _types(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["type"], []).append(row)
    found = []
    for name, group in groups.items():
        costs = [row["relative_cost"] for row in group]
        total = sum(row["num_mults"] for row in group) / sum(row["dense_mults"] for row in group)
        mean = sum(costs) / len(costs)
        found.append(
            {
                "type": name,
                "layers": len(group),
                "min": min(costs),
                "mean": mean,
                "max": max(costs),
                "relative_cost": total,
            }
        )
    return found


def layer_table(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['architecture']}, {found['folder']}")
    for heading in ("layer", "format", "shape"):
        table.add_column(heading, overflow="fold")
    for heading in ("cost", "live blocks", "block_rank", "row widths", "column widths"):
        table.add_column(heading, justify="right")
    for row in found["layers"]:
        blocks = f"{row['live_blocks']} of {row['num_blocks']}" if "num_blocks" in row else ""
        widths = [" ".join(f"{share:.2f}" for share in row.get(side, [])) for side in ("row_width", "col_width")]
        shape = f"{row['shape'][0]} x {row['shape'][1]}"
        rank = str(row.get("block_rank", ""))
        table.add_row(row["name"], row["format"], shape, f"{row['relative_cost']:.3f}", blocks, rank, *widths)
    table.caption = "widths: smallest, median, largest, of the axis"
    return table


def type_table(found: dict[str, Any]) -> Table:
    table = Table(title="by layer type, of the dense cost")
    table.add_column("type")
    for heading in ("layers", "min", "mean", "max", "in all"):
        table.add_column(heading, justify="right")
    for row in found["types"]:
        costs = (f"{row[key]:.3f}" for key in ("min", "mean", "max", "relative_cost"))
        table.add_row(row["type"], str(row["layers"]), *costs)
    return table
