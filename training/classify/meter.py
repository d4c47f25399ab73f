"""Loss, accuracy and times, added up over steps without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Meter:
    """Adds up what one process's steps were like, since it was last emptied.

    Attributes:
        samples: of all steps.
        steps: how many.
        data_s: seconds of waiting for batches.
        batch_s: seconds in all, that waiting included.
    """

    def __init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        """Begin anew."""
        self._loss: Tensor | float = 0.0
        self._right: Tensor | int = 0
        self.samples = self.steps = 0
        self.data_s = self.batch_s = 0.0

    def add(self, loss: Tensor, right: Tensor, samples: int) -> None:
        """A step: mean loss, and how many were told right; both may still be in the making on the device."""
        # In float64, so that a sum that was read in between, for a checkpoint, goes on exactly.
        self._loss = self._loss + loss.double() * samples
        self._right = self._right + right
        self.samples += samples
        self.steps += 1

    def timed(self, data_s: float, batch_s: float) -> None:
        """What the step took."""
        self.data_s += data_s
        self.batch_s += batch_s

    @property
    def loss(self) -> float:
        """Mean over samples; waits for the device."""
        return float(self._loss) / max(1, self.samples)

    @property
    def accuracy(self) -> float:
        """Part of the samples that was told right; waits for the device."""
        return int(self._right) / max(1, self.samples)

    @property
    def samples_per_s(self) -> float:
        """Of this process."""
        return self.samples / self.batch_s if self.batch_s else 0.0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "loss": float(self._loss),
            "right": int(self._right),
            "samples": self.samples,
            "steps": self.steps,
            "data_s": self.data_s,
            "batch_s": self.batch_s,
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.empty()
        self._loss, self._right = state["loss"], state["right"]
        self.samples, self.steps = state["samples"], state["steps"]
        self.data_s, self.batch_s = state["data_s"], state["batch_s"]
