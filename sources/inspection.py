"""Reader process: reads files whose libraries allocate by themselves, under a limit of memory and processor time.

A small file can make pyarrow and HDF5 take any amount of memory, end the process, or keep it busy for ever. Here that
ends as an error of this one file. `embq enqueue` looks into tables and at first metadata this way, workers read tables.

A process serves one request after the other, and ends when nothing was asked for a while.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from core import errors
from core.errors import ConfigError, EmbqError, SourceError
from core.process.limits import decoded_bytes
from core.settings import child_environment
from core.units import Sample, Unit
from sources.base import SAMPLE_MAX_BYTES, Moved
from sources.storage import source_errors

CPU_S = 300
"""Processor time for one request. A sound table takes milliseconds, an HDF5 file of a million datasets two minutes."""

IDLE_S = 5.0
"""A process that was asked nothing for so long ends: planning is over, or far from tables."""

READER_IDLE_S = 300.0
"""The same for one that reads units: it keeps the place in the file where the last unit ended."""

ANSWER_CHARS = 1_000_000
"""Metadata that is given back of one unit."""

DIED = "reader_died"
"""The code of the error for a file that ended the process that looked at it, and the option of the unit that stands for
it, so that no worker opens it."""

UNREADABLE_CODES = (DIED, "too_large")
"""Codes of files that no worker should open."""

GUARDED = frozenset({"parquet", "arrow", "hdf5"})
"""Kinds whose units are read in a reader process."""

_FRAME = struct.Struct("<cI")
"""Kind and length of what follows in an answer: JSON of an answer or an error, samples, a sign of life, the end."""
_ANSWER, _ERROR, _SAMPLES, _MOVED, _END = b"A", b"E", b"S", b"M", b"."
_FRAME_MOST_BYTES = 8 * SAMPLE_MAX_BYTES
_FRAME_SAMPLES, _FRAME_BYTES, _FRAME_S = 64, 1 << 20, 0.2
"""Samples are handed over when there are so many, or so many bytes of them, or the first one has waited so long."""

_Travelling = tuple[int, bytes, bytes | None, str | None, str | None, tuple[str, bytes] | None]
"""Ordinal, key, image, text, metadata and error of a sample. Keys and messages may hold bytes of paths that are not
UTF-8."""


def inspect(unit: Unit) -> Any:
    """What the `inspect` of the unit's source gives, asked in another process.

    Raises what that raises, and SourceError `DIED` where the process died, or took too long, and `too_large` where it
    needed too much memory.
    """
    return _PROCESS.ask(unit)


def first_metadata(unit: Unit, most: int, *, wait_s: float) -> list[str]:
    """What `sources.base.Described.first_metadata` gives, asked in another process.

    Raises what that raises, and SourceError `DIED` where the process died, or had not answered after `wait_s`.
    """
    found: list[str] = _PROCESS.ask(unit, wait_s=wait_s, first_metadata=most)
    return found


def read(unit: Unit, roots: Sequence[str], moved: Moved) -> Iterator[Sample]:
    """What `sources.kinds.read_here` gives, in another process; raises as `inspect` does."""
    process = _IDLE.pop() if _IDLE else Process(_command(READER_IDLE_S))
    try:
        yield from process.read(unit, roots, moved)
    except EmbqError:
        _IDLE.append(process)
        raise
    except BaseException:  # it was not read to its end
        process.close()
        raise
    _IDLE.append(process)


def marked(unit: Unit, code: str) -> Unit:
    """The unit that stands for a file which no worker should open, because planning ended in an error with `code`."""
    return replace(unit, options=tuple(sorted((*unit.options, (code, "while it was planned")))))


def refuse_marked(unit: Unit) -> None:
    """Raise SourceError for such a unit."""
    named = dict(unit.options)
    if DIED in named:
        raise _died(unit)
    if "too_large" in named:
        raise SourceError(
            f"{unit.source}: when the run was planned, it was larger than what a reader takes",
            code="too_large",
            next_step="split it into smaller files",
        )


class Process:
    """A reader process, started when it is needed.

    Args:
        command: starts one, which calls `serve`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, unit: Unit, *, first_metadata: int = 0, wait_s: float | None = None) -> Any:
        """The answer of `inspect`, or the metadata of so many samples.

        Args:
            wait_s: for so long the answer is waited for; None waits as long as it takes.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        with self._lock:
            _, content = self._first(unit, {"first_metadata": first_metadata}, deadline)
        return json.loads(content)

    def read(self, unit: Unit, roots: Sequence[str], moved: Moved) -> Iterator[Sample]:
        """The samples of a unit. One iterator at a time; where it is not taken to its end, `close` the process."""
        kind, content = self._first(unit, {"roots": list(roots)}, None)
        while kind != _END:
            if kind == _SAMPLES:
                try:
                    samples = _DECODER.decode(content)
                except msgspec.DecodeError as error:
                    self.close()
                    raise _died(unit, -signal.SIGABRT) from error
                for sample in samples:
                    yield _arrived(sample)
            moved()
            kind, content = self._frame(unit)

    def _first(self, unit: Unit, asked: dict[str, Any], deadline: float | None) -> tuple[bytes, bytes]:
        """Ask, and give the first frame of the answer."""
        request = json.dumps({"unit": unit.describe(), "cpu_s": CPU_S, "memory_bytes": decoded_bytes(), **asked})
        for is_last in (False, True):
            child = self._child or self._start()
            assert child.stdin is not None
            assert isinstance(child.stdout, io.BufferedReader)
            with suppress(BrokenPipeError):
                child.stdin.write(request.encode() + b"\n")
                child.stdin.flush()
            if deadline is not None:
                wait_s = max(0.0, deadline - time.monotonic())
                if not select.select([child.stdout], [], [], wait_s)[0]:
                    child.kill()
            if child.stdout.peek(1):
                return self._frame(unit)
            status = self._status()
            late = deadline is not None and time.monotonic() >= deadline
            if late:
                raise SourceError(f"{unit.source}: its reader has not answered in time", code=DIED)
            if is_last or status == -signal.SIGXCPU:
                raise self._failed(unit, status)
            # Whether it ended because nothing was asked, or somebody killed it: a fresh one tells.
        raise AssertionError("unreachable")

    def _frame(self, unit: Unit) -> tuple[bytes, bytes]:
        """The next part of an answer; raises the error where it is one, or where the process has died."""
        assert self._child is not None
        assert self._child.stdout is not None
        head = self._child.stdout.read(_FRAME.size)
        kind, length = _FRAME.unpack(head) if len(head) == _FRAME.size else (b"", 0)
        if length > _FRAME_MOST_BYTES:
            self._child.kill()
        content = self._child.stdout.read(length) if length <= _FRAME_MOST_BYTES else b""
        if not kind or len(content) != length:
            raise self._failed(unit, self._status())
        if kind == _ERROR:
            raise _error_of(json.loads(content))
        return kind, content

    def _failed(self, unit: Unit, status: int) -> EmbqError:
        """The error for a process that ended without an answer, or in the midst of one."""
        if status >= 0:
            return ConfigError(
                f"the process that reads tables ends with exit status {status}",
                next_step=f"check the installation: `{' '.join(self._command)} < /dev/null` says what is wrong",
            )
        return _died(unit, status)

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=_FRAME_BYTES,
            stderr=subprocess.DEVNULL,  # what a library says when it aborts is not for users
            # Allocators that reserve no more than they use, so that a limit of address space is one of memory.
            env=child_environment(ARROW_DEFAULT_MEMORY_POOL="system", MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="1"),
        )
        return self._child

    def _status(self) -> int:
        """Let the process end, which closing its pipes does; its exit status."""
        child, self._child = self._child, None
        if child is None:
            return 0
        with suppress(BrokenPipeError), child:  # closes the pipes and waits
            pass
        return child.returncode

    def close(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            if self._child is not None:
                self._child.kill()
        self._status()


def _command(idle_s: float) -> list[str]:
    return [sys.executable, "-P", "-m", "sources.inspection", str(idle_s)]


_PROCESS = Process(_command(IDLE_S))
_IDLE: list[Process] = []
"""Processes for units that wait for the next one."""


@atexit.register
def close() -> None:
    """End the processes; the next look starts one, with the environment as it is then."""
    _PROCESS.close()
    while _IDLE:
        _IDLE.pop().close()


def _died(unit: Unit, status: int | None = None) -> SourceError:
    if status is None:
        how = "when the run was planned, it ended the library that reads it"
    elif status == -signal.SIGXCPU:
        how = "the library that reads it comes to no end"
    else:
        how = f"it ends the library that reads it ({signal.Signals(-status).name})"
    return SourceError(
        f"{unit.source}: is damaged: {how}",
        code="reader_died",
        next_step="copy or write the file again",
        transient=status == -signal.SIGKILL,  # somebody killed it, or the system for want of memory
    )


def _error_of(described: dict[str, Any]) -> Exception:
    kind, fields = described["class"], described["fields"]
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, EmbqError)):
        return RuntimeError(f"{kind} while a table was looked at: {fields['message']}")
    error: EmbqError = found(fields.pop("message"), **fields)
    return error


_DECODER = msgspec.msgpack.Decoder(list[_Travelling])
_ENCODER = msgspec.msgpack.Encoder()


def _leaving(sample: Sample) -> _Travelling:
    key, error = sample.key.encode("utf-8", "surrogatepass"), sample.error
    told = None if error is None else (error[0], error[1].encode("utf-8", "surrogatepass"))
    return sample.ordinal, key, sample.image, sample.text, sample.metadata, told


def _arrived(told: _Travelling) -> Sample:
    ordinal, key, image, text, metadata, error = told
    return Sample(
        ordinal=ordinal,
        key=key.decode("utf-8", "surrogatepass"),
        image=image,
        text=text,
        metadata=metadata,
        error=None if error is None else (error[0], error[1].decode("utf-8", "surrogatepass")),
    )


# --- the other side ---


def serve(idle_s: float = IDLE_S) -> None:
    """Answer requests on stdin, one line each, until there are no more."""
    from core.process.children import die_with_parent

    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # of a terminal or systemd: for the parent, whose end closes the pipe
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    while select.select([sys.stdin], [], [], idle_s)[0] and (line := sys.stdin.buffer.readline()):
        request = json.loads(line)
        try:
            _answer(request, answers)
        except BrokenPipeError:  # nobody waits for it
            return


def _answer(request: dict[str, Any], answers: int) -> None:
    try:
        unit = Unit.from_description(request["unit"])
        _limit(unit, request["cpu_s"], request["memory_bytes"])
        with source_errors(unit.source):
            if "roots" in request:
                _send_samples(unit, request["roots"], answers)
            else:
                _send(answers, _ANSWER, json.dumps(_look(unit, request["first_metadata"])).encode())
    except EmbqError as error:
        fields: dict[str, Any] = {"message": error.message, "next_step": error.next_step, "code": error.code}
        if isinstance(error, SourceError):
            fields["transient"] = error.transient
        _send_error(answers, type(error).__name__, fields)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - a bug, which the parent raises
        _send_error(answers, type(error).__name__, {"message": repr(error)})


def _look(unit: Unit, metadata_of: int) -> Any:
    from sources.kinds import SOURCES

    source: Any = SOURCES[unit.kind]
    return _few(source.first_metadata(unit, metadata_of)) if metadata_of else source.inspect(unit)


def _send_samples(unit: Unit, roots: Sequence[str], answers: int) -> None:
    from sources.kinds import read_here

    told_at = time.monotonic()

    def moved() -> None:
        nonlocal told_at
        if time.monotonic() - told_at > _FRAME_S:
            told_at = time.monotonic()
            _send(answers, _MOVED)

    waiting: list[_Travelling] = []
    size, began = 0, 0.0
    for sample in read_here(unit, roots, moved=moved):
        began = began if waiting else time.monotonic()
        waiting.append(_leaving(sample))
        size += len(sample.image or b"") + len(sample.text or "") + len(sample.metadata or "")
        if len(waiting) >= _FRAME_SAMPLES or size >= _FRAME_BYTES or time.monotonic() - began > _FRAME_S:
            _send(answers, _SAMPLES, _ENCODER.encode(waiting))
            waiting, size, told_at = [], 0, time.monotonic()
    if waiting:
        _send(answers, _SAMPLES, _ENCODER.encode(waiting))
    _send(answers, _END)


def _send_error(answers: int, kind: str, fields: dict[str, Any]) -> None:
    _send(answers, _ERROR, json.dumps({"class": kind, "fields": fields}).encode())


def _send(answers: int, kind: bytes, content: bytes = b"") -> None:
    if len(content) > _FRAME_MOST_BYTES:
        raise MemoryError
    left = memoryview(_FRAME.pack(kind, len(content)) + content)
    while left:
        left = left[os.write(answers, left) :]


def _limit(unit: Unit, cpu_s: int, memory_bytes: int) -> None:
    """Bound what one request may take beyond what was used before it."""
    if unit.kind in ("parquet", "arrow"):  # libraries are no part of what is bounded
        import pyarrow.compute
        import pyarrow.parquet  # noqa: F401 - only loaded
    elif unit.kind == "hdf5":
        with suppress(ImportError):
            import h5py  # noqa: F401 - only loaded
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)
    with suppress(OSError):  # only Linux says how much address space is used
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)


def _lower(kind: int, limit: int) -> None:
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if most < 0 else min(limit, most), most))


def _few(texts: list[str]) -> list[str]:
    """The first of `texts`, not more than `ANSWER_CHARS` in all."""
    ends = accumulate(map(len, texts))
    return [text for text, end in zip(texts, ends, strict=True) if end <= ANSWER_CHARS]


if __name__ == "__main__":
    serve(float(sys.argv[1]))
