"""Looking into inputs while planning, in a process of its own: into tables, and at the first metadata of any kind.

A damaged file can end the library that reads it, or keep it busy for ever, and must not take `embq enqueue` along.

One process serves all files, one after the other, and ends when nothing was asked for a while. A worker reads tables in
its own process: its supervisor sees it die, and the unit fails.
"""

from __future__ import annotations

import atexit
import json
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from core import errors
from core.errors import ConfigError, EmbqError, SourceError
from core.units import Unit

CPU_S = 300
"""Processor time for one file. A sound table takes milliseconds, an HDF5 file of a million datasets two minutes."""

IDLE_S = 5.0
"""A process that was asked nothing for so long ends: planning is over, or far from tables."""

ANSWER_CHARS = 1_000_000
"""Metadata that is given back of one unit."""

DIED = "reader_died"
"""The code of the error for a file that ended the process that looked at it, and the option of the unit that stands for
it, so that no worker opens it."""


def inspect(unit: Unit) -> Any:
    """What the `inspect` of the unit's source gives, asked in another process.

    Raises what that raises, and SourceError `DIED` where the process died, or took too long.
    """
    return _PROCESS.ask(unit)


def first_metadata(unit: Unit, most: int, *, wait_s: float) -> list[str]:
    """What `sources.base.Described.first_metadata` gives, asked in another process.

    Raises what that raises, and SourceError `DIED` where the process died, or had not answered after `wait_s`.
    """
    found: list[str] = _PROCESS.ask(unit, wait_s=wait_s, first_metadata=most)
    return found


def marked(unit: Unit) -> Unit:
    """The unit that stands for a file which no worker should open."""
    return replace(unit, options=tuple(sorted((*unit.options, (DIED, "while it was planned")))))


def refuse_marked(unit: Unit) -> None:
    """Raise SourceError `DIED` for such a unit."""
    if DIED in dict(unit.options):
        raise _died(unit)


class Process:
    """The process that looks, started when it is needed.

    Args:
        command: starts one, which calls `serve`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, unit: Unit, *, first_metadata: int = 0, wait_s: float | None = None) -> Any:
        """The answer of `inspect`, or the metadata of so many samples.

        Args:
            wait_s: for so long the answer is waited for; None waits as long as it takes.
        """
        asked = {"unit": unit.describe(), "cpu_s": CPU_S, "first_metadata": first_metadata}
        request = json.dumps(asked).encode() + b"\n"
        deadline = None if wait_s is None else time.monotonic() + wait_s
        with self._lock:
            answer, status = self._exchange(request, deadline)
            late = deadline is not None and time.monotonic() >= deadline
            if not answer and status != -signal.SIGXCPU and not late:
                # Whether it ended because nothing was asked, or somebody killed it: a fresh one tells.
                answer, status = self._exchange(request, deadline)
        if not answer and status >= 0:
            raise ConfigError(
                f"the process that looks into tables ends with exit status {status}",
                next_step=f"check the installation: `{' '.join(self._command)} < /dev/null` says what is wrong",
            )
        if not answer:
            raise _died(unit, status)
        found = json.loads(answer)
        if "error" in found:
            raise _error_of(found["error"])
        return found["answer"]

    def _exchange(self, request: bytes, deadline: float | None) -> tuple[bytes, int]:
        """The answer, or b"" and the exit status of the process that gave none."""
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write(request)
            child.stdin.flush()
        if deadline is not None and not select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            child.kill()
        answer = child.stdout.readline()
        if answer.endswith(b"\n"):
            return answer, 0
        return b"", self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a library says when it aborts is not for users
        )
        return self._child

    def _end(self) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        with suppress(BrokenPipeError), child:  # closes the pipes, which ends it, and waits
            pass
        return child.returncode

    def close(self) -> None:
        """Let the process end."""
        with self._lock:
            self._end()


_PROCESS = Process([sys.executable, "-P", "-m", "sources.inspection"])


def close() -> None:
    """Let the process that looks end; the next look starts one, with the environment as it is then."""
    _PROCESS.close()


def _died(unit: Unit, status: int | None = None) -> SourceError:
    if status is None:
        how = "when the run was planned, it ended the library that reads it"
    elif status == -signal.SIGXCPU:
        how = "the library that reads it comes to no end"
    else:
        how = f"it ends the library that reads it ({signal.Signals(-status).name})"
    return SourceError(
        f"{unit.source}: is damaged: {how}", code="reader_died", next_step="copy or write the file again"
    )


def _error_of(described: dict[str, Any]) -> Exception:
    kind, fields = described["class"], described["fields"]
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, EmbqError)):
        return RuntimeError(f"{kind} while a table was looked at: {fields['message']}")
    error: EmbqError = found(fields.pop("message"), **fields)
    return error


# --- the other side ---


def serve() -> None:
    """Answer requests on stdin, one line each, until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the pipe
    answers, sys.stdout = sys.stdout, sys.stderr
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.buffer.readline()):
        request = json.loads(line)
        asked = Unit.from_description(request["unit"]), request["cpu_s"], request["first_metadata"]
        answers.write(json.dumps(_answer(*asked)) + "\n")
        answers.flush()


def _answer(unit: Unit, cpu_s: int, first_metadata: int) -> dict[str, Any]:
    from sources.kinds import SOURCES

    used = resource.getrusage(resource.RUSAGE_SELF)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))
    try:
        source: Any = SOURCES[unit.kind]
        if first_metadata:
            return {"answer": _few(source.first_metadata(unit, first_metadata))}
        return {"answer": source.inspect(unit)}
    except EmbqError as error:
        fields: dict[str, Any] = {"message": error.message, "next_step": error.next_step, "code": error.code}
        if isinstance(error, SourceError):
            fields["transient"] = error.transient
        return {"error": {"class": type(error).__name__, "fields": fields}}
    except Exception as error:  # noqa: BLE001 - a bug, which the parent raises
        return {"error": {"class": type(error).__name__, "fields": {"message": repr(error)}}}


def _few(texts: list[str]) -> list[str]:
    """The first of `texts`, not more than `ANSWER_CHARS` in all."""
    ends = accumulate(map(len, texts))
    return [text for text, end in zip(texts, ends, strict=True) if end <= ANSWER_CHARS]


if __name__ == "__main__":
    serve()
