"""Runs the processes of a training as children that stop on request and never outlive this process."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TextIO

from embq.core.process.children import kill_group, start
from embq.core.service.stopping import StopFlag
from embq.core.settings import child_environment
from embq.training.launch.outcomes import OUTCOMES, Outcome
from embq.training.run.scratch import scratch

GRACE_S = 40.0
"""From a request to stop to SIGKILL. torchrun gives its workers 30 s (its --shutdown-timeout), and then ends itself."""
LOOK_S = 0.5

STOPPING = (signal.SIGINT, signal.SIGTERM)
MEMBER = "embq.training.launch.member"


def run(
    command: list[str], *, environment: Mapping[str, str] = MappingProxyType({}), output: TextIO | None = None
) -> int:
    """Run a command to its end; returns its exit status, 128 + N after signal N.

    It leads a process group. SIGINT and SIGTERM are forwarded to the group, which is killed after `GRACE_S` or at the
    second request. The kernel kills the command when this process is killed; its own children have to see to that
    themselves (`embq.training.launch.member`).

    Args:
        environment: changes to ours.
        output: for its output and its errors; None for ours.

    Raises KeyboardInterrupt where it ended because of such a request.
    """
    flag = StopFlag()
    process = start(
        command, environment=child_environment(**environment), stdout=output, stderr=output, enter=_unblock_interrupts
    )
    try:
        with _forwarded(process, flag):
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
                if flag.longer_than(GRACE_S):
                    kill_group(process)
    finally:
        kill_group(process)
        process.wait()
    if flag() and process.returncode:
        raise KeyboardInterrupt
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _unblock_interrupts() -> None:
    # Background jobs of a script ignore SIGINT, and so would their children, to which it is forwarded.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def replaced_handlers() -> Iterator[None]:
    """Restore the handlers of both signals after the block."""
    old = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


@contextmanager
def _forwarded(process: subprocess.Popen[bytes], flag: StopFlag) -> Iterator[None]:
    """Within the block, requests to stop go to the child's group as well as to `flag`."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def forward(counted: Callable[[int, FrameType | None], None], number: int, frame: FrameType | None) -> None:
        counted(number, frame)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    with replaced_handlers():
        flag.install()
        for number in STOPPING:
            counted = signal.getsignal(number)
            assert callable(counted)
            signal.signal(number, partial(forward, counted))
        yield


def run_with_outcomes(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], output: TextIO | None = None
) -> tuple[list[Outcome], int]:
    """Run a command of `MEMBER` processes; returns their outcomes, and the exit status of the command.

    Args:
        folder: for the outcomes.
        environment: changes to ours.
        output: for output and errors of the processes; None for ours.

    Raises KeyboardInterrupt as `run` does.
    """
    place = command.index(MEMBER) + 1
    status = run([*command[:place], OUTCOMES, str(folder), *command[place:]], environment=environment, output=output)
    return Outcome.read(folder), status


@contextmanager
def outcome_folder() -> Iterator[Path]:
    """A folder for the outcomes of this host's processes."""
    with scratch(Path(tempfile.gettempdir()), "embq-launch-", mode=0o700) as folder:
        yield folder
