"""What a training came to, from what its processes left behind and from how their launcher ended."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence

from core.errors import DeviceError, EmbqError, Exit
from training.launch.outcomes import Outcome, cause, status_of

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
