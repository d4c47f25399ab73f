"""The training loop of a classifier, as each of its processes runs it.

`train` prepares a `Trainer` at the step where the training begins or resumes. For each epoch the trainer makes the
steps, adds up over all processes what became of the samples, writes a checkpoint, and measures the model on the
validation set. A request to stop is answered before the next step, when a checkpoint is written.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from embq.core.errors import InputError, UnwellError
from embq.core.service.stopping import StopFlag
from embq.training.classify.checkpoint import Folder, Moment, Record, found_start, key_journal, save
from embq.training.classify.config import Config
from embq.training.classify.failures import FailureList
from embq.training.classify.inputs import InputPlan, check_spread, planned
from embq.training.classify.learner import (
    Precision,
    agree,
    device_faults,
    joined,
    prepared,
    seed_step,
    share_buffers,
)
from embq.training.classify.log import StepMeter, TrainingLog
from embq.training.classify.models import full_name
from embq.training.classify.process_group import GroupMember, membership
from embq.training.classify.process_group import explained as peer_errors
from embq.training.classify.report import TrainingReport, report_of, write_model
from embq.training.classify.validation import measured
from embq.training.data.batch import Batch
from embq.training.data.epochs import exact_epoch, resampled_epoch, validation_samples
from embq.training.run.journal import lines


class Stopped(KeyboardInterrupt):
    """The training has stopped on request, before `moment`."""

    def __init__(self, moment: Moment) -> None:
        super().__init__()
        self.moment = moment


def train(config: Config) -> TrainingReport | None:
    """Train, or resume a training. Every process calls this; the one that leads gets the report.

    Raises Stopped after SIGTERM or SIGINT, when a checkpoint is written; InputError, ModelError and ConfigError for
    what cannot be trained; UnwellError if another process is gone; OutputError if the folder is full;
    DeviceFullError and DeviceError if the device is full or broken.
    """
    plan = planned(config)
    arch = full_name(config.arch)
    with membership(config.device) as member:
        stop = StopFlag()  # until here there is nothing to keep, and the default handlers end the process at once
        if threading.current_thread() is threading.main_thread():  # Ray calls this in another, and stops by itself
            stop.install()
        precision = Precision.chosen(config.precision, member.device)
        settled = replace(config, arch=arch, precision=precision.name, epoch_samples=plan.epoch_samples)
        folder = Folder(Path(config.out))
        held = folder.locked() if member.leads else nullcontext()
        with held, device_faults(), Trainer(settled, plan, folder, member, precision, stop) as trainer:
            try:
                trainer.run()
            except UnwellError as error:
                # The leading process has stopped on the same request, while this one waited for it.
                if stop() and not member.leads and error.code == "peer_gone":
                    raise Stopped(trainer.start.moment) from error
                raise
            failed = trainer.failures.samples
            return report_of(folder, arch, member.world, trainer.samples, failed) if member.leads else None


class Trainer:
    """One process of a training. Creating it is collective.

    Args:
        config: with everything filled in that was left to be chosen.
        plan: the input.
        folder: the output.
        member: this process.
        precision: of the steps.
        stop: whether the training was asked to stop.

    Attributes:
        start: where the training begins or resumes.
        learner: model and optimiser.
        schedule: learning rates.
        view: this process's part of the shards.
        record: samples that this process has taken.
        keys: journal of --log-keys; None without.
        log: on the process that leads; None elsewhere.
        failures: list of failures.
        meter: sums since the last line of the log.
        samples: samples of finished epochs, of all processes.
    """

    def __init__(
        self, config: Config, plan: InputPlan, folder: Folder, member: GroupMember, precision: Precision, stop: StopFlag
    ) -> None:
        self.config, self.plan, self.folder, self.member = config, plan, folder, member
        self.start = found_start(folder, config, plan, member)
        self.learner, note = prepared(config, len(plan.classes), precision, member, self.start.state)
        self.schedule = plan.schedule(config, member.world)
        self.view = plan.view(config, member)
        since, state = self.start.moment, self.start.state
        self.record = Record(folder.taken(member.rank), since)
        self.keys = key_journal(config, folder, member, since)
        self.log = TrainingLog(folder, member, self.schedule, since) if member.leads else None
        self.failures = FailureList(folder.failures, config.max_failures)
        self.meter = StepMeter()
        self.samples = 0
        if state is not None:
            self.meter = StepMeter(**state["meter"])
            self.samples = state["samples"]
        self._stop = stop
        self._saved_at = time.monotonic()
        for text in (note, self.start.note, check_spread(config, plan, member.world)):
            if text and self.log is not None:
                self.log.note(text)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.record, self.keys, self.log):
            if file is not None:
                file.close()

    def run(self) -> None:
        """Train to the last epoch, and write the model."""
        start = self.start.moment
        if start.step == 0 and start.epoch:
            self._make_up_validation(start.epoch - 1)
        for epoch in range(start.epoch, self.config.epochs):
            end = self._epoch(start if epoch == start.epoch else Moment(epoch=epoch, step=0))
            self._stop_after(end)
            self._validate(end)
            self._stop_after(end)
        if self.member.leads:
            write_model(self.folder, self.config, self.plan, self.view, self.learner.model, self.samples)

    def _epoch(self, begin: Moment) -> Moment:
        """Train an epoch from a moment on, and write a checkpoint; returns the moment behind its last step."""
        self.record.begin(begin)
        position, started = self.record.taken, time.perf_counter()
        exact = self.config.splitshards
        with peer_errors(self.member), joined(self.learner, self.member) if exact else nullcontext():
            steps = self._steps(begin, self._batches(begin.epoch))
        if exact:
            steps = agree(self.learner, self.member, steps)
        else:
            share_buffers(self.learner, self.member)
        end = Moment(epoch=begin.epoch, step=steps)
        self._account(end, new=self.record.taken.samples - position.samples, started=started)
        if self.member.leads:
            self._save(_after(end))
        return end

    def _batches(self, epoch: int) -> Iterator[Batch]:
        shards, taken = self.plan.shards, self.record.taken
        if self.config.splitshards:
            return exact_epoch(shards, self.view, epoch=epoch, taken=taken)
        return resampled_epoch(shards, self.view, epoch=epoch, batches=self.schedule.epoch_steps, taken=taken)

    def _steps(self, begin: Moment, batches: Iterable[Batch]) -> int:
        """Make the steps of an epoch from a moment on; returns the steps of this process in the whole epoch.

        Raises Stopped after a request to stop, when a checkpoint is written; InputError if too many samples fail or
        the loss diverges; UnwellError if another process is gone.
        """
        epoch, step = begin.epoch, begin.step
        iterator = iter(batches)
        started = time.perf_counter()
        while True:
            waited = time.perf_counter()
            batch = next(iterator, None)
            data_s = time.perf_counter() - waited
            if batch is None:
                break
            now = Moment(epoch=epoch, step=step)
            self.record.add(now, batch, last=not len(batch))
            self._check_failures()
            if not len(batch):
                continue
            if self.keys is not None:
                self.keys.add(epoch, step, {"keys": batch.keys})
            lr = self.schedule.lr(epoch, step)
            seed_step(self.config.seed, epoch, step, self.member.rank)
            loss, right = self.learner.step(
                batch.images_on(self.learner.device),
                batch.labels,
                lr=lr,
                before_forward=partial(self._before_step, now, is_first=now == begin),
            )
            self.meter.add(loss, right, len(batch))
            ended = time.perf_counter()
            self.meter.timed(data_s, ended - started)
            started = ended
            step += 1
            if step % self.config.log_every == 0:
                self._log_steps(now, lr)
        if self.meter.steps:
            last = Moment(epoch=epoch, step=max(0, step - 1))
            self._log_steps(last, self.schedule.lr(epoch, last.step))
        self.record.end(Moment(epoch=epoch, step=step))
        return step

    def _before_step(self, now: Moment, *, is_first: bool) -> None:
        """Stop, or write a checkpoint, just before a step, when all processes have the same state.

        Args:
            is_first: whether no step was made since the training began or resumed.
        """
        if self._stop():
            if self.member.leads:
                self._save(now)
                self.member.say_stopped()
                raise Stopped(now)
            if self.member.leader_stopped():
                raise Stopped(now)
        due = time.monotonic() - self._saved_at >= 60 * self.config.checkpoint_minutes
        if due and self.member.leads and not is_first:
            self._save(now)

    def _save(self, moment: Moment) -> None:
        """Write a checkpoint; `moment` is the next step."""
        if self.log is not None:
            self.log.sync()
        position: dict[str, Any] = {"meter": self.meter.state(), "samples": self.samples}
        save(self.folder.checkpoints, moment, {**self.learner.state(), **position})
        self._saved_at = time.monotonic()

    def _log_steps(self, end: Moment, lr: float) -> None:
        """Log the steps up to `end`; InputError if their loss is not finite."""
        loss = self.meter.mean_loss
        if not math.isfinite(loss):
            raise InputError(
                f"the loss at epoch {end.epoch + 1}, step {end.step} is {loss}: the weights have grown beyond all "
                "bounds",
                next_step="train anew into another --output with a lower --lr, --warmup-steps, --clip 1, or "
                "--precision fp32",
                code="diverged",
            )
        if self.log is not None:
            self.log.train(end, self.meter, lr)
        self.meter = StepMeter()

    def _check_failures(self) -> None:
        """InputError as soon as this process alone has more failures than the epoch may have."""
        failed = self.record.failed
        lost = sum(failure.samples for failure in failed)
        if self.failures.exceeds(lost, self.plan.epoch_samples):
            self.failures.add(failed)
        self.failures.check(failed, lost, self.plan.epoch_samples)

    def _account(self, end: Moment, *, new: int, started: float) -> None:
        """Add up the samples of an epoch over all processes.

        Args:
            new: samples of this process since the training began or resumed.
            started: clock at that time.

        Raises InputError if too many samples failed, or some are missing from an exact epoch.
        """
        taken = self.record.taken
        samples, failed, new = (int(n) for n in self.member.totals([taken.samples, taken.failed, new]))
        self._check_all(self.record.failed, failed, self.plan.epoch_samples)
        expected = self.plan.shards.samples
        if self.config.splitshards and expected is not None and samples + failed != expected:
            raise InputError(
                f"epoch {end.epoch + 1} had {samples} samples and {failed} failures, and sizes.json says {expected}",
                next_step="compare sizes.json with the shards: `embq shards verify`",
                code="epoch_incomplete",
            )
        self.samples += samples
        seconds = time.perf_counter() - started
        if self.log is not None:
            rate = round(new / seconds, 2)
            self.log.epoch(end, samples=samples, failed=failed, seconds=round(seconds, 3), samples_per_s=rate)

    def _check_all(self, own: Iterable[Any], failed: int, samples: int, of: str = "an epoch") -> None:
        """List the failures of all processes; InputError if they are too many. Collective."""
        failures = [failure for per_process in self.member.gathered(list(own)) for failure in per_process]
        if self.member.leads:
            self.failures.add(failures)
        self.failures.check(failures, failed, samples, of)

    def _stop_after(self, end: Moment) -> None:
        """Stop between epochs, if there is a checkpoint already. Collective."""
        (must_stop,) = self.member.totals([self._must_stop])
        if must_stop:
            raise Stopped(_after(end))

    @property
    def _must_stop(self) -> bool:
        """True if this process leads, and was asked to stop."""
        return self.member.leads and self._stop()

    def _make_up_validation(self, epoch: int) -> None:
        """Validate after a finished epoch whose validation was interrupted."""
        logged = {line["kind"]: line["step"] for line in lines(self.folder.log) if line["epoch"] == epoch}
        done, steps = self.member.from_rank(0, ("validation" in logged, logged.get("epoch", 0)))
        if not done:
            self._validate(Moment(epoch=epoch, step=steps))

    def _validate(self, end: Moment) -> None:
        """Measure the model after an epoch, if there is a validation set."""
        shards = self.plan.validation
        if shards is None:
            return
        started = time.perf_counter()
        expected = shards.samples and -(-shards.samples // self.member.world)
        progress = partial(self.log.validating, end.epoch, expected) if self.log is not None else None
        batches = self._side_by_side(validation_samples(shards, self.view), end)
        result = measured(self.learner, self.member, batches, progress)
        self._check_all(result.failures, result.failed, result.samples + result.failed, "the validation")
        result.check(shards.samples, self.folder.failures)
        if self.log is not None:
            self.log.validation(end, result, time.perf_counter() - started)

    def _side_by_side(self, batches: Iterable[Batch], end: Moment) -> Iterator[Batch]:
        """This process's batches, in step with the other processes.

        So a process without batches waits for one batch of the others at a time, and not for all of them, which may
        take longer than `process_group.TIMEOUT`. Raises Stopped in all processes on a request to stop.
        """
        own = iter(batches)
        while True:
            batch = next(own, None)
            having, must_stop = self.member.totals([batch is not None, self._must_stop])
            if must_stop:
                raise Stopped(_after(end))
            if batch is not None:
                yield batch
            if not having:
                return


def _after(end: Moment) -> Moment:
    """The first step of the next epoch."""
    return Moment(epoch=end.epoch + 1, step=0)
