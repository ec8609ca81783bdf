"""What a run of `gblr compress` or `gblr train` is: all that decides its outcome, as plain values."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gblr.atomic import locked, write_json
from gblr.fitting.config import BlastConfig, Config, GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig
from gblr.workflows.measuring import PRECISIONS

SETTINGS = "settings.json"  # the first file of a run
METHODS: dict[str, type[Config]] = {
    "gaudi": GaudiConfig,
    "low-rank": LowRankConfig,
    "monarch": MonarchConfig,
    "pixelfly": PixelflyConfig,
    "blast": BlastConfig,
}
TITLES = {"dense": "dense", "gaudi": "GBLR", "low-rank": "low rank", "monarch": "Monarch"}
TITLES |= {"pixelfly": "Pixelfly", "blast": "BLAST"}


@dataclass(frozen=True)
class Settings:
    """`epochs=0` fits without training; `None` takes what suits the data. `heal` refits the layers one after the other
    on the calibration inputs. `sensitivity` measures on them what errors do to the model's outputs, and spends the cost
    where that matters. `precision` is that of the model in these runs. `distill` is the share of the training loss that
    aims at the dense model's scores and not at the labels; `None` takes what suits the data. `block_rank` is that of
    GBLR; `None` takes what suits the layers. `baselines` are methods to compare with, of the same cost, calibration and
    training.
    """

    model: str
    data: str
    cost: float = 0.3
    method: str = "gaudi"
    epochs: float | None = 0.0
    calibration: int = 256
    heal: bool = False
    sensitivity: bool = False
    precision: str = "float32"
    distill: float | None = None
    block_rank: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    convolutions: bool = False
    baselines: tuple[str, ...] = ()
    from_scratch: bool = False
    lr: float | None = None
    structure_lr: float | None = None
    batch_size: int | None = None
    max_train: int | None = None
    max_eval: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (self.method, *self.baselines):
            if name not in METHODS and not (name == "dense" and self.from_scratch):
                option = "--method" if name == self.method else "--baseline"
                raise ValueError(f"{option}: unknown method {name!r}: choose from {', '.join(METHODS)}.")
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision is {' or '.join(PRECISIONS)}; got {self.precision!r}.")
        if not 0 < self.cost <= 1:
            raise ValueError(f"--cost is a fraction of the dense multiplications in (0, 1]; got {self.cost:g}.")
        epochs = "epochs" if self.from_scratch else "train"
        _check_at_least(0, **{epochs: self.epochs}, calibration=self.calibration)
        _check_at_least(0, lr=self.lr, structure_lr=self.structure_lr)
        _check_at_least(1, max_train=self.max_train, max_eval=self.max_eval, batch_size=self.batch_size)
        _check_at_least(1, block_rank=self.block_rank)
        if self.distill is not None and not 0 <= self.distill <= 1:
            raise ValueError(f"--distill is a share of the training loss in [0, 1]; got {self.distill:g}.")
        if self.heal and (self.from_scratch or not self.calibration):
            raise ValueError("--heal needs a trained model and calibration inputs: give --calibration 256, say.")
        if self.sensitivity and (self.from_scratch or not self.calibration):
            raise ValueError("--sensitivity is measured on calibration inputs: give --calibration 256, say.")
        if self.precision != "float32" and (self.from_scratch or not self.calibration):
            raise ValueError("--precision is that of calibration runs: give --calibration 256, say, or leave it out.")
        if self.distill and (self.from_scratch or self.epochs == 0):
            raise ValueError("--distill is a way to train a compressed model: give --train EPOCHS, too.")

    def to_plain(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def check_used(settings: Settings) -> None:
    """Raises for options that nothing would come of: those of training without any, those of GBLR without GBLR."""
    s, training = settings, ("lr", "structure_lr", "batch_size")
    if s.from_scratch and s.method == "dense":
        of_layers = ("block_rank", "structure_lr", "include", "exclude")
        _refuse(s, of_layers, "no layer is converted: give another --method")
        if s.cost != 1:
            raise ValueError("--cost would have no effect: no layer is converted: give a --method, gaudi say.")
    if s.epochs == 0:
        what = "nothing is trained: give --epochs" if s.from_scratch else "nothing is trained: give --train EPOCHS"
        _refuse(s, training, what)
    if "gaudi" not in (s.method, *s.baselines):
        _refuse(s, ("block_rank", "structure_lr"), "only GBLR has it: give --method gaudi")


def _refuse(settings: Settings, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(settings, name) not in (None, ()):
            raise ValueError(f"--{name.replace('_', '-')} would have no effect: {why}, or leave it out.")


def _check_at_least(least: int, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be {least} or above; got {value:g}.")


class OtherRun(ValueError):
    """The folder holds a run with other settings."""


@contextmanager
def claimed(out: Path, settings: Settings) -> Iterator[None]:
    """Makes `out` the folder of this run, or finds that it is already; nothing of another run is overwritten, and no
    two processes work in it at once. One that is new is given up after an error of the options, so that the corrected
    command can have it, unless a fit or training would be lost.
    """
    check_free(out, settings)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        new = not (out / SETTINGS).exists()
        claim(out, settings)
        try:
            yield
        except (ValueError, TypeError):
            kept = [*out.glob("work/*/converted"), *out.glob("work/*/train"), *out.glob("model/*")]
            if new and not kept:
                shutil.rmtree(out / "work", ignore_errors=True)
                (out / SETTINGS).unlink()
                with suppress(OSError):  # something else is in it
                    out.rmdir()
            raise


def claim(out: Path, settings: Settings) -> None:
    check_free(out, settings)
    out.mkdir(parents=True, exist_ok=True)
    mine = settings.to_plain()
    if _stored(out) != mine:
        write_json(out / SETTINGS, mine)


def check_free(out: Path, settings: Settings) -> None:
    """Raises where `out` is the folder of another run, or of something else. A block rank that is still to be chosen
    (None) agrees with any.
    """
    if out.exists() and not out.is_dir():
        raise OtherRun(f"{out} is a file; --out is a folder. Choose another name.")
    stored, mine = _stored(out), settings.to_plain()
    if stored is None:
        left = f".{SETTINGS}."  # by a process that was killed while it wrote the first file
        if out.exists() and not all(path.name.startswith(left) for path in out.iterdir()):
            raise OtherRun(f"{out} is not empty and holds no run of gblr. Choose another folder.")
        return
    before = {field.name: stored.get(field.name, field.default) for field in fields(settings)}  # newer than the run
    compared = [key for key in mine if key != "block_rank" or mine[key] is not None]
    differences = [f"{key} was {before[key]!r}" for key in compared if before[key] != mine[key]]
    if differences:
        raise OtherRun(
            f"{out} holds another run ({'; '.join(differences)}). Choose another folder, or delete that one."
        )


def _stored(out: Path) -> dict[str, Any] | None:
    file = out / SETTINGS
    if not file.exists():
        return None
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise OtherRun(f"{file} is damaged: {error}. Choose another folder, or delete that one.") from error
