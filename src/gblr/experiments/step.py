"""One training step as experiments make it: compiled blocks, bf16 and, on a GPU, one captured CUDA graph."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gblr.training.divergence import divergence


class GraphAdamW(torch.optim.AdamW):
    """AdamW whose learning rates are tensors, so that a captured step reads what `set_share` writes."""

    def __init__(self, groups: list[dict[str, Any]], device: torch.device):
        self.rates = [torch.tensor(group["lr"], device=device) for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate.clone()
        on_gpu = device.type == "cuda"
        super().__init__(groups, fused=on_gpu, capturable=on_gpu)

    def set_share(self, share: float) -> None:
        """Every rate at that share of its full one."""
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            group["lr"].copy_(rate * share)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = rate.clone()  # where the parameters are, whatever device the state was read to


@dataclass(frozen=True)
class Teacher:
    """A trained network whose outputs a share of the loss aims at, the rest at the labels."""

    model: nn.Module
    share: float
    temperature: float = 4.0

    def mixed_in(self, loss: Tensor, scores: Tensor, x: Tensor) -> Tensor:
        """Of the labels' loss and the divergence from the network's outputs."""
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            aims = self.model(x)
        return (1 - self.share) * loss + self.share * divergence(scores, aims, self.temperature)


class Step:
    """One training step; on a GPU it is captured once as a CUDA graph, proximal step and sigma included."""

    _EAGER = 3  # steps before the capture: the optimizer's state and the kernels must exist by then

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        on_gpu: bool,
        smoothing: float = 0.1,
        clip: float = 1.0,
        captured: bool | None = None,
        teacher: Teacher | None = None,
    ):
        self.teacher = teacher
        self.model, self.optimizer, self.on_gpu = model, optimizer, on_gpu
        self.smoothing, self.clip = smoothing, clip
        self.captured = on_gpu if captured is None else captured
        self.clipped = [p for group in optimizer.param_groups if group["name"] != "structure" for p in group["params"]]
        self.calls = 0
        self.graph: Any = None

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss, in a tensor that the next call overwrites."""
        self.calls += 1
        if not self.captured:
            return self._step(x, target)
        if self.graph is None and self.calls <= self._EAGER:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self._step(x, target)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if self.graph is None:
            self.x, self.target = x.clone(), target.clone()
            self.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self._step(self.x, self.target)
        self.x.copy_(x)
        self.target.copy_(target)
        self.graph.replay()
        return self.loss

    def _step(self, x: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.on_gpu, cache_enabled=False):
            scores = self.model(x)
        loss = nn.functional.cross_entropy(scores.float(), target, label_smoothing=self.smoothing)
        if self.teacher is not None:
            loss = self.teacher.mixed_in(loss, scores, x)
        loss.backward()
        nn.utils.clip_grad_norm_(self.clipped, self.clip, foreach=True)
        self.optimizer.step()
        return loss.detach()


def lr_share(step: int, total: int, warmup: float) -> float:
    """Linear warm-up, then a cosine to a thousandth."""
    if step < warmup:
        return (step + 1) / warmup
    return max(1e-3, 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, total - warmup))))


def made_fast_(model: nn.Module, compiled: bool) -> None:
    """Compiles each of `model.blocks`, all alike, so that one graph serves them. A network without is one of
    convolutions: it computes in the layout that matrix units and vector lanes read, and no kernel has to turn every
    image round (ResNet-20 on two CPU cores: 72 s an epoch in place of 125).
    """
    if not _blocks(model):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif compiled:
        for block in _blocks(model):
            block.compile()


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Calls inside run eagerly: another batch size, or hardened layers that are all unlike, would compile for
    longer than they save.
    """
    kept = [(block, block._compiled_call_impl) for block in _blocks(model)]
    for block, _ in kept:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in kept:
            block._compiled_call_impl = call


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks = getattr(model, "blocks", ())
    return list(blocks) if isinstance(blocks, Iterable) else []
