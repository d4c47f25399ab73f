"""A file of JSON lines, each at an epoch and a step, that can be cut back to where a training goes on.

A line goes to the kernel in one write, so that it is there when the process is killed right after. A line that was cut
off in a crash of the machine is taken for one that was never written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.storage.durable import drop, overwrite
from training.run.folder import append, writing


class Journal:
    """Appends lines to a file, and takes back those that are no longer true.

    Args:
        path: the file; it and its folder are made when they are needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed with this object

    def add(self, epoch: int, step: int, said: Mapping[str, Any]) -> None:
        """A line at a step, both counted from 0."""
        with writing(self.path):
            append(self._file, json.dumps({"epoch": epoch, "step": step, **said}).encode() + b"\n")

    def sync(self) -> None:
        """Make what was written survive a crash of the machine."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def cut(self, epoch: int, step: int) -> None:
        """Take back every line at this step and behind it."""
        self._keep(lambda line: (line["epoch"], line["step"]) < (epoch, step))

    def forget(self, epoch: int) -> None:
        """Drop the lines of earlier epochs than this."""
        self._keep(lambda line: line["epoch"] >= epoch)

    def _keep(self, which: Callable[[dict[str, Any]], bool]) -> None:
        kept = [line for line in lines(self.path) if which(line)]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in kept)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        drop(temporary)
        self._file.close()
        with writing(self.path):
            overwrite(self.path, data, temporary=temporary)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal that are whole; none where there is no file."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                with suppress(ValueError):  # zeros that a crash of the machine left, or what a full disk cut off
                    yield json.loads(line)
