"""A training from its flags to its model, in each of its processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import InputError, UnwellError
from core.service.stopping import StopFlag
from training.classify.agreement import agree, share_buffers
from training.classify.begin import begun
from training.classify.checkpoint import Moment
from training.classify.config import Config
from training.classify.epoch import train_epoch
from training.classify.failures import check_limit
from training.classify.folder import Folder
from training.classify.group import Member, membership
from training.classify.journal import lines
from training.classify.learner import device_faults
from training.classify.models import full_name
from training.classify.output import finish
from training.classify.plan import planned
from training.classify.precision import Precision
from training.classify.record import past
from training.classify.report import Report, report_of
from training.classify.training import Stopped, Training
from training.classify.validation import Measured, measured

if TYPE_CHECKING:
    from training.data.batch import Batch
    from training.data.taken import Taken
    from training.shards.counts import Shards


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
