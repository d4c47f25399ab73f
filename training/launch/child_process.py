"""A child process that is stopped when we are asked to stop, and never outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, MappingProxyType
from typing import TextIO

from core.process.children import die_with_parent
from core.service.stopping import StopFlag
from core.settings import child_environment

GRACE_S = 40.0
"""From the request to stop to the end by force. torchrun gives its workers 30 s (its --shutdown-timeout), and takes
a moment more to end itself."""
LOOK_S = 0.5

STOPPING = (signal.SIGINT, signal.SIGTERM)


def run(
    command: list[str],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    output: TextIO | None = None,
    stdin: int | None = None,
    errors: TextIO | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Run a command to its end; gives its exit status, 128 + N where signal N ended it.

    It leads a process group of its own. SIGINT and SIGTERM that reach us are passed on to the group; when it is still
    there after `grace_s`, or at the second request, it is killed. The kernel kills it when we are killed: that holds
    for the command itself, and for what it starts only where that does the same (`training.launch.member`).

    Args:
        environment: changes to ours.
        output: where its output and its errors go; None for ours.
        stdin: descriptor that it gets as its standard input; None for nothing to read.
        errors: where its errors go instead.

    Raises KeyboardInterrupt where it ended because of such a request.
    """
    parent = os.getpid()
    flag = StopFlag()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=output,
        stderr=output if errors is None else errors,
        env=child_environment(**environment),
        process_group=0,
        preexec_fn=lambda: _bind_to(parent),
    )
    try:
        with _passed_on(process, flag):
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
                if flag.longer_than(grace_s):
                    kill_group(process)
    finally:
        kill_group(process)
        process.wait()
    if flag() and process.returncode:
        raise KeyboardInterrupt
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _bind_to(parent: int) -> None:
    # A script's background jobs are born deaf to SIGINT, and what they start is too; we are not, and pass it on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != parent:  # it ended before the kernel knew what to do then
        os._exit(128 + signal.SIGKILL)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of a child's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def replaced_handlers() -> Iterator[None]:
    """Whatever is done to the handlers of both signals within the block is undone after it."""
    old = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


@contextmanager
def _passed_on(process: subprocess.Popen[bytes], flag: StopFlag) -> Iterator[None]:
    """For the length of the block, requests to stop go to the child's group as well as into `flag`."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may take signals over
        yield
        return

    def pass_on(counted: Callable[[int, FrameType | None], None], number: int, frame: FrameType | None) -> None:
        counted(number, frame)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    with replaced_handlers():
        flag.install()
        for number in STOPPING:
            counted = signal.getsignal(number)
            assert callable(counted)
            signal.signal(number, partial(pass_on, counted))
        yield
