"""One process of a training: `python -m training.launch.member [--outcomes DIR] MODULE FLAGS`.

Runs `main(FLAGS)` of `MODULE.__main__`. It ends with the launcher that started it, which puts its workers into sessions
of their own and, killed itself, would leave them behind; and how it ended, it leaves in DIR for whoever asked.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from core.errors import EmbqError, Exit
from core.process.children import die_with_parent
from core.redaction import masked
from embq.cli.entry_point import show_error
from training.launch.outcomes import ENDED_WELL, Outcome
from training.launch.torchrun import LOOPBACK, stay_on_loopback

OUTCOMES = "--outcomes"
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of torchrun's workers only."""


def main_of(module: str) -> Callable[[Sequence[str]], int]:
    """`main` of a launched module: takes the flags, gives the exit status."""
    main: Callable[[Sequence[str]], int] = importlib.import_module(f"{module}.__main__").main
    return main


def attempt(module: str, arguments: Sequence[str], rank: int) -> Outcome:
    """Run a module's main; every way in which it can end becomes an outcome."""
    # GPUs are numbered as by nvidia-smi and `worker.supervisor.devices`. By default CUDA puts the fastest first.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        return Outcome(rank=rank, status=int(main_of(module)(arguments) or 0))
    except EmbqError as error:
        return Outcome.of(rank, error)
    except SystemExit as end:
        told = "" if end.code is None or isinstance(end.code, int) else str(end.code)
        return Outcome(rank=rank, status=1 if told else int(end.code or 0), message=masked(told))
    except KeyboardInterrupt:
        return Outcome(rank=rank, status=Exit.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        text = masked(f"{type(error).__name__}: {error}")
        return Outcome(rank=rank, status=Exit.BUG, code="bug", message=text, traceback=masked(traceback.format_exc()))


def main(arguments: Sequence[str]) -> NoReturn:
    """Run as one process of a training, and end as it did."""
    die_with_parent()
    folder: Path | None = None
    if arguments[0] == OUTCOMES:
        folder, arguments = Path(arguments[1]), arguments[2:]
        if TORCHRUN in os.environ and not _is_of(folder, os.getppid()):
            sys.exit(Exit.INTERRUPTED)  # torchrun was killed before the kernel knew what to do then
        _take_screen()
    if (os.environ.get("MASTER_ADDR"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")) == (LOOPBACK, "False"):
        stay_on_loopback()  # the first process serves the store itself
    outcome = attempt(arguments[0], arguments[1:], int(os.environ.get("RANK", "0")))
    if folder is not None and folder.is_dir():
        outcome.write(folder)
        sys.stdout.flush()
        sys.stderr.flush()
        sys.exit(0 if outcome.status in ENDED_WELL else outcome.status)
    _end(outcome)


def _is_of(folder: Path, pid: int) -> bool:
    """Whether a process was started with the folder among its arguments; true where nobody can tell."""
    try:
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True


def alone(module: str) -> NoReturn:
    """What a launched module does where it is called by its own name: `python -m`, torchrun or srun of the user's.

    Each process tells its own error. A killed torchrun leaves nothing behind; anybody else may end before this does.
    """
    if TORCHRUN in os.environ:
        die_with_parent()
    _end(attempt(module, sys.argv[1:], int(os.environ.get("RANK", "0"))))


def _end(outcome: Outcome) -> NoReturn:
    if outcome.traceback:
        sys.stderr.write(outcome.traceback)
    elif outcome.message:
        show_error(outcome.error())
    sys.exit(outcome.status)


def _take_screen() -> None:
    """Write errors where the launcher's user sees them.

    torchrun hands its own standard error on, which goes into a log because of what it says itself. The user's comes as
    standard input, the only other descriptor that torchrun hands on.
    """
    os.dup2(0, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main(sys.argv[1:])
