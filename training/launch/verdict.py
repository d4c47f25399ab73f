"""What a training came to, from what its processes left behind and from how their launcher ended."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from core.errors import DeviceError, EmbqError, Exit
from training.launch.outcomes import Outcome, cause, status_of

_KILLED = re.compile(r"rank\s*: (\d+) .*\n\s*exitcode\s*: -(\d+) ")
"""How torchrun tells in its last words of a worker that a signal ended (errors/__init__.py of torch 2.15)."""


def verdict(folder: Path, status: int) -> int:
    """The exit status of a training that ended in order; else raises the one error that explains the others.

    The folder is removed unless the error names a file in it.

    Args:
        folder: where its processes left their outcomes, and the launcher its log.
        status: of the launcher.
    """
    outcomes = Outcome.read(folder)
    failed = cause(outcomes)
    if failed is None and status == Exit.DONE:
        shutil.rmtree(folder, ignore_errors=True)
        return status_of(outcomes)
    if failed is None:
        raise _silent(folder, status)
    if failed.traceback:
        report = folder / "traceback.txt"
        report.write_text(failed.traceback, encoding="utf-8")
        raise EmbqError(
            f"process {failed.rank} on {failed.host} ended with {failed.message}",
            next_step=f"the details are in {report}; all processes were stopped",
            code=failed.code,
        )
    shutil.rmtree(folder, ignore_errors=True)
    if failed.message:
        raise failed.error()
    return failed.status


def _silent(folder: Path, status: int) -> EmbqError:
    """The error where no process could say why it ended."""
    log = folder / "launcher.log"
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if killed := _KILLED.findall(said):
        rank, number = killed[-1]  # torchrun tells the first failure last
    elif status > 128:
        rank, number = "0", str(status - 128)
    else:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        return EmbqError(
            f"torchrun ended with status {status}: {last.strip()}",
            next_step=f"its log is {log}",
            code="launch",
        )
    shutil.rmtree(folder, ignore_errors=True)
    return DeviceError(
        f"process {rank} was ended by signal {number}"
        + (", as the kernel does where memory runs out" if number == "9" else ""),
        next_step="look at dmesg and at the memory of this machine; a smaller --batch-size or fewer --loader-workers "
        "need less. Start the same command again: it goes on from the last checkpoint",
        code="killed",
    )
