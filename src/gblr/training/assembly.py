"""Model, optimizer, learner and average, put together for one process, DDP or FSDP2."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gblr.fitting.config import check_choice
from gblr.layers.gaudi import GaudiModule
from gblr.layers.modes import modes_of, restore_modes
from gblr.training.average import Average
from gblr.training.learner import StructureLearner
from gblr.training.param_groups import param_groups
from gblr.training.processes import leave_at_exit
from gblr.training.sharding import shard_
from gblr.training.train_config import Parallel, TrainConfig


def start_accelerator(config: TrainConfig) -> Any:
    """Accelerate's view of this process: device, precision, accumulation, its place among others."""
    try:
        from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs  # type: ignore[import-untyped]
        from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
        from accelerate.utils import GradientAccumulationPlugin  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("`gblr.train` needs Accelerate: pip install 'gblr[hf]'.") from error
    AcceleratorState._reset_state()  # it keeps the precision of an earlier run and refuses another
    GradientState._reset_state()
    no_device = not torch.accelerator.is_available()
    if config.precision == "fp16" and no_device:
        raise ValueError("precision='fp16' needs an accelerator; on a CPU use 'bf16' or 'no'.")
    leave_at_exit()
    return Accelerator(
        cpu=no_device,
        mixed_precision=config.precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.accumulate, sync_with_dataloader=False
        ),
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=config.seed),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=config.find_unused)],
    )


class Assembly:
    """`model` is what training calls, `inner` the user's own module inside of it.

    Sharded models have a `whole` twin on the first process, on the CPU: what is saved goes through it.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, accelerator: Any):
        self.inner, self.config, self.accelerator = model, config, accelerator
        self.whole: nn.Module | None = None
        self.learner: StructureLearner | None = None
        self._modes, self._forward = modes_of(model), model.__dict__.get("forward")
        self._frozen: list[nn.Parameter] = []
        self._layout: ChannelsLast | None = None
        if config.cuda_graphs and (accelerator.device.type != "cuda" or accelerator.num_processes > 1):
            raise ValueError("`cuda_graphs` is for one process with a CUDA device; train without it here.")
        try:
            self._put_together()
        except BaseException:
            self.release()
            raise

    def _put_together(self) -> None:
        model, config, accelerator = self.inner, self.config, self.accelerator
        gaudi = [module for module in model.modules() if isinstance(module, GaudiModule)]
        if config.budget is None:  # nothing would keep the cost
            self._frozen = [p for module in gaudi for p in module.structure_parameters() if p.requires_grad]
            for parameter in self._frozen:
                parameter.requires_grad_(False)
        if not model.training:  # else parts in evaluation mode are meant to be: batch norms with fixed statistics
            model.train()
        model.to(accelerator.device)
        if config.channels_last:
            self._layout = ChannelsLast(model)
        if self.is_sharded:
            if accelerator.is_main_process:
                self.whole = copy.deepcopy(model).cpu()
            shard_(model)
        if config.compile:
            model.compile()
        self.model: nn.Module = accelerator.prepare_model(model, evaluation_mode=self.is_sharded)
        groups = param_groups(model, config.lr, config.structure_lr, config.weight_decay)
        for group in groups:
            group["initial_lr"] = group["lr"]
        self._clipped = [p for group in groups if group["name"] != "structure" for p in group["params"]]
        how = {"fused": True, "capturable": True} if config.cuda_graphs else {}
        self.optimizer: Any = accelerator.prepare_optimizer(torch.optim.AdamW(groups, betas=config.betas, **how))
        self.average = None if config.ema is None else Average(model, config.ema)

    @property
    def is_sharded(self) -> bool:
        return self.accelerator.num_processes > 1 and _parallel(self.config) == "fsdp"

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    def start_learner(self, total_steps: int, example_inputs: Any) -> None:
        """After the optimizer's state is restored: restoring runs a step, which must not count."""
        config = self.config
        if config.budget is not None and any(isinstance(module, GaudiModule) for module in self.inner.modules()):
            self.learner = StructureLearner(
                self.inner, self.bare_optimizer, config.budget, config.sigma, total_steps, example_inputs
            )

    @property
    def structure_is_done(self) -> bool:
        """Whether the model, hardened now, would meet the budget; always so without one."""
        return self.learner is None or self.learner.is_done

    def settle_rates(self) -> None:
        """After the optimizer's state is restored: a captured step reads its rates from the device."""
        if self.config.cuda_graphs:
            for group in self.bare_optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.accelerator.device)

    def step(self) -> None:
        """Clips, steps and clears; the learner hangs on the optimizer's step."""
        if self.config.clip_norm is not None:
            self.accelerator.unscale_gradients(self.optimizer)
            clip_(self._clipped, self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update_average(self, number: int) -> None:
        """After step `number`."""
        if self.average is not None and not self.optimizer.step_was_skipped:
            self.average.update(number)

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """The model as evaluation and users shall see it: with averaged weights, if there are any."""
        with self.average.applied() if self.average else nullcontext():
            yield self.inner

    def release(self) -> None:
        """Gives the user's module back without what Accelerate and the compiler hung on it."""
        if self.learner is not None:
            self.learner.remove()
        self.inner.__dict__.pop("_is_accelerate_prepared", None)
        if self.inner.__dict__.pop("_original_forward", None) is not None:  # autocast is around it
            del self.inner.forward
            if self._forward is not None:  # one that the user gave to the instance
                self.inner.forward = self._forward
        if self.config.compile:
            self.inner._compiled_call_impl = None
        if self._layout is not None:
            self._layout.undo()
        restore_modes(self._modes)
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        if self.accelerator.device.type != "cpu":  # optimizer states would stay on the device until python cleans up
            self.accelerator.free_memory()


class ChannelsLast:
    """Keeps a model's images, and the weights of its convolutions, in the layout that vector lanes and matrix units
    read. Structured convolutions compose theirs at each call, and follow the images.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._lay_out(torch.channels_last)
        self._hook = model.register_forward_pre_hook(_images_channels_last, with_kwargs=True)

    def undo(self) -> None:
        self._hook.remove()
        self._lay_out(torch.contiguous_format)

    def _lay_out(self, memory_format: torch.memory_format) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=memory_format)  # type: ignore[call-overload]


def _images_channels_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def laid_out(value: Any) -> Any:
        is_images = isinstance(value, torch.Tensor) and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if is_images else value

    return tuple(map(laid_out, args)), {name: laid_out(value) for name, value in kwargs.items()}


def clip_(parameters: list[nn.Parameter], max_norm: float) -> None:
    """Gradients scaled to at most that norm over all of them and all processes; nothing waits for a device."""
    norm: Any = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()  # of sharded gradients
    clip_grads_with_norm_(parameters, max_norm, norm)


def _parallel(config: TrainConfig) -> Parallel:
    if config.parallel is not None:
        return config.parallel
    asked: Any = os.environ.get("GBLR_PARALLEL", "ddp")
    check_choice("GBLR_PARALLEL", asked, Parallel)
    return asked
