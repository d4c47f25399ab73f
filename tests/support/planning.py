"""Plans: the units and samples of an input, what a folder holds, and processes or threads that work at once."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embq.core.units import Sample, Unit
from embq.sources.kinds import SOURCES, detect
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read


def units_of(path: Path, **options: Any) -> list[Unit]:
    """Units of a file or folder, split with these `ReadOptions`."""
    ((kind, found),) = detect(str(path))
    return list(SOURCES[kind].split(found, ReadOptions(**options)))


def samples_of(path: Path, **options: Any) -> list[Sample]:
    """Samples of a file or folder, in order."""
    return [sample for unit in units_of(path, **options) for sample in read(unit, ())]


def code(sample: Sample) -> str | None:
    """Code of the failure of a sample."""
    return sample.error[0] if sample.error else None


def snapshot(root: Path) -> dict[str, bytes]:
    """Content of each file below a folder, by its path there."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def call_at_once(call: Callable[[int], object], count: int) -> None:
    """Call it in threads that begin at the same moment, each with its number, and wait for all."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait()
        call(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_at_once(command: Sequence[str], count: int, *, cwd: Path | None = None) -> list[str]:
    """Start processes that print "ready", let all of them go on at once, and give the rest of each one's output."""
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=cwd, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return answers
