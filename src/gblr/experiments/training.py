"""A run in progress: epochs on data that lies on the device, a state that can be saved between any two of them."""

import random
import time
from typing import Any

import torch
from torch import Tensor, nn

from gblr.experiments.datasets import Batches, Task
from gblr.experiments.run import Run
from gblr.experiments.step import GraphAdamW, Step, Teacher, lr_share, made_fast_, uncompiled
from gblr.training.learner import StructureLearner
from gblr.training.mixing import draw_mix, mix_inputs, mix_targets
from gblr.training.param_groups import param_groups

CURVE = ("epoch", "train_loss", "test_accuracy", "relative_cost", "live_blocks", "sigma")


class Training:
    """`target` is what the converted layers may cost at the end; `eager` does without compilation and CUDA graphs.
    `dense` is the network that a distilled run aims at.
    """

    def __init__(
        self, model: nn.Module, run: Run, task: Task, target: float, eager: bool = False, dense: nn.Module | None = None
    ):
        self.model, self.run, self.task = model, run, task
        device = torch.device(task.device)
        self.batches: Batches = task.training(run)
        self.total = run.epochs * len(self.batches)
        on_gpu = device.type == "cuda"
        captured = on_gpu and not eager
        for network in filter(None, (model, dense)):
            made_fast_(network, compiled=captured)
        self.optimizer = GraphAdamW(param_groups(model, run.lr, run.structure_lr, run.weight_decay), device)
        self.learner: StructureLearner | None = None
        if run.method == "gaudi" and self.total:
            goal = run.learned_to(target)
            self.learner = StructureLearner(model, self.optimizer, goal, run.sigma_schedule, self.total)
        teacher = None if dense is None else Teacher(dense.eval(), run.distilled)
        self.step = Step(model, self.optimizer, on_gpu, run.smoothing, run.clip, captured, teacher)
        self.epoch, self.seconds = 0, 0.0
        self.curve: dict[str, list[Any]] = {name: [] for name in CURVE}

    @property
    def done(self) -> bool:
        return self.epoch >= self.run.epochs

    def train_epoch(self) -> str:
        """One epoch, and a line that says how it went."""
        begin = time.perf_counter()
        run, losses = self.run, torch.zeros((), device=self.task.device)
        torch.manual_seed(run.seed * 1000 + self.epoch)  # left-out branches; so that a resumed run draws alike
        rng = random.Random(run.seed * 1000 + self.epoch)
        self.model.train()
        self.batches.set_epoch(self.epoch)
        for i, (x, labels) in enumerate(self.batches):
            done = self.epoch * len(self.batches) + i
            self.optimizer.set_share(lr_share(done, self.total, run.warmup_epochs * len(self.batches)))
            losses += self.step(*mixed(x, labels, self.task.num_classes, run, rng))
        self.epoch += 1
        loss = float(losses) / len(self.batches)
        self.seconds += time.perf_counter() - begin
        return self._note(loss)

    def _note(self, loss: float) -> str:
        run, found = self.run, self.learner.metrics() if self.learner else {}
        accuracy = None
        if self.epoch % run.eval_every == 0 or self.done:
            accuracy = judge(self.model, self.task.judging(self.task.test))["accuracy"]
        values = (self.epoch, loss, accuracy, *(found.get(key) for key in CURVE[3:]))
        for name, value in zip(CURVE, values, strict=True):
            self.curve[name].append(value)
        told = [f"epoch {self.epoch}/{run.epochs}", f"loss {loss:.3f}", f"{self.seconds / self.epoch:.1f} s/epoch"]
        told += [f"accuracy {accuracy:.2f}"] if accuracy is not None else []
        return ", ".join(told + ([f"cost {found['relative_cost']:.3f}"] if found else []))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "seconds": self.seconds,
            "curve": self.curve,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.seconds, self.curve = state["epoch"], state["seconds"], state["curve"]


def mixed(x: Tensor, labels: Tensor, num_classes: int, run: Run, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Mixup or cutmix for a share of the batches; classes as shares."""
    if run.mixup + run.cutmix == 0 or rng.random() >= run.mixed_share:
        return x, nn.functional.one_hot(labels, num_classes).float()
    mix = draw_mix(run.mixup, run.cutmix, x.shape[-2], x.shape[-1], rng)
    return mix_inputs(x, mix), mix_targets(labels, num_classes, mix)


@torch.no_grad()
def judge(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Accuracy in percent and mean cross-entropy of plain images, by the model as it is."""
    model.eval()
    right = loss = 0.0
    count = 0
    with uncompiled(model):
        for x, labels in batches:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
                scores = model(x)
            right += int((scores.argmax(1) == labels).sum())
            loss += float(nn.functional.cross_entropy(scores.float(), labels, reduction="sum"))
            count += len(labels)
    return {"accuracy": 100 * right / count, "loss": loss / count}
