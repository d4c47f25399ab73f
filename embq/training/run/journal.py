"""JSON-lines files whose lines carry an epoch and a step, so that they can be cut back to a checkpoint.

A line reaches the kernel in one write, so it survives a kill right after it. A line without its end, which a full disk
or a crash of the machine leaves, is ignored.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from embq.core.storage.beneath import SMALL_BYTES, open_appending, open_regular
from embq.core.storage.durable import overwrite
from embq.training.run.folder import writing


class Journal:
    """Appends lines to a file, which is created with its folder. All methods raise OutputError for a failed write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(open_appending(path), "ab", buffering=0)  # noqa: SIM115 - closed with this object

    def add(self, epoch: int, step: int, fields: Mapping[str, Any]) -> None:
        """Append a line at a step; epoch and step count from 0."""
        with writing(self.path):
            append(self._file, json.dumps({"epoch": epoch, "step": step, **fields}).encode() + b"\n")

    def sync(self) -> None:
        """Make the lines durable."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def cut(self, epoch: int, step: int) -> None:
        """Remove the lines of this step and of later ones."""
        self._keep(lambda line: (line["epoch"], line["step"]) < (epoch, step))

    def forget(self, epoch: int) -> None:
        """Remove the lines of epochs before this one."""
        self._keep(lambda line: line["epoch"] >= epoch)

    def _keep(self, which: Callable[[dict[str, Any]], bool]) -> None:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines(self.path) if which(line))
        self._file.close()
        with writing(self.path):
            overwrite(self.path, data)
            self._file = open(open_appending(self.path), "ab", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a journal; none if there is no file."""
    if not path.exists():
        return
    with writing(path), open_regular(path) as file:
        while line := file.readline(SMALL_BYTES):
            if line.endswith(b"\n"):
                with suppress(ValueError):  # zeros after a crash of the machine, or a line that a full disk cut
                    yield json.loads(line)


def append(file: io.FileIO, data: bytes) -> None:
    """Write in one call; OSError if a disk that is nearly full takes only a part."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
