"""One process of a training: `python -m embq.training.launch.member [--outcomes DIR] MODULE FLAGS`.

Runs `main(FLAGS)` of `MODULE.__main__`, and writes to DIR how it ended. The process ends with its launcher: torchrun
puts its workers into sessions of their own and, when killed, would leave them behind.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from embq.app.cli.entry_point import show_error
from embq.core.errors import EmbqError, Exit
from embq.core.process.children import die_with_parent
from embq.core.redaction import masked
from embq.training.launch.outcomes import ENDED_WELL, OUTCOMES, ProcessOutcome
from embq.training.launch.torchrun import LOOPBACK, stay_on_loopback

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set in the environment of torchrun's workers only."""


def attempt(module: str, arguments: Sequence[str], rank: int) -> ProcessOutcome:
    """Run a module's `main`; every way in which it can end becomes an outcome."""
    # Number GPUs as nvidia-smi and `embq.worker.supervisor.devices` do. By itself CUDA puts the fastest first.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        main: Callable[[Sequence[str]], int] = importlib.import_module(f"{module}.__main__").main
        return ProcessOutcome(rank=rank, status=int(main(arguments) or 0))
    except EmbqError as error:
        return ProcessOutcome.of(rank, error)
    except SystemExit as end:
        text = "" if end.code is None or isinstance(end.code, int) else str(end.code)
        return ProcessOutcome(rank=rank, status=1 if text else int(end.code or 0), message=masked(text))
    except KeyboardInterrupt:
        return ProcessOutcome(rank=rank, status=Exit.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        text = masked(f"{type(error).__name__}: {error}")
        return ProcessOutcome(
            rank=rank, status=Exit.BUG, code="bug", message=text, traceback=masked(traceback.format_exc())
        )


def main(arguments: Sequence[str]) -> NoReturn:
    """Run as one process of a training, and exit as it ended."""
    die_with_parent()
    folder: Path | None = None
    if arguments[0] == OUTCOMES:
        folder, arguments = Path(arguments[1]), arguments[2:]
        if TORCHRUN in os.environ and not _is_of(folder, os.getppid()):
            sys.exit(Exit.INTERRUPTED)  # torchrun was killed before this process was bound to it
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
    """True if a process was started with the folder among its arguments; true where that is not known."""
    try:
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True


def run_module(module: str) -> NoReturn:
    """Run a module that a user's own python, torchrun or srun has started; each process prints its own error."""
    if TORCHRUN in os.environ:
        die_with_parent()
    _end(attempt(module, sys.argv[1:], int(os.environ.get("RANK", "0"))))


def _end(outcome: ProcessOutcome) -> NoReturn:
    if outcome.traceback:
        sys.stderr.write(outcome.traceback)
    elif outcome.message:
        show_error(outcome.error())
    sys.exit(outcome.status)


if __name__ == "__main__":
    main(sys.argv[1:])
