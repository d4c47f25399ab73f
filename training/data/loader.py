"""Loader workers: processes that read, decode and put together while the step before is computed."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import webdataset as wds
from torch.utils.data import DataLoader

from core.broker.embedded import die_with_parent
from core.errors import UnwellError
from training.data.making import Made
from training.data.view import View

DIED = re.compile(
    r"DataLoader worker \(pid|Pin memory thread exited|unable to (allocate|mmap|resize)|No space left on device"
)
"""What torch says of a worker that is gone, or that could have no memory to share. Its thread that pins memory ends
where what a dead worker sent last cannot be read."""


def loaded(stages: list[Any], view: View) -> Iterator[Made]:
    """What the stages make, in as many processes as the view has loader workers, each asked in its turn.

    Raises UnwellError where a loader worker has died.
    """
    workers = view.loader_workers
    sent = _begun(stages, view)
    try:
        yield from sent
    except (RuntimeError, OSError, EOFError) as error:
        if not workers or not _is_of_a_death(error):
            raise
        raise UnwellError(
            f"a loader worker has died: {(str(error) or type(error).__name__).strip().splitlines()[-1]}",
            next_step="often the machine had no memory left, or /dev/shm none: fewer --loader-workers, a smaller "
            "--shuffle-buffer or --batch-size; the same command goes on where the training stopped",
        ) from error


def _is_of_a_death(error: Exception) -> bool:
    """Whether a worker is gone. An error of other kinds than torch's own may come from the pipes between it and us, or
    was caught in a worker that lives."""
    if isinstance(error, RuntimeError):
        return DIED.search(str(error)) is not None
    return not str(error).startswith("Caught ")


def _begun(stages: list[Any], view: View) -> Iterator[Made]:
    """A loader with its workers started."""
    heard = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        # More workers than cores: for each epoch anew it would be said, although they may wait for storage as well.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        pipeline = wds.DataPipeline(*stages)
        loader: DataLoader[Any] = DataLoader(
            pipeline,
            batch_size=None,
            num_workers=view.loader_workers,
            worker_init_fn=_bound_to_parent,
            # For the current device, which `group.membership` has set.
            pin_memory=view.pin_memory,
        )
        sent = iter(loader)
    if signal.getsignal(signal.SIGCHLD) is not heard:
        # torch would raise of a dead worker wherever the main thread is just then, be it in a collective. Who waits
        # for the next batch finds out by itself within 5 s.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if heard is None else heard)
    return sent


def _bound_to_parent(_worker: int) -> None:
    """In a loader worker: it ends with the process that it reads for, and no sooner.

    A request to stop goes to that process's group, and torch has its workers end at a SIGTERM from anybody: the process
    would lose them before it came to its next step. And the lock of `--out`, which they have inherited, would be theirs
    for seconds after that process was killed.
    """
    os.setpgid(0, 0)
    die_with_parent()
