"""`heal_`: recovery of a converted model from its dense original, on inputs without labels."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.atomic import remove, replacing, write_json
from gblr.conversion.checkpoint import load_, save_pretrained
from gblr.conversion.cost import cost
from gblr.conversion.filters import is_linear_or_conv
from gblr.conversion.planner import as_call
from gblr.conversion.refit import Refitted, refit_layers_, structured_layers
from gblr.conversion.refit_parts import Freedom
from gblr.conversion.sources import read_source
from gblr.conversion.statistics import note_on_few
from gblr.fitting.config import TRAINABLE_GROWTH, check_choice
from gblr.layers.gaudi import GaudiModule
from gblr.layers.modes import modes_of, restore_modes
from gblr.training.budget import Budget
from gblr.training.distillation import Match, distillation_loss
from gblr.training.heal_folder import claim
from gblr.training.loop import TrainResult, train
from gblr.training.schedules import SigmaSchedule
from gblr.training.train_config import FITTED_STRUCTURE_LR, TrainConfig

_LEAST = 1e-9  # a budget is above 0, also where all blocks are dead


@dataclass(frozen=True)
class HealResult:
    """What `heal_` did: `layers` has the errors of every layer before and after its refit, none if that was left out;
    `training` is the result of the distillation, None without one; `notes` tell where `batches` are few.
    """

    layers: list[Refitted]
    training: TrainResult | None

    @property
    def notes(self) -> list[str]:
        """A line if layers were given fewer inputs than they have features: their refits keep what these few need."""
        return note_on_few("batches", {row.layer: (row.inputs, row.features) for row in self.layers})


def heal_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Any],
    *,
    layers: bool = True,
    config: TrainConfig | None = None,
    structure: Freedom = "frozen",
    match: Match = "auto",
    temperature: float = 1.0,
    out: str | os.PathLike[str] | None = None,
    sensitivity: bool | Mapping[str, Tensor] = False,
    max_growth: float = TRAINABLE_GROWTH,
) -> HealResult:
    """Brings the outputs of a converted `model` back to those of `teacher`, its dense original, in place.

    `batches` are inputs as the model is called with, without labels; a sequence, as they are read several times. First
    the structured layers are refitted one after the other, each to the dense layer's outputs on the inputs that the
    compressed model gives it, or to the dense model's sum where these outputs are added to a stream that passes the
    layer by (`layers=False` skips this). `sensitivity` weighs outputs as in `convert_`; what the
    report of that call has need not be measured again. Then, with a `config`, the whole model is trained to the
    teacher's outputs: logits by their Kullback-Leibler divergence at `temperature`, hidden states by their relative
    squared error; `match="auto"` takes logits where the output has them.

    The cost stays what it is; masks that are still blurred are folded into the contents first, at the cost that
    `harden_` gives them. `structure="free"` lets blocks move and change size within it, or within the budget of
    `config` if that has one; any format can be healed. Without such a budget they move at the rate of fitted blocks,
    1e-4, unless `config` has another `structure_lr` than the default.
    `max_growth` is that of `GaudiConfig`: the refit of a model that will not be trained afterwards can have 300.
    With `out`, both steps are saved there as they go, and the same call continues after an interruption; a folder of
    another model, teacher or settings is refused. In the end all modules of both models are in the mode, training or
    evaluation, that they came with.

        small = copy.deepcopy(model)
        gblr.convert_(small, gblr.GaudiConfig(relative_cost=0.5), calibration=batches)
        gblr.heal_(small, model, batches, config=gblr.TrainConfig(epochs=3, lr=2e-4))
        gblr.harden_(small)
    """
    check_choice("structure", structure, Freedom)
    check_choice("match", match, Match)
    _check(model, teacher, batches, layers)
    if structure == "frozen" and config is not None and config.budget is not None and _gaudi_layers(model):
        raise ValueError(
            "a `budget` in `config` is for a structure that is learned, and structure='frozen' keeps it as it is; pass "
            "structure='free', or leave the budget out."
        )
    folder = None if out is None else Path(out)
    if folder is not None:
        options = {"layers": layers, "structure": structure, "match": match, "temperature": temperature}
        options |= {"sensitivity": sensitivity is not False, "max_growth": max_growth, "batches": len(batches)}
        claim(folder, model, teacher, options)
    refitted = _refit(model, teacher, batches, structure, folder, sensitivity, max_growth) if layers else []
    if config is None:
        return HealResult(refitted, None)
    return HealResult(refitted, _distill(model, teacher, batches, config, structure, match, temperature, folder))


def _check(model: nn.Module, teacher: nn.Module, batches: Sequence[Any], layers: bool) -> None:
    if not isinstance(batches, Sequence) or isinstance(batches, str) or not batches:
        raise ValueError("`batches` must be a list of inputs, as they are read several times; use `list(...)`.")
    ours = structured_layers(model)
    if not ours:
        raise ValueError("`model` has no structured layer to heal; convert it first with `convert_`.")
    theirs = dict(teacher.named_modules())
    if structured_layers(teacher):
        raise ValueError("`teacher` has structured layers; it must be the dense original, copied before `convert_`.")
    if absent := [name for name in ours if name not in theirs]:
        raise ValueError(f"`teacher` has no layer {absent[0]!r}: it must be the dense original of `model`.")
    for name, layer in ours.items() if layers else ():
        size, dense = (layer.out_features, layer.in_features), _size(teacher, name)
        if dense != size:
            what = type(theirs[name]).__name__ if dense is None else f"{dense[0]} x {dense[1]}"
            raise ValueError(
                f"{name!r} is {size[0]} x {size[1]} in `model` and {what} in `teacher` (outputs x inputs): it must be "
                "the dense original of `model`."
            )


def _size(model: nn.Module, name: str) -> tuple[int, int] | None:
    """Outputs and inputs of a dense layer; None for anything else."""
    module = model.get_submodule(name)
    if not is_linear_or_conv(module):
        return None
    out_features, in_features = read_source(model, name, module, split_fused=False).weight.shape
    return out_features, in_features


def _refit(
    model: nn.Module, teacher: nn.Module, batches: Sequence[Any], structure: Freedom, folder: Path | None,
    sensitivity: bool | Mapping[str, Tensor], max_growth: float,
) -> list[Refitted]:  # fmt: skip
    """With a folder, saved as it goes: what is done before is not done again."""
    if folder is None:
        return refit_layers_(model, teacher, batches, structure, sensitivity=sensitivity, max_growth=max_growth)
    file = folder / "layers.json"
    done = [Refitted(**row) for row in json.loads(file.read_text())] if file.exists() else []
    if done:
        load_(model, _after(done, folder))

    def keep(refitted: list[Refitted]) -> None:
        before = _after(done, folder)
        done.extend(refitted)
        with replacing(_after(done, folder)) as new:
            save_pretrained(model, new)
        write_json(file, [vars(row) for row in done])  # from now on that is what is continued
        remove(before)

    refit_layers_(model, teacher, batches, structure, [row.layer for row in done], keep, sensitivity, max_growth)
    return done


def _after(done: Sequence[Refitted], folder: Path) -> Path:
    """The model as these refits have left it: a folder for each number of them, so that a kill finds a whole one."""
    return folder / f"layers-{len(done)}"


def _distill(
    model: nn.Module, teacher: nn.Module, batches: Sequence[Any], config: TrainConfig, structure: Freedom, match: Match,
    temperature: float, folder: Path | None,
) -> TrainResult:  # fmt: skip
    gaudi = _gaudi_layers(model)
    frozen: list[nn.Parameter] = []
    if structure == "free" and gaudi and config.budget is None:
        budget = Budget(relative_cost=_present_cost(model, batches[0]))
        chosen = config.structure_lr != TrainConfig.structure_lr
        rate = config.structure_lr if chosen else FITTED_STRUCTURE_LR  # the default is for blocks that have to travel
        config = replace(config, budget=budget, sigma=SigmaSchedule(torch.inf, torch.inf), structure_lr=rate)
    elif structure == "frozen":
        frozen = [p for module in gaudi for p in module.structure_parameters() if p.requires_grad]
    modes = modes_of(teacher)
    teacher.eval()
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        loss = distillation_loss(teacher, match, temperature, config.precision)
        return train(model, batches, config=config, out=None if folder is None else folder / "train", loss=loss)
    finally:
        restore_modes(modes)
        for parameter in frozen:
            parameter.requires_grad_(True)


def _gaudi_layers(model: nn.Module) -> list[GaudiModule]:
    return [module for module in model.modules() if isinstance(module, GaudiModule)]


def _present_cost(model: nn.Module, batch: Any) -> float:
    """Of the Gaudi layers, which a budget is for: other formats stay at theirs."""
    args, kwargs = as_call(batch)
    names = {name for name, module in model.named_modules() if isinstance(module, GaudiModule)}
    layers = [layer for layer in cost(model, *args, **kwargs).converted if layer.name in names]
    present = sum(layer.num_mults for layer in layers) / max(1, sum(layer.dense_mults for layer in layers))
    return min(max(present, _LEAST), 1.0)
