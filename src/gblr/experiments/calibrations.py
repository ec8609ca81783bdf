"""What runs measure of one and the same model before they fit it: measured by the first, kept for the others."""

import hashlib
import json
import time
from pathlib import Path

from torch import nn

from gblr.conversion.calibration import Calibration, calibrate
from gblr.conversion.tensor_files import weights_checksum
from gblr.experiments.field import Place
from gblr.experiments.text_models import TEXT_MODELS
from gblr.experiments.text_run import TextRun
from gblr.experiments.text_tasks import TextTask
from gblr.workflows.measuring import measuring


def calibration_of(
    model: nn.Module, run: TextRun, task: TextTask, place: Place, fits: Path | None
) -> Calibration | None:
    """Of the dense `model`; kept in the folder `fits`, if there is one."""
    if not run.calibration:
        return None
    file = None if fits is None else fits / f"calibration-{_key(model, run)}.safetensors"
    if file is not None and file.exists():
        return Calibration.load(file)
    begin = time.perf_counter()
    with measuring(run.precision, place.device):
        found = calibrate(model, task.calibration(run.calibration), TEXT_MODELS[run.model].where, run.sensitivity)
    place.say(f"calibrated in {time.perf_counter() - begin:.0f} s")
    if file is not None:
        found.save(file)
    return found


def _key(model: nn.Module, run: TextRun) -> str:
    what = (run.model, run.calibration, run.sensitivity, run.precision, weights_checksum(model))
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
