"""All that one process of a training works with, from its first step to its last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from training.classify.checkpoint import Moment, save
from training.classify.config import Config
from training.classify.failures import FailureList, check_limit
from training.classify.folder import Folder
from training.classify.group import Member
from training.classify.journal import Journal
from training.classify.learner import Learner
from training.classify.log import Log
from training.classify.meter import Meter
from training.classify.plan import Plan
from training.classify.record import Record
from training.classify.schedule import Schedule

if TYPE_CHECKING:
    from training.data.view import View


class Stopped(KeyboardInterrupt):
    """The training was asked to stop, and has, before `moment`."""

    def __init__(self, moment: Moment) -> None:
        super().__init__()
        self.moment = moment


@dataclass(slots=True, kw_only=True)
class Training:
    """One process's part.

    Attributes:
        config: with everything filled in.
        plan: what is read.
        folder: where it is written.
        member: which process this is.
        view: what it takes of the shards.
        schedule: learning rates.
        learner: model and optimiser.
        record: what was taken.
        keys: what was trained on, with --log-keys.
        log: of the process that leads; None elsewhere.
        failures: of the process that leads.
        stop: whether somebody asked to stop.
        meter: since the last line of the log.
        samples: that all processes trained on, in the epochs that are over.
        kept_at: monotonic seconds of the last checkpoint.
    """

    config: Config
    plan: Plan
    folder: Folder
    member: Member
    view: View
    schedule: Schedule
    learner: Learner
    record: Record
    keys: Journal | None
    log: Log | None
    failures: FailureList
    stop: Callable[[], bool]
    meter: Meter = field(default_factory=Meter)
    samples: int = 0
    kept_at: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for written in (self.record, self.keys, self.log):
            if written is not None:
                written.close()

    def keeping_is_due(self) -> bool:
        """Whether the last checkpoint is as old as the next one may be, by this process's own clock."""
        return time.monotonic() - self.kept_at >= 60 * self.config.checkpoint_minutes

    def keep(self, moment: Moment) -> None:
        """Write a checkpoint; `moment` is that of the step that comes next."""
        if self.log is not None:
            self.log.sync()
        save(self.folder.checkpoints, moment, {**self.learner.state(), **self._position()})
        self.kept_at = time.monotonic()

    def _position(self) -> dict[str, Any]:
        return {"meter": self.meter.state(), "samples": self.samples}

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what `keep` wrote, but for the weights."""
        self.meter.take(state["meter"])
        self.samples = state["samples"]

    def tell_steps(self, made: Moment, lr: float) -> None:
        """A line of the log, and a new account for the next one."""
        if self.log is not None:
            self.log.train(made, self.meter, lr)
        self.meter.empty()

    def check_failures(self) -> None:
        """InputError as soon as this process alone has more failures than the epoch may have."""
        failed = self.record.failed
        lost = sum(failure.samples for failure in failed)
        if lost > self.config.max_failures * self.plan.epoch_samples:
            self.failures.add(failed)
        check_limit(failed, lost, self.plan.epoch_samples, self.config.max_failures, self.folder.failures)
