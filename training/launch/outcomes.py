"""How each process of a training ended, in a small file of its own: launchers tell only that one of them did."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from core.errors import DeviceError, EmbqError, Exit

_KILLED = re.compile(r"host\s*: (\S+)\n\s*rank\s*: (\d+) .*\n\s*exitcode\s*: -(\d+) ")
"""How torchrun tells in its last words of a worker that a signal ended (errors/__init__.py of torch 2.15)."""


def verdict(outcomes: Sequence[Outcome], status: int, said: str) -> int:
    """The exit status of a training that ended in order; else raises the one error that explains the others.

    Args:
        outcomes: what its processes left behind.
        status: of the launcher.
        said: what the launcher said itself.
    """
    failed = cause(outcomes)
    if failed is None and status == Exit.DONE:
        return status_of(outcomes)
    if failed is None or (failed.follows and (by_signal(status) or _KILLED.search(said))):
        raise _silent(status, said)
    if failed.traceback:
        raise EmbqError(
            f"process {failed.rank} on {failed.host} ended with {failed.message}",
            next_step=f"the details are in {kept(failed.traceback)}; all processes were stopped",
            code=failed.code,
        )
    if failed.message:
        raise failed.error()
    return failed.status


def by_signal(status: int) -> bool:
    """Whether a signal ended a launcher, and not the one with which it is asked to end."""
    return status > 128 and status != Exit.INTERRUPTED


def _silent(status: int, said: str) -> EmbqError:
    """The error where no process could say why it ended."""
    if killed := _KILLED.findall(said):
        host, rank, number = killed[-1]  # torchrun tells the first failure last
        who, machine = f"process {rank} on {host}", f"the memory of {host}"
    elif by_signal(status):
        who, machine, number = "the training", "the memory of its machines", str(status - 128)
    else:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        return EmbqError(
            f"torchrun ended with status {status}: {last.strip()}",
            next_step=f"all that it said is in {kept(said)}",
            code="launch",
        )
    return DeviceError(
        f"{who} was ended by signal {number}" + (", as the kernel does where memory runs out" if number == "9" else ""),
        next_step=f"look at dmesg and at {machine}; a smaller --batch-size or fewer --loader-workers need less. Start "
        "the same command again: it goes on from the last checkpoint",
        code="killed",
    )


def kept(text: str) -> str:
    """The name of a new file with a text that is too long for a message."""
    with tempfile.NamedTemporaryFile("w", prefix="embq-training-", suffix=".txt", delete=False) as report:
        report.write(text)
    return report.name


PEER_GONE = "peer_gone"
"""The code of a process that lost another one of its training: never the cause, always what follows from it."""

ENDED_WELL = (Exit.DONE, Exit.SOME_FAILED)
"""Statuses of a training that came to its end. A launcher that saw one that is not 0 would stop the other processes,
which may still be writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one process.

    Attributes:
        rank: of all processes of the training.
        status: exit status of its `main`.
        code: stable name of the cause; "" where it ended well.
        message: what happened; "" where nothing was raised.
        next_step: what the user can do.
        traceback: of an exception that embq does not know.
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
    def of(cls, rank: int, error: EmbqError) -> Outcome:
        """The outcome of a process that raised one of embq's errors."""
        status, code = int(error.exit_code), error.code
        return cls(rank=rank, status=status, code=code, message=error.message, next_step=error.next_step)

    @property
    def was_asked(self) -> bool:
        """Whether it ended because somebody asked it to: the user, or a launcher that had seen another one fail."""
        return self.status == Exit.INTERRUPTED

    @property
    def follows(self) -> bool:
        """Whether another process ended before this one, and has more to say."""
        return self.was_asked or self.code == PEER_GONE

    def error(self) -> EmbqError:
        """The error as it was raised there."""
        error = EmbqError(self.message, next_step=self.next_step, code=self.code)
        error.exit_code = {int(known): known for known in Exit}.get(self.status, Exit.BUG)
        return error

    def write(self, folder: Path) -> None:
        """Put it where `read` finds it, whole or not at all; it replaces that of an earlier attempt."""
        temporary = folder / f".rank{self.rank}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.rename(folder / f"rank{self.rank}.json")

    @classmethod
    def read(cls, folder: Path) -> list[Outcome]:
        """What the processes of this host have left there, by rank; a process that was killed has left nothing."""
        found = [cls(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
        return sorted(found, key=lambda outcome: outcome.rank)


def cause(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The failure that the others followed from; None where nothing failed.

    The first one. Those that a user can understand come before tracebacks: a process that loses its peer in the middle
    of a collective raises what nobody can use, where it does not say just that. A process that was only asked to end
    comes last.
    """
    failed = [outcome for outcome in outcomes if outcome.status not in ENDED_WELL]
    return min(failed, key=lambda one: (one.follows + one.was_asked, one.status == Exit.BUG, one.at), default=None)


def status_of(outcomes: Sequence[Outcome]) -> int:
    """The exit status of a training of which no process failed."""
    return max((outcome.status for outcome in outcomes), default=int(Exit.DONE))
