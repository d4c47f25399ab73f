"""Reads units in a process of its own, as a worker does: a damaged file may end it, or never end in it.

Run as a program it answers each line on stdin, a list of units as JSON, with one line: a count or a code for each unit.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from embq.core.errors import SourceError
from embq.core.units import Unit
from embq.sources.unit_reader import read

CPU_S = 5

Ended = int | str
"""End of a unit: its samples, or the code of the error; "died" where it ended the process."""

UNNAMED = "an error that does not name its source"


def ended(unit: Unit) -> Ended:
    """Read a unit."""
    try:
        count = sum(1 for _ in read(unit, ()))
    except SourceError as error:
        return error.code if unit.source in error.message else UNNAMED
    return count if unit.samples in (None, count) else "source_changed"  # the same as the read stage does


class Reading:
    """The process that reads, started anew after each death."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def of(self, units: Sequence[Unit]) -> list[Ended]:
        """Ends of the units of one file."""
        if self._process is None:
            command = [sys.executable, __file__]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([unit.describe() for unit in units]) + "\n")
        self._process.stdin.flush()
        if line := self._process.stdout.readline():
            found: list[Ended] = json.loads(line)
            return found
        self.close()
        return ["died"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(BrokenPipeError), process:
                pass


@contextmanager
def reading() -> Iterator[Reading]:
    """A process that reads."""
    process = Reading()
    try:
        yield process
    finally:
        process.close()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + CPU_S, most))
        sys.stdout.write(json.dumps([ended(Unit.from_description(one)) for one in json.loads(line)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
