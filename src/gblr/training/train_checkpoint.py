"""A run on disk. One format for one process, DDP and FSDP2: what one of them wrote, another continues.

last/   the model, as `gblr.save_pretrained` writes it, and trainer.pt: all else that continuing needs
best/   the model alone, ready for `gblr.load_` and `gblr.from_pretrained`, and the metrics it was chosen for
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.atomic import complete, replacing
from gblr.conversion.checkpoint import read_state, save_pretrained
from gblr.conversion.layer_spec import dtype_name
from gblr.conversion.tensor_files import CheckpointError, describe, raise_all
from gblr.training.assembly import Assembly
from gblr.training.processes import from_all, from_main, is_one_of_several
from gblr.training.records import Row
from gblr.training.rng import derived_seed, rng_state, seed_all, set_rng_state
from gblr.training.train_config import TrainConfig

_FORMAT = 1
_TRAINER = "trainer.pt"


@dataclass
class Progress:
    """Where a run is: optimizer steps done, the sum of the losses since the last row, what it found so far."""

    step: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0
    seconds: float = 0.0
    best: float | None = None
    history: list[Row] = field(default_factory=list)


def save_last(folder: Path, parts: Assembly, progress: Progress, num_batches: int) -> None:
    """All processes call it; the first one writes."""
    average = None
    if parts.average is not None:
        with parts.average.applied():
            # torch hands out a CPU model's own tensors, which have other values after this
            average = {name: value.clone() for name, value in _model_state(parts.inner).items()}
    trainer = {
        "format": _FORMAT,
        "config": parts.config.to_plain(),
        "num_batches": num_batches,
        "progress": asdict(progress),
        "optimizer": _optimizer_state(parts),
        "has_stepped": bool(parts.bare_optimizer.state),
        "learner": None if parts.learner is None else parts.learner.state_dict(),
        "scaler": None if parts.accelerator.scaler is None else parts.accelerator.scaler.state_dict(),
        "average": average,
        "rng": from_all(rng_state(parts.accelerator.device)),
    }
    model = _whole_model(parts)
    if parts.accelerator.is_main_process:
        with replacing(folder) as new:
            save_pretrained(model, new)
            torch.save(trainer, new / _TRAINER)
    parts.accelerator.wait_for_everyone()


def save_best(folder: Path, parts: Assembly, row: Row) -> None:
    """With averaged weights, if the run keeps an average. All processes call it; the first one writes."""
    with parts.evaluated():
        model = _whole_model(parts)
        if parts.accelerator.is_main_process:
            with replacing(folder) as new:
                save_pretrained(model, new)
                (new / "metrics.json").write_text(json.dumps(row, indent=1))
    parts.accelerator.wait_for_everyone()


class Stored:
    """A checkpoint to continue from. The first process reads it and tells the others."""

    def __init__(self, folder: Path, parts: Assembly, num_batches: int):
        self.folder, self.parts = folder, parts
        self._trainer: dict[str, Any] = {}
        if parts.accelerator.is_main_process:
            self._trainer = _read_trainer(folder)
            _check(folder, self._trainer, parts.config, num_batches)
        small = {key: value for key, value in self._trainer.items() if key not in ("optimizer", "average")}
        self._trainer |= from_main(small)

    def restore(self) -> Progress:
        """Model, average, optimizer and scaler; before the learner is made, as restoring an optimizer steps it."""
        parts = self.parts
        if self._trainer["has_stepped"]:
            _set_optimizer_state(parts, self._trainer.get("optimizer") or {})
        if parts.average is not None:
            _set_model_state(parts.inner, self._trainer.get("average") or {})
            parts.average.restart()
        state = {}
        if parts.accelerator.is_main_process:
            state = {_plain(name): tensor for name, tensor in read_state(self.folder).items()}
            _check_names(self.folder, state, parts.whole or parts.inner)
        _set_model_state(parts.inner, state)
        if parts.accelerator.scaler is not None:
            parts.accelerator.scaler.load_state_dict(self._trainer["scaler"])
        return Progress(**self._trainer["progress"])

    def restore_learner_and_random_numbers(self) -> None:
        """Last of all: making the learner may run the model. Processes that the checkpoint knows not get new seeds."""
        parts = self.parts
        if parts.learner is not None:
            parts.learner.load_state_dict(self._trainer["learner"])
        states, rank = self._trainer["rng"], parts.accelerator.process_index
        if rank < len(states):
            set_rng_state(states[rank], parts.accelerator.device)
        else:
            seed_all(derived_seed(parts.config.seed, rank, self._trainer["progress"]["step"]))


def find_last(folder: Path, resume: bool) -> Path | None:
    """The checkpoint to continue from, as the first process sees it."""
    return from_main(complete(folder) if resume else None)


def _read_trainer(folder: Path) -> dict[str, Any]:
    file = folder / _TRAINER
    try:
        trainer = torch.load(file, map_location="cpu", weights_only=True)
        version = trainer["format"]
    except Exception as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}") from error
    if version != _FORMAT:
        raise CheckpointError(f"{file} has format version {version}; this gblr reads {_FORMAT}. Update gblr.")
    return trainer


def _check(folder: Path, trainer: dict[str, Any], config: TrainConfig, num_batches: int) -> None:
    different = config.differences(trainer["config"])
    if trainer["num_batches"] != num_batches:
        different.append(f"the data had {trainer['num_batches']} batches in an epoch and has {num_batches}")
    if different:
        raise CheckpointError(
            f"{folder} is a checkpoint of another run: {'; '.join(different)}. Give the same settings to continue it, "
            "another `out`, or `resume=False` to start anew over it."
        )


def _check_names(folder: Path, state: dict[str, Tensor], model: nn.Module) -> None:
    expected = {_plain(name): tensor for name, tensor in model.state_dict().items()}
    problems = [f"tensor {name!r} of the model is missing" for name in expected if name not in state]
    problems += [f"tensor {name!r} is not in the model" for name in state if name not in expected]
    for name in (name for name in expected if name in state):
        texts = [describe(t.shape, dtype_name(t.dtype)) for t in (expected[name], state[name])]
        if texts[0] != texts[1]:
            problems.append(f"tensor {name!r}: the model has {texts[0]}, the checkpoint {texts[1]}")
    raise_all(folder, problems)


def _whole_model(parts: Assembly) -> nn.Module:
    """The model with all of its weights, on the first process; collective if it is sharded."""
    if not parts.is_sharded:
        return parts.inner
    state = _model_state(parts.inner)
    if parts.whole is None:
        return parts.inner
    parts.whole.load_state_dict({name: state[_plain(name)] for name in parts.whole.state_dict()})
    return parts.whole


def _model_state(model: nn.Module) -> dict[str, Any]:
    """All of it, on the CPU of the first process."""
    api = _api()
    return api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True, cpu_offload=True))


def _set_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """`state` is the first process's; the others give an empty one."""
    _api().set_model_state_dict(model, state, options=_from_first())


def _optimizer_state(parts: Assembly) -> dict[str, Any] | None:
    """None before the first real step: torch would make one."""
    if not parts.bare_optimizer.state:
        return None
    api = _api()
    options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return api.get_optimizer_state_dict(parts.inner, parts.bare_optimizer, options=options)


def _set_optimizer_state(parts: Assembly, state: dict[str, Any]) -> None:
    if state:
        _fill_unused(state["state"], parts.whole or parts.inner)
    _api().set_optimizer_state_dict(parts.inner, parts.bare_optimizer, state, options=_from_first())


def _fill_unused(state: dict[str, dict[str, Tensor]], model: nn.Module) -> None:
    """Parameters that never had a gradient have no state, which torch refuses to load; zeros mean the same."""
    names = next(iter(state.values())).keys()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _plain(name) not in state:
            state[_plain(name)] = {
                key: torch.zeros(()) if key == "step" else torch.zeros(parameter.shape) for key in names
            }


def _plain(name: str) -> str:
    """Without the mark of modules that `torch.compile` wraps, as torch's functions for distributed states have it."""
    return name.replace("_orig_mod.", "")


def _from_first() -> Any:
    return _api().StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_one_of_several())


def _api() -> Any:
    import torch.distributed.checkpoint.state_dict  # a second to import, for saving and resuming only

    return torch.distributed.checkpoint.state_dict
