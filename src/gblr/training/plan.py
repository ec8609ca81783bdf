"""Which step of a run does what besides stepping."""

import math
from dataclasses import dataclass

from gblr.training.train_config import TrainConfig

_LOOK_EVERY = 10  # steps: looking waits for the device and for the other processes, not looking makes Ctrl-C late


@dataclass(frozen=True)
class Plan:
    """All in optimizer steps. What is planned for every n steps is also done in the last one."""

    total_steps: int
    steps_per_epoch: int
    eval_steps: int
    checkpoint_steps: int

    @classmethod
    def of(cls, config: TrainConfig, num_batches: int) -> "Plan":
        steps = num_batches // config.accumulate
        if steps == 0:
            raise ValueError(
                f"an epoch has {num_batches} batches, too few for one step: `accumulate` is {config.accumulate}."
            )
        return cls(
            total_steps=config.max_steps or max(1, round(config.epochs * steps)),
            steps_per_epoch=steps,
            eval_steps=max(1, round(config.eval_every * steps)),
            checkpoint_steps=max(1, round(config.checkpoint_every * steps)),
        )

    def reports(self, step: int) -> bool:
        return self._is_due(step, self.eval_steps)

    def saves(self, step: int) -> bool:
        return self._is_due(step, self.checkpoint_steps)

    def looks(self, step: int) -> bool:
        return self._is_due(step, min(_LOOK_EVERY, math.ceil(self.total_steps / 100)))

    def _is_due(self, step: int, every: int) -> bool:
        return (step + 1) % every == 0 or step + 1 == self.total_steps
