"""Refits of a streamed model: block after block on the hidden states that the blocks before it make of the inputs, once
converted and once dense, both on disk.
"""

import dataclasses
import gc
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.atomic import appearing, write_json
from gblr.conversion.blocks import Blocks, Call, hidden_of, load_module, run_block
from gblr.conversion.convert import describe, parts_of
from gblr.conversion.harden import can_harden, harden_
from gblr.conversion.layer_spec import layer_spec
from gblr.conversion.model_files import ModelFiles
from gblr.conversion.placement import filled_layer
from gblr.conversion.refit import Refitted, refit_layers_
from gblr.conversion.replace import replace_layer
from gblr.conversion.report import Row
from gblr.conversion.stream_folder import StreamFolder, load, read_json, save
from gblr.conversion.tensor_files import read_tensors, write_tensors

_NO_LIMIT = 1 << 62
_TOLD = ("attention_mask", "decoder_attention_mask", "decoder_input_ids")  # of a batch, which positions are real


class BlockAlone(nn.Module):
    """One block under its own name, called by the number of a batch: hidden states and the rest are read from files."""

    def __init__(self, model: Any, name: str, block: nn.Module, number: int, folder: StreamFolder, converted: bool):
        super().__init__()
        self.config = getattr(model, "config", None)
        self.number, self.folder, self.converted = number, folder, converted and number > 0  # both begin alike
        place: nn.Module = self
        *path, last = name.split(".")
        for word in path:
            place.add_module(word, nn.Module())
            place = place.get_submodule(word)
        place.add_module(last, block)
        self.name, self.device = name, next((p.device for p in block.parameters()), torch.device("cpu"))
        self.sum = nn.Identity()  # shows what the block ends with, as the next one would be given it

    def forward(self, number: int, **told: Tensor) -> Tensor:
        call: Call = load(self.folder.inputs(number))["calls"][self.number]
        hidden = load(self.folder.hidden(self.number, number, self.converted)).to(self.device)
        found: Tensor = self.sum(hidden_of(run_block(self.get_submodule(self.name), call, hidden)))
        return found


class Refits:
    """`refit` of each block in turn, by the first process: from fitted layers to refitted ones, in files both."""

    def __init__(
        self, model: Any, blocks: Blocks, files: ModelFiles, batches: Sequence[Any], folder: StreamFolder,
        device: torch.device, max_growth: float,
    ):  # fmt: skip
        self.model, self.blocks, self.files, self.folder, self.device = model, blocks, files, folder, device
        self.batches = [{"number": i} | _told(batch) for i, batch in enumerate(batches)]
        self.max_growth = max_growth

    def refit(self, number: int, fitted: Sequence[Path]) -> list[Path]:
        """Markers of the refitted layers, for those of the fitted ones; made once for all time."""
        refitted = [marker.with_name(f"refitted-{marker.name}") for marker in fitted]
        if not (self._has_passed_on(number) and all(marker.is_file() for marker in refitted)):
            self._refit(number, fitted, refitted)
        if number:  # the converted model's states behind the block are there
            shutil.rmtree(self.folder.hidden(number - 1, 0, True).parent, ignore_errors=True)
        return refitted

    def _refit(self, number: int, fitted: Sequence[Path], refitted: Sequence[Path]) -> None:
        name = self.blocks.names[number]
        dense, ours = (
            BlockAlone(self.model, name, load_module(self.model, name, self.files, self.device), number, self.folder, c)
            for c in (False, True)
        )
        layers = [read_json(marker) for marker in fitted]
        for marker, layer in zip(fitted, layers, strict=True):
            values = read_tensors(marker.parent, layer["records"])
            replace_layer(ours, layer["name"], filled_layer(layer["name"], layer["spec"], values, self.device))
        found: dict[str, Refitted] = {}
        if layers:
            done = refit_layers_(ours, dense, self.batches, "free", max_growth=self.max_growth)
            found = {row.layer: row for row in done}
            if any(map(can_harden, ours.modules())):
                harden_(ours)
        self._pass_on(ours, number)
        for marker, layer in zip(refitted, layers, strict=True):
            new = ours.get_submodule(layer["name"])
            write_layer(marker, layer["name"], new, _rows(layer["rows"], new, found.get(layer["name"])))
        del dense, ours
        gc.collect()

    def _pass_on(self, ours: BlockAlone, number: int) -> None:
        """What the next block of the converted model is given."""
        if number + 1 < len(self.blocks.names):
            for i in range(len(self.batches)):
                save(self.folder.hidden(number + 1, i, True), ours(i).cpu())

    def _has_passed_on(self, number: int) -> bool:
        is_last = number + 1 == len(self.blocks.names)
        return is_last or self.folder.hidden(number + 1, len(self.batches) - 1, True).is_file()


def write_layer(marker: Path, name: str, layer: nn.Module, rows: Sequence[Row]) -> None:
    """Its numbers, and then the marker that says what they are."""
    tensors = {f"{name}.{leaf}": tensor for leaf, tensor in layer.state_dict().items()}
    file = marker.with_suffix(".safetensors")
    with appearing(file) as new:
        records = write_tensors(tensors, new.parent, new.name, _NO_LIMIT, narrow=(name,))
    records = {key: record | {"file": file.name} for key, record in records.items()}
    write_json(marker, {"name": name, "spec": layer_spec(layer), "records": records, "rows": [vars(r) for r in rows]})


def _told(batch: Any) -> dict[str, Tensor]:
    return {key: batch[key] for key in _TOLD if key in batch} if isinstance(batch, Mapping) else {}


def _rows(before: Sequence[dict[str, Any]], layer: nn.Module, refitted: Refitted | None) -> list[Row]:
    """Those of the fit, with what the refit has changed."""
    found = []
    for row, part in zip(before, parts_of(layer), strict=True):
        matrix: Any = getattr(part, "matrix", None)
        changes = {} if matrix is None else {"what": describe(matrix), "num_mults": matrix.num_mults}
        error = row["error"] if refitted is None else refitted.error
        found.append(dataclasses.replace(Row(**row | {"shape": tuple(row["shape"])}), error=error, **changes))
    return found
