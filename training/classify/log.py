"""What a training tells while it goes on: log.jsonl, and a line on the terminal. Only the process that leads tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.service.progress_line import ProgressLine, duration
from training.classify.checkpoint import Moment
from training.classify.plan import Schedule
from training.classify.process_group import Member
from training.classify.validation import Measured
from training.run.folder import Folder
from training.run.journal import Journal

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


class Log:
    """Lines of a training. Loss and accuracy of steps are those of this process's own batches.

    Args:
        folder: of the training.
        member: whose log it is.
        schedule: says how much is left.
        since: the first step that is made; lines of it and of later ones are taken back.
    """

    def __init__(self, folder: Folder, member: Member, schedule: Schedule, since: Moment) -> None:
        self._journal = Journal(folder.log)
        self._journal.cut(since.epoch, since.step)
        self._member = member
        self._schedule = schedule
        self._line = ProgressLine()
        self._made = self._validations = 0
        self._made_s = self._validations_s = 0.0

    def say(self, text: str) -> None:
        """A sentence for whoever watches."""
        self._line.say(text)

    def train(self, moment: Moment, meter: Meter, lr: float) -> None:
        """The steps up to this one, whose line it is."""
        self._made += meter.steps
        self._made_s += meter.batch_s
        rate = meter.samples_per_s
        self._journal.add(
            moment.epoch,
            moment.step,
            {
                "kind": "train",
                "samples": meter.samples,
                "loss": meter.loss,
                "accuracy": meter.accuracy,
                "lr": lr,
                "samples_per_s": round(rate, 2),
                "data_s": round(meter.data_s / max(1, meter.steps), 6),
                "batch_s": round(meter.batch_s / max(1, meter.steps), 6),
            },
        )
        schedule, world = self._schedule, self._member.world
        together = f" ({world} processes {rate * world:,.0f})" if world > 1 else ""
        self._line.show(
            f"epoch {moment.epoch + 1}/{schedule.epochs}  step {moment.step + 1}/{schedule.epoch_steps}  "
            f"loss {meter.loss:.3f}  accuracy {meter.accuracy:.1%}  lr {lr:.3g}  {rate:,.0f} samples/s{together}  "
            f"{meter.data_s / max(meter.batch_s, 1e-9):.0%} waiting for data  {self._left(moment)}"
        )

    def _left(self, moment: Moment) -> str:
        """By the mean time of a step since the start; what validation took is expected again after each epoch."""
        left = self._schedule.steps - moment.epoch * self._schedule.epoch_steps - moment.step - 1
        again = self._validations_s / max(1, self._validations) * (self._schedule.epochs - moment.epoch)
        return f"about {duration(max(0.0, left * self._made_s / max(1, self._made) + again))} left"

    def epoch(self, moment: Moment, said: dict[str, Any]) -> None:
        """An epoch is over; `moment` is behind its last step."""
        self._journal.add(moment.epoch, moment.step, {"kind": "epoch", **said})
        self._line.say(
            f"epoch {moment.epoch + 1}/{self._schedule.epochs}: {said['samples']:,} samples in "
            f"{duration(said['seconds'])}, {said['samples_per_s']:,.0f} samples/s"
            + (f" of {self._member.world} processes" if self._member.world > 1 else "")
            + (f", {said['failed']:,} failed" if said["failed"] else "")
        )

    def validating(self, epoch: int, of: int | None, samples: int) -> None:
        """So many samples of this process are measured; of about so many, where that is known."""
        part = "" if not of else f" of about {of:,}"
        self._line.show(f"epoch {epoch + 1}/{self._schedule.epochs}: validation, {samples:,}{part} samples")

    def validation(self, moment: Moment, measured: Measured, seconds: float) -> None:
        """The model was measured after an epoch."""
        self._validations_s += seconds
        self._validations += 1
        self._journal.add(
            moment.epoch,
            moment.step,
            {
                "kind": "validation",
                "loss": measured.loss,
                "top1": measured.top1,
                "top5": measured.top5,
                "samples": measured.samples,
                "failed": measured.failed,
                "seconds": round(seconds, 3),
            },
        )
        self._line.say(
            f"epoch {moment.epoch + 1}/{self._schedule.epochs}: validation loss {measured.loss:.3f}, "
            f"top-1 {measured.top1:.1%}, top-5 {measured.top5:.1%} of {measured.samples:,} samples"
        )

    def sync(self) -> None:
        """Make the log as durable as a checkpoint of this moment."""
        self._journal.sync()

    def close(self) -> None:
        """Write no more."""
        self._journal.close()
