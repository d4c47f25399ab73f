"""The outcome of each process of a training, in a small file of its own, and the one outcome of the training.

Launchers tell only that a process failed. Under every launcher the processes write these files; the launcher adds those
of processes that a signal ended.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from embq.core.errors import DeviceError, EmbqError, Exit

OUTCOMES = "--outcomes"
"""Flag of `embq.training.launch.member` that names the folder of the files."""

PEER_GONE = "peer_gone"
"""Code of a process that lost another one of its training: never the cause, always a consequence."""

ENDED_WELL = (Exit.DONE, Exit.SOME_FAILED)
"""Statuses of a finished training. At any status but 0 a launcher would stop the others, which may be writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """The end of one process.

    Attributes:
        rank: among all processes of the training; -1 for a launcher.
        status: exit status of its `main`.
        code: failure code; "" if it ended well.
        message: what happened; "" if nothing was raised.
        next_step: what the user can do.
        traceback: of an exception that is none of embq's.
        host: where it ran.
        at: seconds since the epoch.
    """

    rank: int
    status: int
    code: str = ""
    message: str = ""
    next_step: str = ""
    traceback: str = ""
    host: str = field(default_factory=socket.gethostname)
    at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, rank: int, error: EmbqError) -> ProcessOutcome:
        """The outcome of a process that raised one of embq's errors."""
        status, code = int(error.exit_code), error.code
        return cls(rank=rank, status=status, code=code, message=error.message, next_step=error.next_step)

    @property
    def was_asked(self) -> bool:
        """True if the user, or a launcher that had seen another process fail, ended it."""
        return self.status == Exit.INTERRUPTED

    @property
    def follows(self) -> bool:
        """True if another process ended before this one, and explains more."""
        return self.was_asked or self.code == PEER_GONE

    def error(self) -> EmbqError:
        """The error as it was raised there."""
        error = EmbqError(self.message, next_step=self.next_step, code=self.code)
        error.exit_code = {int(status): status for status in Exit}.get(self.status, Exit.BUG)
        return error

    def write(self, folder: Path) -> None:
        """Write the file, complete or not at all; it replaces that of an earlier attempt."""
        temporary = folder / f".rank{self.rank}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.rename(folder / f"rank{self.rank}.json")

    @classmethod
    def read(cls, folder: Path) -> list[ProcessOutcome]:
        """The outcomes of this host's processes, by rank."""
        outcomes = [cls(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
        return sorted(outcomes, key=lambda outcome: outcome.rank)


def cause(outcomes: Sequence[ProcessOutcome]) -> ProcessOutcome | None:
    """The failure from which the others followed; None if nothing failed.

    That is the first one. Errors that a user can understand come before tracebacks, because a process that loses its
    peer within a collective may raise an unknown exception. A process that was only asked to end comes last.
    """
    failed = [outcome for outcome in outcomes if outcome.status not in ENDED_WELL]
    return min(failed, key=lambda end: (end.follows + end.was_asked, end.status == Exit.BUG, end.at), default=None)


def verdict(outcomes: Sequence[ProcessOutcome], status: int) -> int:
    """The exit status of a finished training; otherwise raises the error that explains its end.

    Args:
        outcomes: of its processes and launchers.
        status: exit status of the launcher.
    """
    failed = cause(outcomes)
    if failed is None and status == Exit.DONE:
        return max((outcome.status for outcome in outcomes), default=int(Exit.DONE))
    if (failed is None or failed.follows) and by_signal(status):
        raise killed("the training", "the memory of its machines", status - 128)
    if failed is None:
        raise EmbqError(
            f"the launcher ended with status {status}", next_step="what it printed stands above", code="launch"
        )
    if failed.traceback:
        process = f"process {failed.rank}" if failed.rank >= 0 else "torchrun"
        raise EmbqError(
            f"{process} on {failed.host} ended with {failed.message}",
            next_step=f"the details are in {report_file(failed.traceback)}; all processes were stopped",
            code=failed.code,
        )
    if failed.message:
        raise failed.error()
    return failed.status


def by_signal(status: int) -> bool:
    """True if a signal ended a launcher, other than the one that asks it to end."""
    return status > 128 and status != Exit.INTERRUPTED


def killed(who: str, memory: str, number: int) -> DeviceError:
    """The error of a process that a signal ended.

    Args:
        who: the process.
        memory: the memory to look at.
        number: of the signal.
    """
    return DeviceError(
        f"{who} was ended by signal {number}" + (", as the kernel does where memory runs out" if number == 9 else ""),
        next_step=f"look at dmesg and at {memory}; a smaller --batch-size or fewer --workers need less. Start "
        "the same command again: it goes on from the last checkpoint",
        code="killed",
    )


def report_file(text: str) -> str:
    """The name of a new file with a text that is too long for a message."""
    with tempfile.NamedTemporaryFile("w", prefix="embq-training-", suffix=".txt", delete=False) as report:
        report.write(text)
    return report.name
