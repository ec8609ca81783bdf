"""What the methods of a comparison are told of the dense model before they are fitted: measured once for all."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from gblr.conversion.calibration import Calibration, calibrate
from gblr.conversion.filters import Filter
from gblr.training.batches import num_samples
from gblr.workflows.measuring import measuring
from gblr.workflows.settings import Settings
from gblr.workflows.task import Task
from gblr.workflows.wording import counted


class SharedCalibration:
    """Measured when it is first asked for, and kept in `file` if one is named: in memory Gram matrices can take more
    than the model, and the methods after this one are fitted when it has been trained.
    """

    def __init__(self, settings: Settings, task: Task, dense: nn.Module, where: Filter, file: Path | None = None):
        self.settings, self.task, self.dense, self.where, self.file = settings, task, dense, where, file

    def get(self, say: Callable[[str], None]) -> Calibration | None:
        """None where nothing is to be measured."""
        if not self.settings.calibration or self.settings.from_scratch:
            return None
        if self.file is not None and self.file.exists():
            say("calibrated before")
            return Calibration.load(self.file)
        what = "calibration and sensitivity" if self.settings.sensitivity else "calibration"
        batches = list(self.task.calibration(self.settings.calibration))
        say(f"{counted(sum(map(num_samples, batches)), 'sample')} read for {what}")
        with measuring(self.settings.precision, next(self.dense.parameters()).device):
            found = calibrate(self.dense, batches, self.where, self.settings.sensitivity)
        if self.file is not None:
            found.save(self.file)
        return found

    def forget(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)
