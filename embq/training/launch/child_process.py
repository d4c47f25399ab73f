"""Runs the processes of a training as children that stop on request and never outlive this process."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from embq.core.process.children import kill_group, start
from embq.core.service.stopping import StopFlag
from embq.core.settings import child_environment
from embq.training.launch.outcomes import OUTCOMES, ProcessOutcome
from embq.training.run.scratch import scratch

GRACE_S = 40.0
"""From a request to stop to SIGKILL. torchrun gives its workers 30 s (its --shutdown-timeout), and then ends itself."""
LOOK_S = 0.1

MEMBER = "embq.training.launch.member"


def run_with_outcomes(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: TextIO | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[list[ProcessOutcome], int]:
    """Run a command of `MEMBER` processes; returns their outcomes, and its exit status, 128 + N after signal N.

    It leads a process group. SIGINT and SIGTERM reach the group as SIGTERM, and it is killed after `GRACE_S` or at the
    second request. The kernel kills the command when this process is killed; its own children have to see to that
    themselves (`embq.training.launch.member`).

    Args:
        folder: for the outcomes.
        environment: changes to ours.
        output: for output and errors of the processes; None for ours.
        meanwhile: called every `LOOK_S` while they run.

    Raises KeyboardInterrupt if it ended because of such a request.
    """
    place = command.index(MEMBER) + 1
    command = [*command[:place], OUTCOMES, str(folder), *command[place:]]
    process = start(command, environment=child_environment(**environment), stdout=output, stderr=output)
    try:
        with stop_requests() as flag:
            forwarded = False
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
                meanwhile()
                if flag() and not forwarded:
                    forwarded = True
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
                if flag.longer_than(GRACE_S):
                    kill_group(process)
    finally:
        kill_group(process)
        process.wait()
    if flag() and process.returncode:
        raise KeyboardInterrupt
    return ProcessOutcome.read(folder), process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def stop_requests() -> Iterator[StopFlag]:
    """Count SIGINT and SIGTERM within the block; only the main thread can, elsewhere the flag stays false."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    flag.install()
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def outcome_folder() -> Iterator[Path]:
    """A folder for the outcomes of this host's processes."""
    with scratch(Path(tempfile.gettempdir()), "embq-launch-", mode=0o700) as folder:
        yield folder
