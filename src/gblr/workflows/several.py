"""`gblr compress` at several costs: a run for each, which share what is measured of the dense model.

out/COST/                   the run of that cost, as `gblr compress --cost COST --out out/COST` makes it
out/calibration.safetensors what was measured of the dense model, until the last cost is done
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gblr.models.load import LoadedModel
from gblr.workflows.calibrated import SharedCalibration
from gblr.workflows.compress import compress
from gblr.workflows.model_source import RECORD
from gblr.workflows.settings import SETTINGS, TITLES, OtherRun, Settings, check_free
from gblr.workflows.tasks import Task
from gblr.workflows.variants import Say, where_of

_CALIBRATION = "calibration.safetensors"


@dataclass(frozen=True)
class SeveralCosts:
    """The settings of each cost, and the folder of its run below `out`."""

    out: Path
    settings: tuple[Settings, ...]

    @classmethod
    def of(cls, settings: Sequence[Settings], out: Path) -> "SeveralCosts":
        """Raises where a folder is that of another run, or of something else."""
        if (out / SETTINGS).exists():
            raise OtherRun(f"{out} holds a run of one cost; several have a folder each in it. Choose another folder.")
        found = cls(out, tuple({f"{one.cost:g}": one for one in settings}.values()))
        known = {folder.name for folder in found.folders} | {_CALIBRATION}
        others = [] if not out.is_dir() else [path for path in out.iterdir() if path.name not in known]
        if others and not all((path / SETTINGS).exists() for path in others):
            raise OtherRun(f"{out} is not empty and holds no runs of gblr alone. Choose another folder.")
        for one, folder in zip(found.settings, found.folders, strict=True):
            check_free(folder, one)
        return found

    @property
    def folders(self) -> list[Path]:
        return [self.out / f"{one.cost:g}" for one in self.settings]

    def compress(self, loaded: LoadedModel, task: Task, command: str = "", say: Say = print) -> list[dict[str, Any]]:
        """Their records. Interrupted, it goes on where it was when called again."""
        first = self.settings[0]
        shared = SharedCalibration(first, task, loaded.model, where_of(first), self.out / _CALIBRATION)
        records: list[dict[str, Any]] = []
        for number, (one, folder) in enumerate(zip(self.settings, self.folders, strict=True), 1):
            say(f"cost {one.cost:g}, {number} of {len(self.settings)}")
            if (folder / RECORD).exists():  # written last
                say("  done before")
                records.append(json.loads((folder / RECORD).read_text()))
                continue
            dense = self.folders[0] / "work" / "dense" if records else None
            records.append(compress(one, loaded, task, folder, command, say, shared, dense))
        shared.forget()
        return records


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record for a table: dense once, then what each cost gave."""
    first = records[0]
    dense = [row for row in first["results"] if row["name"] == TITLES["dense"]]
    others = [row for record in records for row in record["results"] if row["name"] != TITLES["dense"]]
    costs = ", ".join(f"{record['cost']:g}" for record in records)
    title = f"{first['model']['architecture']} on {first['data']['source']}: {TITLES[first['method']]} at costs {costs}"
    return {**first, "title": title, "results": [*dense, *others]}
