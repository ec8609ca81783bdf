"""`convert_streaming`: a model larger than memory, converted block by block from safetensors files to such files."""

import dataclasses
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.blocks import Blocks, find_blocks
from gblr.conversion.calibration import Calibration as Measured
from gblr.conversion.calibration import check_batches
from gblr.conversion.choosing import choose
from gblr.conversion.convert import (
    build_converted,
    build_structured,
    fit_piece,
    make_jobs,
    parts_of,
    report_row,
    report_title,
    set_budgets,
)
from gblr.conversion.filters import Filter, NameFilter, linear_layers
from gblr.conversion.model_files import ModelFiles, open_model_files
from gblr.conversion.report import Report, Row
from gblr.conversion.sources import Source, check_weights, read_source
from gblr.conversion.statistics import Statistics, note_on_few
from gblr.conversion.stream_folder import CLAIM, StreamFolder, read_json
from gblr.conversion.stream_output import finish, write_unit
from gblr.conversion.stream_refit import Refits, write_layer
from gblr.conversion.stream_statistics import Calibration, read_statistics
from gblr.conversion.tensor_files import checksum
from gblr.fitting.config import TRAINABLE_GROWTH, Config, GaudiConfig
from gblr.progress import progress


def convert_streaming(
    source_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    config: Config,
    where: Filter | None = None,
    calibration: Iterable[Any] | None = None,
    split_fused: bool = True,
    device: torch.device | str | None = None,
    timeout: float = 120.0,
    refit: bool = False,
) -> Report:
    """Converts the transformers model of `source_dir` into `out_dir`, with one of its blocks in memory at a time.

    `source_dir` has config.json and safetensors files; `out_dir` will be what `gblr.save_pretrained` writes after
    `convert_` and `harden_` with the same `config`, `where`, `calibration` and `split_fused`: `gblr.from_pretrained`
    opens it. Killed at any moment, it goes on where it was when called again with the same arguments. Under `torchrun`
    the processes share the layers of a block; one that gives no sign of life for `timeout` seconds is taken for dead.
    `device` is a GPU of its own for each process if there are any.

    `refit` goes on as `gblr.heal_(model, dense, calibration, structure="free")` would between the two: the layers of
    each block are fitted once more, to the dense model's outputs on the inputs that the converted model gives them.
    Layers outside the blocks are not. Errors in the report are then those of the refit.

        convert_streaming("llama-70b", "llama-70b-half", gblr.GaudiConfig(0.5, block_rank=16), calibration=batches)
    """
    source, out = Path(source_dir).resolve(), Path(out_dir).resolve()
    _check_arguments(source, out, config, refit and calibration is None)
    _check_calibration(calibration)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model, files = open_model_files(source)
    where = linear_layers() if where is None else where
    sources, skipped = choose(model, where, split_fused, config)
    blocks = find_blocks(model, sources)
    batches = None if calibration is None else [_on_cpu(batch) for batch in calibration]
    if batches is not None and not batches:
        raise ValueError("`calibration` is empty; leave it out to fit without.")
    folder = StreamFolder(out, rank, world, timeout)
    claim = _claim(files, config, sources, batches, refit)
    stored = folder.check(claim)
    if stored is None or "report" not in stored:
        folder.claim(claim)
        with folder.at_work():
            _Conversion(model, files, config, blocks, batches, split_fused, folder, _device(device), refit).run()
            if rank:
                folder.wait(folder.is_finished, "the end")
        stored = read_json(out / CLAIM)
    if rank == 0:
        folder.remove_work()
    notes = where.unmatched([n for n, _ in model.named_modules()]) if isinstance(where, NameFilter) else []
    inputs = stored.get("inputs", {})
    notes += note_on_few("calibration", {s.name: (inputs.get(s.name, 0), s.weight.shape[1]) for s in sources})
    rows = _in_order([Row(**row | {"shape": tuple(row["shape"])}) for row in stored["report"]], sources)
    title = report_title(config, calibration) + ", refitted" * refit
    return Report([*rows, *skipped], [s.name for s in sources], title, notes)


class _Conversion:
    """One process's part of the work: units are the blocks in order, then what stands outside them."""

    def __init__(
        self, model: Any, files: ModelFiles, config: Config, blocks: Blocks, batches: list[Any] | None,
        split_fused: bool, folder: StreamFolder, device: torch.device, refit: bool,
    ):  # fmt: skip
        self.model, self.files, self.config, self.blocks = model, files, config, blocks
        self.split_fused, self.folder, self.device = split_fused, folder, device
        self.calibration = (
            None if batches is None else Calibration(model, blocks, files, batches, folder, device)
        )  # fmt: skip
        growth = config.max_growth if isinstance(config, GaudiConfig) else TRAINABLE_GROWTH
        self.refits = Refits(model, blocks, files, batches or [], folder, device, growth) if refit else None
        self.units = [*(blocks.sources[name] for name in blocks.names), blocks.outside]

    def run(self) -> None:
        done = [self.folder.unit_marker(number).is_file() for number in range(len(self.units))]
        totals = [len(self._mine(number)) + 1 for number in range(len(self.units))]
        before = sum(total for total, is_done in zip(totals, done, strict=True) if is_done)
        shown = self.folder.rank == 0
        with progress("layers", sum(totals), before, shown) as tick:
            for number, unit in enumerate(self.units):
                if not done[number]:
                    self._unit(number, unit, tick)
        if self.folder.rank == 0:
            finish(self.model, self.files, len(self.units), self.folder)

    def _unit(self, number: int, sources: list[Source], tick: Any) -> None:
        try:
            self._share(number, sources, tick)
        except FileNotFoundError:
            if not self._is_done(number):
                raise
        if self.folder.rank == 0:
            markers = [_marker(self.folder.unit(number), sources, source) for source in sources]
            self.folder.wait(lambda: all(marker.is_file() for marker in markers), f"layers of block {number}")
            if self.refits is not None and number < len(self.blocks.names):
                markers = self.refits.refit(number, markers)
            write_unit(self.model, self.files, self.blocks, number, markers, self.folder)
        tick()

    def _share(self, number: int, sources: list[Source], tick: Any) -> None:
        """This process's layers of a unit."""
        mine = self._mine(number)
        if mine or self.folder.rank == 0:
            self._collect(number, sources)
        for source in mine:
            marker = _marker(self.folder.unit(number), sources, source)
            if not marker.is_file() and not self._is_done(number):
                marker.parent.mkdir(exist_ok=True)
                self._fit(source, number, marker)
            tick(source.name)

    def _is_done(self, number: int) -> bool:
        """Whether the first process has written the unit, and taken its folder away, or that of all units: in a run
        that goes on from a stopped one it needs nothing of the others, which may be slow to start.
        """
        return self.folder.rank > 0 and (self.folder.unit_marker(number).is_file() or self.folder.is_finished())

    def _collect(self, number: int, sources: list[Source]) -> None:
        """The last unit, all that is outside the blocks, needs no run where nothing of it is converted."""
        if self.calibration is None or (number == len(self.blocks.names) and not sources):
            return
        if self.folder.rank == 0:
            self.calibration.collect(number)
            return
        collected = self.folder.unit(number) / "collected.json"
        self.folder.wait(lambda: collected.is_file() or self._is_done(number), f"the statistics of block {number}")

    def _mine(self, number: int) -> list[Source]:
        """This process's share of a unit: the largest layers first, each to whom has least to do.

        All processes work it out alike. Whose turn is first changes from unit to unit, as shares are never equal.
        """
        load = [0.0] * self.folder.world
        mine = []
        for source in sorted(self.units[number], key=lambda source: -_work(source)):
            turn = load.index(min(load))
            load[turn] += _work(source)
            if (turn + number) % self.folder.world == self.folder.rank:
                mine.append(source)
        return mine

    def _fit(self, meta: Source, number: int, marker: Path) -> None:
        """One layer from file to file."""
        module = self.model.get_submodule(meta.name)
        kept = dict(module._parameters)
        self.files.fill(module, meta.name)
        statistics = read_statistics(self.folder.unit(number), meta)
        try:
            source = read_source(self.model, meta.name, module, self.split_fused)
            source = dataclasses.replace(source, **_moved(source, self.device))
            check_weights([source])
            trainable = self.refits is not None and number < len(self.blocks.names)
            layer, rows = self._fitted(source, {} if statistics is None else {meta.name: statistics}, trainable)
        finally:
            module._parameters.update(kept)
        write_layer(marker, meta.name, layer, rows)

    def _fitted(
        self, source: Source, statistics: dict[str, Statistics], trainable: bool
    ) -> tuple[nn.Module, list[Row]]:
        """For inference, or as a refit needs it."""
        jobs = make_jobs([source], statistics)
        set_budgets(self.config, jobs)
        for job in jobs:
            fit_piece(self.config, [job])
        layer = (build_converted if trainable else build_structured)(self.config, source, jobs)
        return layer, [report_row(job, part) for job, part in zip(jobs, parts_of(layer), strict=True)]


def _work(source: Source) -> float:
    return float(source.weight.numel()) * min(source.weight.shape)


def _moved(source: Source, device: torch.device) -> dict[str, Any]:
    return {"weight": source.weight.to(device), "bias": None if source.bias is None else source.bias.to(device)}


def _marker(unit: Path, sources: Sequence[Source], source: Source) -> Path:
    return unit / f"layer-{[s.name for s in sources].index(source.name):05d}.json"


def _check_arguments(source: Path, out: Path, config: Config, refits_without_inputs: bool) -> None:
    if refits_without_inputs:
        raise ValueError("`refit` fits layers to what they are given: pass `calibration` batches, or leave it out.")
    if config.allocation != "uniform":
        raise ValueError(
            f"streaming gives every layer the same cost: allocation {config.allocation!r} would have to see all layers "
            'at once. Use allocation="uniform".'
        )
    if isinstance(config, GaudiConfig) and config.init == "scratch":
        raise ValueError('`init="scratch"` ignores the weights, so there is nothing to stream; choose another `init`.')
    if out == source or source in out.parents:
        raise ValueError(f"`out_dir` {out} must lie outside `source_dir` {source}, which is only read.")
    if out in source.parents and (out / CLAIM).exists():
        raise ValueError(f"`source_dir` {source} must lie outside `out_dir` {out}.")


def _check_calibration(calibration: object) -> None:
    if isinstance(calibration, Measured):
        raise ValueError(
            "streaming measures each block when it comes to it, and keeps that on the disk: pass the batches as "
            "`calibration`, not what `gblr.calibrate` made of them."
        )
    if calibration is not None:
        check_batches(calibration)


def _claim(
    files: ModelFiles, config: Config, sources: Sequence[Source], batches: list[Any] | None, refit: bool
) -> dict[str, Any]:
    """All that decides the outcome, in a form that can be compared."""
    names = sorted({entry.file for entry in files.entries.values()})
    layers = [f"{s.name}:{s.part_sizes}" + (f" in {s.runs} runs" if s.runs > 1 else "") for s in sources]
    return {
        "source": [[file.name, file.stat().st_size] for file in names],
        "config": repr(config) + ", refitted" * refit,
        "layers": f"{len(layers)} with checksum {zlib.crc32(repr(layers).encode()):08x}",
        "calibration": None
        if batches is None
        else f"{len(batches)} batches with checksum {_batch_checksum(batches):08x}",
    }


def _batch_checksum(value: Any, start: int = 0) -> int:
    if isinstance(value, Tensor):
        return zlib.crc32(repr((checksum(value), tuple(value.shape), value.dtype)).encode(), start)
    if isinstance(value, Mapping):
        value = [part for item in sorted(value.items()) for part in item]
    if isinstance(value, (list, tuple)):
        for part in value:
            start = _batch_checksum(part, start)
        return start
    return zlib.crc32(repr(value).encode(), start)


def _on_cpu(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.cpu()
    if isinstance(batch, Mapping):
        return {key: _on_cpu(value) for key, value in batch.items()}
    return tuple(_on_cpu(value) for value in batch) if isinstance(batch, (list, tuple)) else batch


def _in_order(rows: Sequence[Row], sources: Sequence[Source]) -> list[Row]:
    place = {name: i for i, source in enumerate(sources) for name in source.part_names}
    return sorted(rows, key=lambda row: place[row.layer])


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
