"""Calibration of a streamed model: hidden states go from block to block over the disk, Gram matrices stay there."""

import gc
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gblr.atomic import write_json
from gblr.conversion.blocks import Blocks, form_of, hidden_of, load_module, run_block
from gblr.conversion.calls import padding_of
from gblr.conversion.grams import Grams
from gblr.conversion.model_files import ModelFiles
from gblr.conversion.outside import Outside
from gblr.conversion.sources import Source
from gblr.conversion.statistics import Statistics
from gblr.conversion.stream_folder import StreamFolder, load, read_json, save
from gblr.progress import progress


class Calibration:
    """Collects the statistics of each block in turn, running the dense model block by block."""

    def __init__(
        self, model: Any, blocks: Blocks, files: ModelFiles, batches: Sequence[Any], folder: StreamFolder,
        device: torch.device,
    ):  # fmt: skip
        self.model, self.blocks, self.files, self.batches = model, blocks, files, batches
        self.folder, self.device = folder, device

    def collect(self, number: int) -> None:
        """Statistics of block `number`, or of what stands outside the blocks after the last; once for all time."""
        unit = self.folder.unit(number)
        if (unit / "collected.json").is_file():
            return
        shutil.rmtree(unit, ignore_errors=True)
        unit.mkdir(parents=True)
        if number < len(self.blocks.names):
            grams = self._run_block(number, unit)
        else:
            grams = self._run_outside(unit)
        for name, gram in grams.grams.items():
            if gram.device.type != "cpu":
                _mapped(unit / _file_name(grams, name), gram.shape[0]).copy_(gram)
        found = {
            name: {"gram": _file_name(grams, grams.owners.get(name, name)), "positions": positions}
            for name, positions in grams.positions.items()
        }
        write_json(unit / "collected.json", found)
        if number:  # the outputs are there: the inputs have had their use
            shutil.rmtree(self.folder.hidden(number - 1, 0).parent, ignore_errors=True)

    def _run_block(self, number: int, unit: Path) -> Grams:
        self._embed()
        name = self.blocks.names[number]
        sources = self.blocks.sources[name]
        grams = Grams(sources, lambda layer, size: self._empty(unit / _name(sources, layer), size))
        block = load_module(self.model, name, self.files, self.device)
        modules = {source.name: block.get_submodule(source.name.removeprefix(f"{name}.")) for source in sources}
        with progress(f"calibrating {name}", len(self.batches)) as tick:
            for i, batch in enumerate(self.batches):
                call, hidden = load(self.folder.inputs(i))["calls"][number], load(self.folder.hidden(number, i))
                with grams.hooked(modules, partial(padding_of, batch, model=self.model)):
                    output = run_block(block, call, hidden.to(self.device))
                form_of(output, name)
                save(self.folder.hidden(number + 1, i), hidden_of(output).cpu())
                tick()
        if sources and not any(grams.positions.values()):
            raise ValueError(f"`calibration` reached none of the layers of {name}: is it empty, or does it skip them?")
        del block, modules
        gc.collect()
        return grams

    def _empty(self, file: Path, size: int) -> Tensor:
        if self.device.type == "cpu":
            return _mapped(file, size)
        return torch.zeros(size, size, dtype=torch.float64, device=self.device)

    def _embed(self) -> None:
        """The inputs of the first block, and what all blocks are called with besides."""
        outside, form = Outside(self.model, self.blocks, self.files), None
        if not self.folder.inputs(0).is_file():
            form = self._form(outside)
        for i, batch in enumerate(self.batches):
            if self.folder.inputs(i).is_file():
                continue
            form = load(self.folder.inputs(0))["form"] if i else form
            hidden, calls = outside.calls(batch, form)
            if i == 0:
                outside.check_calls(batch, form, calls)
            save(self.folder.hidden(0, i), hidden)
            save(self.folder.inputs(i), {"calls": calls, "form": form})  # last: it says that both are there

    def _form(self, outside: Outside) -> int | None:
        """What blocks return, seen by running the first on one batch."""
        name = self.blocks.names[0]
        hidden, calls = outside.calls(self.batches[0], None, only_first=True)
        block = load_module(self.model, name, self.files, self.device)
        return form_of(run_block(block, calls[0], hidden.to(self.device)), name)

    def _run_outside(self, unit: Path) -> Grams:
        """Layers before and after the blocks: the model runs once more, its blocks skipped."""
        sources, outside = self.blocks.outside, Outside(self.model, self.blocks, self.files)
        grams = Grams(sources, lambda layer, size: _mapped(unit / _name(sources, layer), size))
        last = len(self.blocks.names)
        for i, batch in enumerate(self.batches):
            form = load(self.folder.inputs(i))["form"]
            outside.finish(batch, load(self.folder.hidden(last, i)), form, sources, grams)
        return grams


def read_statistics(unit: Path, source: Source) -> Statistics | None:
    """Of a layer, from the disk; None where no batch reached it."""
    found = (read_json(unit / "collected.json") or {}).get(source.name)
    if found is None or not found["positions"]:
        return None
    return Statistics(_mapped(unit / found["gram"], source.weight.shape[1]), found["positions"])


def _mapped(file: Path, size: int) -> Tensor:
    """A square float64 matrix whose memory is the file: the system takes it back when it needs it."""
    flat = torch.from_file(str(file), shared=True, size=size * size, dtype=torch.float64)
    return flat.view(size, size)


def _name(sources: Sequence[Source], layer: str) -> str:
    return f"gram-{[source.name for source in sources].index(layer):05d}.bin"


def _file_name(grams: Grams, layer: str) -> str:
    return _name(list(grams.sources.values()), layer)
