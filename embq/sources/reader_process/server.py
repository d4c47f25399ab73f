"""Child side of the reader process: answers requests on stdin, each under limits of memory and processor time.

A process serves one request after the other, and ends when it is asked nothing for a while.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from embq.core.errors import EmbqError
from embq.core.process.children import STARTED, die_with_parent
from embq.core.process.limits import limit_memory
from embq.core.units import Sample, Unit
from embq.sources.access.allowed_hosts import Reach, limit
from embq.sources.access.files import source_errors
from embq.sources.kinds import source_for
from embq.sources.reader_process.protocol import (
    END,
    ERROR,
    FRAME,
    FRAME_BYTES,
    FRAME_MAX_BYTES,
    SAMPLES,
    encode_error,
    encode_samples,
)
from embq.sources.unit_reader import metadata_here, read_here

IDLE_S = 5.0
"""Idle time after which a process ends that is given no other: one for planning."""

_FRAME_SAMPLES, _FRAME_S = 64, 0.2
"""Most samples of a frame, and longest wait of the first of them; see also `FRAME_BYTES`."""


def serve(idle_s: float = IDLE_S) -> None:
    """Answer requests on stdin, one line each, until there are no more."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the group: the parent ends this process by its pipe
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    while select.select([sys.stdin], [], [], idle_s)[0] and (line := sys.stdin.buffer.readline()):
        request = json.loads(line)
        try:
            if "start" in request:
                _import_for(request["start"])
                os.write(answers, STARTED)
            else:
                _answer(request, answers)
        except BrokenPipeError:  # the parent is gone
            return


def _answer(request: dict[str, Any], answers: int) -> None:
    try:
        unit = Unit.from_description(request["unit"])
        _import_for(unit.kind)
        limit_memory(request["memory_bytes"], request["cpu_s"])
        limit(Reach.from_description(request["reach"]))
        with source_errors(unit.source):
            if "roots" in request:
                _send_samples(unit, request["roots"], request["only"], answers)
            else:
                _send(answers, END, json.dumps(_response(unit, request["first_metadata"])).encode())
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the parent raises it, a bug as RuntimeError
        _send(answers, ERROR, encode_error(error))


def _response(unit: Unit, metadata_of: int) -> Any:
    if metadata_of:
        return metadata_here(unit, metadata_of)
    source: Any = source_for(unit.kind)
    return source.inspect(unit)


def _send_samples(unit: Unit, roots: Sequence[str], only: int | None, answers: int) -> None:
    sent_at = time.monotonic()

    def on_progress() -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at > _FRAME_S:
            sent_at = time.monotonic()
            _send(answers, SAMPLES, encode_samples([]))

    waiting: list[Sample] = []
    size, began = 0, 0.0
    for sample in read_here(unit, roots, on_progress=on_progress, only=only):
        began = began if waiting else time.monotonic()
        waiting.append(sample)
        size += len(sample.image or b"") + len(sample.text or "") + len(sample.metadata or "")
        if len(waiting) >= _FRAME_SAMPLES or size >= FRAME_BYTES or time.monotonic() - began > _FRAME_S:
            _send(answers, SAMPLES, encode_samples(waiting))
            waiting, size, sent_at = [], 0, time.monotonic()
    _send(answers, END, encode_samples(waiting))


def _send(answers: int, kind: bytes, content: bytes) -> None:
    if len(content) > FRAME_MAX_BYTES:
        raise MemoryError
    rest = memoryview(FRAME.pack(kind, len(content)) + content)
    while rest:
        rest = rest[os.write(answers, rest) :]


def _import_for(kind: str) -> None:
    """Import the libraries of a kind of input, so that they count neither as memory nor as time of a request."""
    with suppress(EmbqError, ImportError):  # which the request meets again
        source_for(kind)  # perhaps of a plug-in
    if kind in ("parquet", "arrow"):
        import pyarrow.compute
        import pyarrow.parquet  # noqa: F401 - only loaded


if __name__ == "__main__":
    serve(*map(float, sys.argv[1:]))
