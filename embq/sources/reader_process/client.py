"""Parent side of the reader process: asks for a look at a file, or for the samples of a unit.

A small file can make pyarrow take any amount of memory, end the process, or never return. In a process of
their own that ends as an error of this one file.
"""

from __future__ import annotations

import atexit
import io
import json
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from embq.core.errors import ConfigError, EmbqError, SourceError
from embq.core.process.children import ChildEndedError, JsonChild, ending
from embq.core.process.limits import decoded_bytes, exhausted
from embq.core.units import Sample, Unit
from embq.sources.access.allowed_hosts import Reach, current
from embq.sources.interface import Moved, unwatched
from embq.sources.reader_process.protocol import (
    END,
    ERROR,
    FRAME,
    FRAME_BYTES,
    FRAME_MAX_BYTES,
    decode_error,
    decode_samples,
)
from embq.sources.unusable import DIED, died

CPU_S = 300
"""Processor time for one request. A sound table takes milliseconds."""

SERVER = ("-m", "embq.sources.reader_process.server")
"""Arguments of Python for a reader process; an idle time may follow, after which it ends."""

READ_IDLE_S = 300.0
"""Idle time of one that reads units, which keeps the place in the file where the last unit ended."""


@lru_cache(maxsize=1)
def inspect(unit: Unit) -> Any:
    """The result of the `inspect` of the unit's source; asked once for all that plan one file.

    Raises what that raises, and SourceError `reader_died` if the process died or took too long, and `too_large`
    if it needed too much memory.
    """
    return _LOOKS.query(unit)


def first_metadata(unit: Unit, most: int, *, wait_s: float) -> list[str]:
    """The result of `Source.first_metadata`; SourceError `reader_died` also if none came within `wait_s` of reading."""
    texts: list[str] = _LOOKS.query(unit, wait_s=wait_s, first_metadata=most)
    return texts


def read(unit: Unit, roots: Sequence[str], on_progress: Moved) -> Iterator[Sample]:
    """The result of `embq.sources.unit_reader.read_here`; raises as `inspect` does."""
    with _idle() as process:
        yield from process.read(unit, roots, on_progress)


def start(unit: Unit) -> None:
    """Start a process for `read`; raise ConfigError if that fails."""
    with _idle() as process:
        process.start_for(unit)


@contextmanager
def _idle() -> Iterator[Process]:
    process = _IDLE.pop() if _IDLE else Process(*SERVER, str(READ_IDLE_S))
    try:
        yield process
    finally:
        _IDLE.append(process)


class Process(JsonChild):
    """A reader process, which calls `embq.sources.reader_process.server.serve`; it answers in frames instead of lines.

    Args:
        arguments: of Python.
        memory_bytes: that one request may take; 0 for `embq.core.process.limits.decoded_bytes`.
    """

    def __init__(self, *arguments: str, memory_bytes: int = 0) -> None:
        self._memory_bytes = memory_bytes
        super().__init__(
            *arguments,
            stderr=subprocess.DEVNULL,  # what a library prints when it aborts is not for users
            pipe_bytes=FRAME_BYTES,
            # Allocators that reserve no more than they use, so that a limit of address space is one of memory.
            ARROW_DEFAULT_MEMORY_POOL="system",
            MALLOC_ARENA_MAX="1",
            OMP_NUM_THREADS="1",
        )
        self._lock = threading.Lock()
        self._stopped = False

    def query(self, unit: Unit, *, first_metadata: int = 0, wait_s: float | None = None) -> Any:
        """The result of `inspect`, or the metadata of `first_metadata` samples.

        Args:
            wait_s: longest wait for the answer of a process that has started; None waits as long as it takes.
        """
        with self._lock:
            _, content = self._first_frame(unit, {"first_metadata": first_metadata}, wait_s=wait_s)
        return json.loads(content)

    def start_for(self, unit: Unit, on_wait: Moved = unwatched) -> None:
        """Start the process and import the libraries for a unit; raise ConfigError if that fails, ExhaustedError if
        memory, processes or files are used up."""
        for is_last in (False, True):
            try:
                return self.start(unit.kind, on_wait)
            except (ChildEndedError, TimeoutError) as error:
                # It may have ended for want of requests, or been killed by somebody: a fresh one tells.
                if is_last or isinstance(error, TimeoutError):
                    raise self._unusable(str(error)) from error
            except OSError as error:
                raise exhausted(error) or self._unusable(f"cannot be started: {error.strerror}") from error
        return None

    def read(
        self, unit: Unit, roots: Sequence[str], progress: Moved, *, only: int | None = None, reach: Reach | None = None
    ) -> Generator[Sample, None, None]:
        """The samples of a unit. One iterator at a time; one that is closed before its end ends the process.

        Args:
            only: see `embq.sources.unit_reader.read_here`.
            reach: hosts that may be read from; None for those of this process.
        """
        self._stopped = False
        arguments: dict[str, Any] = {"roots": list(roots), "only": only}
        try:
            kind, content = self._first_frame(unit, arguments, reach=reach, on_wait=progress)
            while True:
                progress()
                yield from decode_samples(content)
                if kind == END:
                    return
                kind, content = self._frame(unit)
        except EmbqError:
            raise
        except msgspec.DecodeError as error:
            self.kill()
            raise died(unit, -signal.SIGABRT) from error
        except BaseException:  # it was not read to its end
            self.kill()
            raise

    def stop(self) -> None:
        """End the request in hand from another thread; the one that reads gets SourceError `reader_died`."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()

    def _first_frame(
        self,
        unit: Unit,
        arguments: dict[str, Any],
        *,
        wait_s: float | None = None,
        reach: Reach | None = None,
        on_wait: Moved = unwatched,
    ) -> tuple[bytes, bytes]:
        """Send a request, and give the first frame of the answer."""
        limits = {"cpu_s": CPU_S, "memory_bytes": self._memory_bytes or decoded_bytes()}
        request = {"unit": unit.describe(), **limits, "reach": (reach or current()).describe(), **arguments}
        for is_last in (False, True):
            self.start_for(unit, on_wait)
            deadline = None if wait_s is None else time.monotonic() + wait_s
            self.send(request)
            process, answers = self._running()
            if self._stopped:
                process.kill()
            if deadline is not None:
                with selectors.DefaultSelector() as selector:  # select() takes no descriptor from 1,024 on
                    selector.register(answers, selectors.EVENT_READ)
                    if not selector.select(max(0.0, deadline - time.monotonic())):
                        process.kill()
            if answers.peek(1):
                return self._frame(unit)
            status = self._ended()
            if deadline is not None and time.monotonic() >= deadline:
                raise SourceError(f"{unit.source}: its reader has not answered in time", code=DIED)
            if is_last or self._stopped or status == -signal.SIGXCPU:
                raise self._failure(unit, status)
            # It may have ended for want of requests, or been killed by somebody: a fresh one tells.
        raise AssertionError("unreachable")

    def _frame(self, unit: Unit) -> tuple[bytes, bytes]:
        """The next frame of an answer; raises the error that it holds, or that the process has died."""
        process, answers = self._running()
        head = answers.read(FRAME.size)
        kind, length = FRAME.unpack(head) if len(head) == FRAME.size else (b"", 0)
        if length > FRAME_MAX_BYTES:
            process.kill()
        content = answers.read(length) if length <= FRAME_MAX_BYTES else b""
        if not kind or len(content) != length:
            raise self._failure(unit, self._ended())
        if kind == ERROR:
            raise decode_error(content)
        return kind, content

    def _failure(self, unit: Unit, status: int) -> EmbqError:
        """The error for a process that ended without an answer, or in the midst of one."""
        return self._unusable(f"ended with {ending(status)}") if status >= 0 else died(unit, status)

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the process that reads tables {why}",
            next_step=f"check the installation: `{' '.join(self.command)} < /dev/null` shows the error",
        )

    def _running(self) -> tuple[subprocess.Popen[bytes], io.BufferedReader]:
        """The process and its answers."""
        assert self._process is not None
        assert isinstance(self._process.stdout, io.BufferedReader)
        return self._process, self._process.stdout


_LOOKS = Process(*SERVER)
_IDLE: list[Process] = []
"""Processes for reading that wait for the next unit."""


@atexit.register
def close() -> None:
    """End the processes; the next look starts one, with the environment as it is then."""
    inspect.cache_clear()
    _LOOKS.kill()
    while _IDLE:
        _IDLE.pop().kill()
