"""Reads the logs that `embq run` writes of its services, for `embq logs`, the page of a run, and `embq run` itself."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from embq.core.errors import InputError
from embq.core.redaction import masked, printable
from embq.core.storage.beneath import open_file

SERVICES = ("producer", "worker", "writer")

LINE_BYTES = 4 << 10
"""Read from the end of a log for each line that is wanted; most lines have less than 200."""

EVENT = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ )?(?P<level>debug|info|warning|error|critical)\b")


class LogLine(NamedTuple):
    """A line as a terminal may show it. One without a time or a level, as of a traceback, has those of the line before
    it; "" at the start."""

    time: str
    level: str
    text: str


class ServiceLog:
    """The log of one service, read from where the last reading ended.

    Args:
        folder: on this machine, such as the one with the local files of a run.
        path: of the log, below `folder`; no part of it may be a link.
        start: bytes to skip.
    """

    def __init__(self, folder: Path, path: str, start: int = 0) -> None:
        self.service = Path(path).stem
        self._folder, self._path = folder, path
        self._at = start
        self._time = self._level = ""

    def size(self) -> int | None:
        """Bytes of the log; None if there is none."""
        with suppress(FileNotFoundError), open(self._open(), "rb") as file:
            return file.seek(0, os.SEEK_END)
        return None

    def new_lines(self, most: int | None = None) -> list[LogLine]:
        """The complete lines since the last call; the last `most` of them, of at most this many times `LINE_BYTES`."""
        with suppress(FileNotFoundError), open(self._open(), "rb") as file:
            if most is not None and (near := file.seek(0, os.SEEK_END) - (most + 1) * LINE_BYTES) > self._at:
                file.seek(near)
                self._at = near + len(file.readline())
            file.seek(self._at)
            return list(deque(self._complete(file), maxlen=most))
        return []

    def _open(self) -> int:
        return open_file(self._folder, self._path, os.O_RDONLY)

    def _complete(self, file: Iterator[bytes]) -> Iterator[LogLine]:
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            self._at += len(raw)
            line = raw[:-1].decode("utf-8", "replace")
            if event := EVENT.match(line):
                self._time, self._level = event["time"] or self._time, event["level"]
            yield LogLine(self._time, self._level, masked(printable(line)))


def logs_of(home: Path, services: tuple[str, ...] = SERVICES) -> list[ServiceLog]:
    """The logs of these services of a run; InputError if none of them is on this machine."""
    logs = [ServiceLog(home, f"_logs/{service}.log") for service in services]
    if not any(log.size() is not None for log in logs):
        raise InputError(
            f"{home} has no log of {' or '.join(services)} on this machine",
            next_step="`embq run` writes logs to OUT/_logs; of resident services: docker compose logs, or journalctl",
        )
    return logs
