"""A training from its flags to its model, in each of its processes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from core.errors import InputError, UnwellError
from core.service.stopping import StopFlag
from training.classify.checkpoint import Moment, Record, Start, found_start, past, save
from training.classify.config import Config
from training.classify.failures import FailureList, check_limit
from training.classify.learner import (
    Learner,
    Precision,
    agree,
    device_faults,
    joined,
    seed_step,
    share_buffers,
    share_optimizer,
)
from training.classify.log import Log, Meter
from training.classify.models import built, full_name, load_weights
from training.classify.plan import Plan, Schedule, check_spread, planned
from training.classify.process_group import Member, explained, membership
from training.classify.report import Report, finish, report_of
from training.classify.validation import Measured, measured
from training.run.folder import Folder
from training.run.journal import Journal, lines

if TYPE_CHECKING:
    from torch import nn

    from training.data.batch import Batch, Taken, View
    from training.shards.shard_set import Shards


def train_epoch(training: Training, batches: Iterable[Batch], begin: Moment) -> int:
    """Make the steps of an epoch from a moment on; gives how many this process has made of it in all.

    Raises Stopped after a request to stop, when what was learnt is in a checkpoint; InputError where too many samples
    fail or the loss is no number any longer; UnwellError where another process is gone.
    """
    exact = training.config.splitshards
    with explained(training.member), joined(training.learner, training.member) if exact else nullcontext():
        return _steps(training, batches, begin)


def _steps(training: Training, batches: Iterable[Batch], begin: Moment) -> int:
    epoch, step = begin.epoch, begin.step
    begun = time.perf_counter()
    for data_s, batch in _timed(batches, time.perf_counter):
        now = Moment(epoch=epoch, step=step)
        if not len(batch):
            training.record.end(now, batch)
            training.check_failures()
            continue
        training.record.add(now, batch)
        training.check_failures()
        if training.keys is not None:
            training.keys.add(epoch, step, {"keys": batch.keys})
        lr = training.schedule.lr(epoch, step)
        seed_step(training.config.seed, epoch, step, training.member.rank)
        at_rest = partial(_at_rest, training, now, new=now != begin)
        images = batch.images_on(training.learner.device)
        loss, right = training.learner.step(images, batch.labels, lr=lr, at_rest=at_rest)
        training.meter.add(loss, right, len(batch))
        step += 1
        ended = time.perf_counter()
        training.meter.timed(data_s, ended - begun)
        begun = ended
        if step % training.config.log_every == 0:
            _tell(training, now, lr)
    if training.meter.steps:
        last = max(0, step - 1)
        _tell(training, Moment(epoch=epoch, step=last), training.schedule.lr(epoch, last))
    training.record.end(Moment(epoch=epoch, step=step), None)
    return step


def _at_rest(training: Training, now: Moment, *, new: bool) -> None:
    """Just before a step, where all processes have the same: keep it, or stop.

    Args:
        new: whether a step was made since the training went on.
    """
    if training.stop():
        if training.member.leads:
            training.keep(now)
            training.member.say_stopped()
            raise Stopped(now)
        if training.member.leader_stopped():
            raise Stopped(now)
    elif new and training.member.leads and training.keeping_is_due():
        training.keep(now)


def _tell(training: Training, made: Moment, lr: float) -> None:
    """A line of the log for the steps up to `made`; InputError where their loss is no number."""
    loss = training.meter.loss
    if math.isfinite(loss):
        training.tell_steps(made, lr)
        return
    raise InputError(
        f"the loss at epoch {made.epoch + 1}, step {made.step} is {loss}: the weights have grown beyond all bounds",
        next_step="train anew into another --out with a lower --lr, with --warmup-steps, with --clip 1, or in "
        "--precision fp32",
        code="diverged",
    )


def _timed(batches: Iterable[Batch], clock: Callable[[], float]) -> Iterator[tuple[float, Batch]]:
    """Each batch with the seconds that were spent waiting for it."""
    iterator = iter(batches)
    while True:
        begun = clock()
        batch = next(iterator, None)
        if batch is None:
            return
        yield clock() - begun, batch


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


def begun(
    config: Config, plan: Plan, folder: Folder, member: Member, precision: Precision, stop: StopFlag
) -> tuple[Training, Start]:
    """A training where it begins or goes on. Each process has to call it.

    Args:
        config: with everything filled in that was left to be chosen.

    Raises InputError where the folder is of another training, ModelError where the architecture cannot be built.
    """
    start = found_start(folder, config, plan, member)
    learner, told = _learner(config, plan, member, precision, start)
    schedule = plan.schedule(config, member.world)
    training = Training(
        config=config,
        plan=plan,
        folder=folder,
        member=member,
        view=_view(config, plan, member),
        schedule=schedule,
        learner=learner,
        record=Record(folder.taken(member.rank), start.moment),
        keys=_keys(config, folder, member, start.moment),
        log=Log(folder, member, schedule, start.moment) if member.leads else None,
        failures=FailureList(folder.failures),
        stop=stop,
    )
    if start.state is not None:
        training.take(start.state)
    for sentence in (told, start.told, check_spread(config, plan, member.world)):
        if sentence and training.log is not None:
            training.log.say(sentence)
    return training, start


def _learner(config: Config, plan: Plan, member: Member, precision: Precision, start: Start) -> tuple[Learner, str]:
    """The model with the weights to go on from, on its device, and a sentence about it."""
    seed_step(config.seed)
    model = built(config.arch, classes=len(plan.classes), image_size=config.image_size)
    told = f"{config.arch}: {sum(p.numel() for p in model.parameters()):,} weights, {len(plan.classes):,} classes, "
    told += f"{precision.name} on {member.world} x {member.device.type}"
    if start.state is not None:
        model.load_state_dict(start.state["model"])
    elif config.start and member.leads:  # the others take over the weights of rank 0
        left = load_weights(model, Path(config.start))
        told += f"; begins with the weights of {config.start}" + (f", but for {', '.join(left)}" if left else "")
    learner = Learner.around(_placed(model, member), config, precision, member)
    if start.state is not None:
        learner.optimizer.load_state_dict(start.state["optimizer"])
        learner.scaler.load_state_dict(start.state["scaler"])
    share_optimizer(learner, member, source=0)
    return learner, told


def _placed(model: nn.Module, member: Member) -> nn.Module:
    """On the device, in the order of memory that its convolutions are fastest with."""
    import torch

    if member.device.type == "cuda":
        model = model.to(device=member.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _view(config: Config, plan: Plan, member: Member) -> View:
    from training.data.batch import View

    return View(
        rank=member.rank,
        world=member.world,
        loader_workers=config.loader_workers,
        batch_size=config.batch_size,
        image_size=config.image_size,
        seed=config.seed,
        shuffle_buffer=config.shuffle_buffer,
        classes=len(plan.classes),
        pin_memory=member.device.type == "cuda",
    )


def _keys(config: Config, folder: Folder, member: Member, since: Moment) -> Journal | None:
    """The journal of --log-keys, without what an earlier process noted of steps that are made anew."""
    left = takewhile(Path.exists, map(folder.keys, count(member.world))) if member.leads else ()
    for path in (folder.keys(member.rank), *left):
        if path.exists():
            noted = Journal(path)
            noted.cut(since.epoch, since.step)
            noted.close()
    return Journal(folder.keys(member.rank)) if config.log_keys else None


def train(config: Config) -> Report | None:
    """Train, or go on with it. Every process of the training calls this; the one that leads gets what it came to.

    Raises Stopped after SIGTERM or SIGINT, when a checkpoint is written; InputError, ModelError and ConfigError for
    what cannot be trained; UnwellError where another process is gone; OutputError where the folder is full;
    DeviceFullError and DeviceError where the device is full or broken.
    """
    plan = planned(config)
    arch = full_name(config.arch)
    with membership(config.device) as member:
        stop = StopFlag()  # until here there is nothing to keep, and much to wait for in vain
        if threading.current_thread() is threading.main_thread():  # Ray calls us in another, and stops us its own way
            stop.install()
        precision = Precision.chosen(config.precision, member.device)
        settled = replace(config, arch=arch, precision=precision.name, epoch_samples=plan.epoch_samples)
        folder = Folder(Path(config.out))
        with _held(folder, member), device_faults():
            training, start = begun(settled, plan, folder, member, precision, stop)
            with training:
                try:
                    _run(training, start.moment)
                except UnwellError as error:
                    # The one that leads has stopped as all were asked to, while we were waiting for it.
                    if stop() and not member.leads and error.code == "peer_gone":
                        raise Stopped(start.moment) from error
                    raise
                return report_of(training) if member.leads else None


def _held(folder: Folder, member: Member) -> AbstractContextManager[None]:
    return folder.held() if member.leads else nullcontext()


def _run(training: Training, start: Moment) -> None:
    epochs = training.config.epochs
    if start.step == 0 and start.epoch:
        _make_up_validation(training, start.epoch - 1)
    for epoch in range(start.epoch, epochs):
        begin = Moment(epoch=epoch, step=start.step if epoch == start.epoch else 0)
        end = _epoch(training, begin)
        _stop_here(training, end)
        _validate(training, end)
        _stop_here(training, end)
    if training.member.leads:
        finish(training)


def _stop_here(training: Training, end: Moment) -> None:
    """Between epochs a checkpoint lies there already. Each process has to call it."""
    (asked,) = training.member.totals([_asked_to_stop(training)])
    if asked:
        raise Stopped(_next_epoch(end))


def _asked_to_stop(training: Training) -> bool:
    """Whether all have to stop: the one that leads was asked to."""
    return training.member.leads and training.stop()


def _next_epoch(end: Moment) -> Moment:
    return Moment(epoch=end.epoch + 1, step=0)


def _epoch(training: Training, begin: Moment) -> Moment:
    """Train for an epoch, or the rest of one; gives the moment behind its last step."""
    known = past(training.folder.taken(training.member.rank), begin)
    training.record.begin(begin.epoch, known)
    clock = time.perf_counter()
    steps = train_epoch(training, _batches(training, begin.epoch, known.taken), begin)
    if training.config.splitshards:
        steps = agree(training.learner, training.member, steps)
    else:
        share_buffers(training.learner, training.member)
    end = Moment(epoch=begin.epoch, step=steps)
    _account(training, end, made=training.record.taken.samples - known.taken.samples, since=clock)
    if training.member.leads:
        training.keep(_next_epoch(end))
    return end


def _batches(training: Training, epoch: int, taken: Taken) -> Iterator[Batch]:
    from training.data.epochs import exact_epoch, resampled_epoch

    shards, view = training.plan.shards, training.view
    if training.config.splitshards:
        return exact_epoch(shards, view, epoch=epoch, taken=taken)
    return resampled_epoch(shards, view, epoch=epoch, batches=training.schedule.epoch_steps, taken=taken)


def _account(training: Training, end: Moment, *, made: int, since: float) -> None:
    """Add up over all processes what became of the epoch's samples, and compare.

    Raises InputError where samples are missing from an exact epoch, or where too many failed.
    """
    member, config = training.member, training.config
    taken = training.record.taken
    samples, failed, new = (int(value) for value in member.totals([taken.samples, taken.failed, made]))
    failures = [failure for one in member.gathered(training.record.failed) for failure in one]
    known = training.plan.shards.samples
    if member.leads:
        training.failures.add(failures)
    check_limit(failures, failed, training.plan.epoch_samples, config.max_failures, training.folder.failures)
    if config.splitshards and known is not None and samples + failed != known:
        raise InputError(
            f"epoch {end.epoch + 1} had {samples} samples and {failed} failures, and sizes.json says {known}",
            next_step="compare sizes.json with the shards: `embq shards verify`",
            code="epoch_incomplete",
        )
    training.samples += samples
    seconds = time.perf_counter() - since
    if training.log is not None:
        said = {"samples": samples, "failed": failed, "seconds": round(seconds, 3)}
        training.log.epoch(end, {**said, "samples_per_s": round(new / seconds, 2)})


def _make_up_validation(training: Training, epoch: int) -> None:
    """Validate after an epoch that is over, where an interruption came before that was done."""
    said = {line["kind"]: line["step"] for line in lines(training.folder.log) if line["epoch"] == epoch}
    done, steps = training.member.from_rank(0, ("validation" in said, said.get("epoch", 0)))
    if not done:
        _validate(training, Moment(epoch=epoch, step=steps))


def _validate(training: Training, end: Moment) -> None:
    """Measure the model after an epoch, where there is something to measure it on."""
    from training.data.epochs import validation_samples

    shards = training.plan.validation
    if shards is None:
        return
    begun_at = time.perf_counter()
    own = shards.samples and -(-shards.samples // training.member.world)
    tell = partial(training.log.validating, end.epoch, own) if training.log is not None else None
    batches = _side_by_side(training, validation_samples(shards, training.view), end)
    result = measured(training.learner, training.member, batches, tell)
    _check_validation(training, shards, result)
    if training.log is not None:
        training.log.validation(end, result, time.perf_counter() - begun_at)


def _side_by_side(training: Training, batches: Iterable[Batch], end: Moment) -> Iterator[Batch]:
    """This process's batches, one whenever every process that has any left takes one.

    So who has none left does not wait for all that the others have, which may be more than `group.TIMEOUT`, but for a
    batch at a time. Raises Stopped in all processes where they are asked to stop.
    """
    own = iter(batches)
    while True:
        batch = next(own, None)
        having, asked = training.member.totals([batch is not None, _asked_to_stop(training)])
        if asked:
            raise Stopped(_next_epoch(end))
        if batch is not None:
            yield batch
        if not having:
            return


def _check_validation(training: Training, shards: Shards, result: Measured) -> None:
    """List what failed; InputError where that is too much, or where samples are missing."""
    failures = [failure for one in training.member.gathered(result.failures) for failure in one]
    if training.member.leads:
        training.failures.add(failures)
    total = result.samples + result.failed
    most, path = training.config.max_failures, training.folder.failures
    check_limit(failures, result.failed, total, most, path, of="the validation")
    if not result.samples:
        raise InputError(
            "no validation sample could be read",
            next_step=f"see {path} and `embq shards verify`, or leave out --validation",
        )
    if shards.samples is not None and total != shards.samples:
        raise InputError(
            f"validation had {result.samples} samples and {result.failed} failures, and sizes.json says "
            f"{shards.samples}",
            next_step="compare sizes.json with the shards: `embq shards verify`",
            code="epoch_incomplete",
        )
