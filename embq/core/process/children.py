"""Child processes: they end with their parent, stop within a deadline, and answer in JSON lines.

An error crosses from a child to its parent as `embq.core.errors.error_fields`; `error_of` makes it anew there.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from embq.core.settings import child_environment

_PR_SET_PDEATHSIG = 1

PYTHON = sys.executable

MARK = "\x1eembq "
"""Precedes the answer of a process among other output; no line that a login shell or a program prints has a record
separator."""
STARTED = b"\x1eup\n"
"""Answer of a `JsonChild` to `start`."""
START_S, START_POLL_S = 600.0, 0.5
"""Time limit for starting a `JsonChild`: on cold network storage or a machine that swaps, imports take minutes."""
CLOSE_S = 5.0
"""Time that a `JsonChild` gets to end by itself once its standard input is closed."""
ANSWER_MAX_BYTES = 1 << 26
"""Longest answer of a `JsonChild`; one that sends more is killed."""
_READ_BYTES = 1 << 16


def die_with_parent(parent: int = 0) -> None:
    """For `preexec_fn`: the kernel kills this child when its parent ends, however that happens (Linux only).

    Args:
        parent: pid of the parent; if it has ended already, this process exits. 0 skips that check.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # macOS has no prctl; the child then ends on its own checks
        return
    if parent and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def python(*arguments: str, executable: str = PYTHON) -> list[str]:
    """The command line of a Python process that runs nothing of the current folder, which may hold a `redis.py`.

    Every Python process of embq is started by it. What such a process starts itself has PYTHONSAFEPATH
    (`embq.core.settings.child_environment`) to the same end, and multiprocessing hands -P on.

    Args:
        arguments: such as "-m", a module and its own arguments.
        executable: Python, perhaps of another machine.
    """
    return [executable, "-P", *arguments]


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    pipe_bytes: int = -1,
    pass_fds: Sequence[int] = (),
    own_group: bool = True,
    ends_itself: bool = False,
    enter: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that the kernel kills when this one ends.

    Args:
        environment: all of its variables, None for `embq.core.settings.child_environment()`.
        pipe_bytes: capacity of its pipes, -1 for that of the system.
        own_group: whether it leads a process group, so that Ctrl-C in a terminal reaches the parent only.
        ends_itself: whether the command ends with this process by its own means, such as `die_with_parent`. It is then
            started without `preexec_fn`, hence by vfork: a fork takes long in a process that holds a model or an index.
        enter: called in the child before the command runs, unless it `ends_itself`.
    """
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        if enter is not None:
            enter()

    return subprocess.Popen(
        list(command),
        env=child_environment() if environment is None else dict(environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pipesize=pipe_bytes,
        pass_fds=tuple(pass_fds),
        process_group=0 if own_group else None,
        preexec_fn=None if ends_itself else prepare,
    )


def run_python(
    *arguments: str, environment: Mapping[str, str], timeout_s: float | None, request: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python process to its end; returns its status, output and errors.

    Args:
        arguments: of Python.
        environment: all of its variables.
        request: its standard input; None for this process's.

    Raises subprocess.TimeoutExpired after killing it.
    """
    return subprocess.run(
        python(*arguments),
        input=request,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def stop(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """End a process with SIGTERM, after `grace_s` with SIGKILL; returns its status."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    return kill(process)


def kill(process: subprocess.Popen[bytes]) -> int:
    """End a process with SIGKILL, if it still runs; returns its status."""
    if process.poll() is None:
        process.kill()
    return process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End with SIGKILL what is left of the process group that a child leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def ending(status: int) -> str:
    """The end of a process, for messages: "status 1" or "signal 9"."""
    return f"signal {-status}" if status < 0 else f"status {status}"


class ChildEndedError(Exception):
    """A `JsonChild` ended while a request was in hand.

    Attributes:
        status: its exit status; -N where signal N ended it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with {ending(status)}")
        self.status = status


class JsonChild:
    """A Python process that answers each JSON line on its stdin with one on its stdout, started by the first request.

    One request is in hand at a time. After `ChildEndedError`, `kill` and `close` the next request starts a new process.
    Its program calls `die_with_parent`. Where `start` is used, it answers `{"start": NAME}` with `STARTED`.

    Args:
        arguments: of Python.
        stderr: of the process; None for this one's.
        pipe_bytes: capacity of its pipes, -1 for that of the system.
        changes: of its environment.
    """

    def __init__(self, *arguments: str, stderr: int | None = None, pipe_bytes: int = -1, **changes: str) -> None:
        self.command = python(*arguments)
        self._stderr, self._pipe_bytes = stderr, pipe_bytes
        self._changes = changes
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._has_started: set[str] = set()

    @property
    def pid(self) -> int:
        """Process id; 0 if no process runs."""
        return self._process.pid if self._process is not None else 0

    def start(self, name: str = "", on_wait: Callable[[], None] = lambda: None) -> None:
        """Start the process and wait until it has imported what its requests need, which is no work on a request.

        Args:
            name: what the program imports by; "" for a program that always imports the same.
            on_wait: called every `START_POLL_S` meanwhile.

        Raises ChildEndedError if the process ends, and TimeoutError after killing it if it takes longer than `START_S`.
        """
        if self._process is not None and name in self._has_started:
            return
        self.send({"start": name})
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, answers = time.monotonic() + START_S, self._process.stdout
        with selectors.DefaultSelector() as selector:  # select() takes no descriptor from 1,024 on, which servers have
            selector.register(answers, selectors.EVENT_READ)
            while not selector.select(START_POLL_S):
                on_wait()
                if time.monotonic() > deadline:
                    self.kill()
                    raise TimeoutError(f"has not started within {START_S:g} s")
        if os.read(answers.fileno(), len(STARTED)) != STARTED:
            self._process.kill()
            raise ChildEndedError(self._ended())
        self._has_started.add(name)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request. That the process has ended shows in `answer`."""
        if self._process is None:
            self._process = self._started()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _started(self) -> subprocess.Popen[bytes]:
        return start(
            self.command,
            environment=child_environment(**self._changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pipe_bytes=self._pipe_bytes,
            own_group=False,
            ends_itself=True,
        )

    def answer(self, wait_s: float) -> dict[str, Any] | None:
        """The answer to the request; None if it is not complete after `wait_s`. Raises ChildEndedError."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        deadline = time.monotonic() + wait_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                read = os.read(process.stdout.fileno(), _READ_BYTES)
                if not read:
                    raise ChildEndedError(self._ended())
                self._unread += read
                if len(self._unread) > ANSWER_MAX_BYTES:
                    process.kill()
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> int:
        """Status of the process, whose stdout has ended; an open stdin could keep it alive."""
        assert self._process is not None
        process = self._process
        self._forget()
        return process.wait()

    def kill(self) -> None:
        """End the process with SIGKILL; the request in hand gets no answer."""
        if self._process is not None:
            kill(self._process)
            self._forget()

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Let the process end by closing its stdin, and kill it after `grace_s`."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill()

    def _forget(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # bytes that nobody will read
                    pipe.close()
        self._process, self._unread = None, b""
        self._has_started = set()
