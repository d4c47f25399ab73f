"""Pipe from a worker process to its supervisor: its state, models that it cannot load, and why it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping

WAITING, LOADING, READY, FINISHED = b"W", b"L", b"R", b"F"
"""States: waiting for work; loading a model; the model is loaded and has embedded something; a unit is finished.
Between them stand lines of JSON, each between two line ends: see `Report.refuse`, `Report.end` and `Report.paths`."""
PIPE_BYTES = 4096
"""Most bytes that a pipe takes atomically, so that the supervisor reads whole lines (pipe(7), PIPE_BUF)."""


class Report:
    """Reports the state of this process to its supervisor.

    Args:
        descriptor: the pipe to it; -1 for nowhere.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._state = b""
        self._has_finished = False

    def say(self, word: bytes) -> None:
        """Report WAITING, LOADING or READY, where the state has changed."""
        if self._descriptor >= 0 and word != self._state:
            self._state = word
            os.write(self._descriptor, word)

    def finished(self) -> None:
        """Report, once, that this process has finished a unit."""
        if self._descriptor >= 0 and not self._has_finished:
            self._has_finished = True
            os.write(self._descriptor, FINISHED)

    def refuse(self, model: str, why: str) -> None:
        """Report a model that cannot be loaded here, and the reason."""
        if not self._write({"model": model, "why": why[:1000]}):
            self._write({"model": model[:500], "why": "its log tells"})

    def end(self, why: str, next_step: str = "") -> None:
        """Report why this process ends, and the next step; shown to the user where the device is given up."""
        self._write({"ends": why[:300], "next": next_step[:300]})

    def paths(self, names: Collection[str]) -> None:
        """Report the optional compute paths that are tried or used, see `embq.worker.supervisor.slot.PathMemory`."""
        self._write({"paths": list(names)})

    def _write(self, line: Mapping[str, object]) -> bool:
        """Whether the line fits."""
        text = f"\n{json.dumps(line)}\n"
        if len(text) > PIPE_BYTES:
            return False
        if self._descriptor >= 0:
            os.write(self._descriptor, text.encode())
        return True
