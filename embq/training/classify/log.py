"""log.jsonl and the progress line of a training, and the sums behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from embq.core.service.progress_line import ProgressLine, duration
from embq.training.classify.checkpoint import Folder, Moment
from embq.training.classify.inputs import Schedule
from embq.training.classify.process_group import GroupMember
from embq.training.classify.validation import Measured
from embq.training.run.journal import Journal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class StepMeter:
    """Sums over steps of one process, without waiting for the device.

    Attributes:
        loss: of all samples; a tensor of the device.
        right: correct predictions; a tensor of the device.
        samples: of all steps.
        steps: number of steps.
        data_s: seconds of waiting for batches.
        batch_s: seconds in all.
    """

    loss: Tensor | float = 0.0
    right: Tensor | int = 0
    samples: int = 0
    steps: int = 0
    data_s: float = 0.0
    batch_s: float = 0.0

    def add(self, loss: Tensor, right: Tensor, samples: int) -> None:
        """Add a step: its mean loss and its correct predictions, which the device may still be computing."""
        # In float64, so that a sum read for a checkpoint continues exactly.
        self.loss = self.loss + loss.double() * samples
        self.right = self.right + right
        self.samples += samples
        self.steps += 1

    def timed(self, data_s: float, batch_s: float) -> None:
        """Add the seconds of a step."""
        self.data_s += data_s
        self.batch_s += batch_s

    @property
    def mean_loss(self) -> float:
        """Mean over samples; waits for the device."""
        return float(self.loss) / max(1, self.samples)

    @property
    def accuracy(self) -> float:
        """Part of the samples that was predicted correctly; waits for the device."""
        return int(self.right) / max(1, self.samples)

    @property
    def samples_per_s(self) -> float:
        """Rate of this process."""
        return self.samples / self.batch_s if self.batch_s else 0.0

    def state(self) -> dict[str, Any]:
        """The fields for a checkpoint; waits for the device."""
        return asdict(replace(self, loss=float(self.loss), right=int(self.right)))


class TrainingLog:
    """The log of a training. Loss and accuracy of steps are those of the leading process's own batches.

    Args:
        folder: of the training.
        member: the process that leads.
        schedule: has the number of steps.
        since: first step that is made; lines of it and of later ones are removed.
    """

    def __init__(self, folder: Folder, member: GroupMember, schedule: Schedule, since: Moment) -> None:
        self._journal = Journal(folder.log)
        self._journal.cut(since.epoch, since.step)
        self._member, self._schedule = member, schedule
        self._line = ProgressLine()
        self._steps = self._validations = 0
        self._steps_s = self._validations_s = 0.0

    def note(self, text: str) -> None:
        """Print a sentence."""
        self._line.say(text)

    def train(self, moment: Moment, meter: StepMeter, lr: float) -> None:
        """A line for the steps up to this one."""
        self._steps += meter.steps
        self._steps_s += meter.batch_s
        rate = meter.samples_per_s
        self._add(
            "train",
            moment,
            {
                "samples": meter.samples,
                "loss": meter.mean_loss,
                "accuracy": meter.accuracy,
                "lr": lr,
                "samples_per_s": round(rate, 2),
                "data_s": round(meter.data_s / max(1, meter.steps), 6),
                "batch_s": round(meter.batch_s / max(1, meter.steps), 6),
            },
        )
        world = self._member.world
        together = f" ({world} processes {rate * world:,.0f})" if world > 1 else ""
        self._line.show(
            f"{self._of(moment.epoch)}  step {moment.step + 1}/{self._schedule.epoch_steps}  "
            f"loss {meter.mean_loss:.3f}  accuracy {meter.accuracy:.1%}  lr {lr:.3g}  {rate:,.0f} samples/s{together}  "
            f"{meter.data_s / max(meter.batch_s, 1e-9):.0%} waiting for data  {self._time_left(moment)}"
        )

    def _of(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._schedule.epochs}"

    def _time_left(self, moment: Moment) -> str:
        """Time left by the mean step since the start, and the mean validation for each epoch."""
        steps_left = self._schedule.steps - moment.epoch * self._schedule.epoch_steps - moment.step - 1
        validations_s = self._validations_s / max(1, self._validations) * (self._schedule.epochs - moment.epoch)
        return f"about {duration(max(0.0, steps_left * self._steps_s / max(1, self._steps) + validations_s))} left"

    def epoch(self, end: Moment, *, samples: int, failed: int, seconds: float, samples_per_s: float) -> None:
        """A line for an epoch; `end` is behind its last step."""
        fields = {"samples": samples, "failed": failed, "seconds": seconds, "samples_per_s": samples_per_s}
        self._add("epoch", end, fields)
        self._line.say(
            f"{self._of(end.epoch)}: {samples:,} samples in {duration(seconds)}, {samples_per_s:,.0f} samples/s"
            + (f" of {self._member.world} processes" if self._member.world > 1 else "")
            + (f", {failed:,} failed" if failed else "")
        )

    def validating(self, epoch: int, expected: int | None, samples: int) -> None:
        """Show progress of a validation: samples of this process so far, and those expected, if known."""
        total = f" of about {expected:,}" if expected else ""
        self._line.show(f"{self._of(epoch)}: validation, {samples:,}{total} samples")

    def validation(self, end: Moment, measured: Measured, seconds: float) -> None:
        """A line for a validation."""
        self._validations_s += seconds
        self._validations += 1
        self._add(
            "validation",
            end,
            {
                "loss": measured.loss,
                "top1": measured.top1,
                "top5": measured.top5,
                "samples": measured.samples,
                "failed": measured.failed,
                "seconds": round(seconds, 3),
            },
        )
        self._line.say(
            f"{self._of(end.epoch)}: validation loss {measured.loss:.3f}, "
            f"top-1 {measured.top1:.1%}, top-5 {measured.top5:.1%} of {measured.samples:,} samples"
        )

    def _add(self, kind: str, moment: Moment, fields: Mapping[str, Any]) -> None:
        self._journal.add(moment.epoch, moment.step, {"kind": kind, **fields})

    def sync(self) -> None:
        """Make the log durable."""
        self._journal.sync()

    def close(self) -> None:
        """Close the file."""
        self._journal.close()
