"""The learning rate of a step: rises in a line, then falls as half a cosine (SGDR, arXiv:1608.03983, without restarts).

It follows from the step alone, so nothing of it has to be kept in a checkpoint, or agreed on between processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When the learning rate is how high.

    Attributes:
        highest: reached at the end of the warm-up.
        warmup: steps that it takes.
        epoch_steps: steps of one epoch; in an exact epoch of unequal parts, those of a process with a mean part.
        epochs: of the training.
    """

    highest: float
    warmup: int
    epoch_steps: int
    epochs: int

    @property
    def steps(self) -> int:
        """Of the training."""
        return self.epochs * self.epoch_steps

    def lr(self, epoch: int, step: int) -> float:
        """The learning rate of a step, both counted from 0; steps beyond `epoch_steps` keep that of the last."""
        done = epoch * self.epoch_steps + min(step, self.epoch_steps - 1)
        if done < self.warmup:
            return self.highest * (done + 1) / self.warmup
        part = (done - self.warmup) / max(1, self.steps - self.warmup)
        return self.highest * 0.5 * (1 + math.cos(math.pi * part))
