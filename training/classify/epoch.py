"""One epoch of steps, and what happens around each: the record, the log, a checkpoint, a request to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from core.errors import InputError
from training.classify.agreement import joined
from training.classify.checkpoint import Moment
from training.classify.group import explained
from training.classify.learner import seed_step
from training.classify.training import Stopped, Training

if TYPE_CHECKING:
    from training.data.batch import Batch


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
