"""The processor time of each test with the processes that it started, and the list of what `make test` leaves out.

`make durations` records the times with `--record-durations FOLDER`, a file for each process that runs tests, and writes
the list from them. A function is listed whole if its cases take over QUICK seconds on average; a case is listed alone
if it does so by itself. A test that is not listed fails in `make test` if it takes over LIMIT seconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

QUICK = 0.25
"""Seconds of processor time that a test of `make test` may take."""

LIMIT = 3.0
"""Seconds of processor time from which a quick test fails: slow machines take twice as many as others."""

LIBRARIES = frozenset({"faiss", "open_clip", "pandas", "sentence_transformers", "timm", "torch", "transformers"})
"""Modules whose import takes long. The first test of a process that needs one is not measured."""

LIST = Path(__file__).parents[1] / "slower.txt"


def listed() -> frozenset[str]:
    """The functions and cases that take long, by their node ids."""
    return frozenset(LIST.read_text().split("\n")[:-1]) if LIST.exists() else frozenset()


class Recorder:
    """Plugin that records the processor time of each test in a file of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl").open("a", buffering=1)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with its fixtures, and with the processes that ended in it."""
        before, imported = _spent(), LIBRARIES & sys.modules.keys()
        try:
            return (yield)
        finally:
            if imported == LIBRARIES & sys.modules.keys():
                self._file.write(json.dumps([item.nodeid, round(_spent() - before, 3)]) + "\n")


class Limiter:
    """Plugin that leaves out what the list names, and fails tests that belong there."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail a test that takes over LIMIT seconds of processor time."""
        before, imported = _spent(), LIBRARIES & sys.modules.keys()
        yield
        if (seconds := _spent() - before) > LIMIT and imported == LIBRARIES & sys.modules.keys():
            pytest.fail(f"took {seconds:.1f} s of processor time, of at most {LIMIT} s: `make durations` lists it")


def _spent() -> float:
    """Seconds of processor time of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def slower(folder: Path) -> list[str]:
    """The functions and cases of the records that take over QUICK seconds, in order."""
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            name, taken = json.loads(line)
            cases = seconds[name.partition("[")[0]]
            # Of two records the longer: whoever is first of those that are left pays for what many share.
            cases[name] = max(taken, cases.get(name, 0.0))
    names = []
    for function, cases in seconds.items():
        if sum(cases.values()) / len(cases) > QUICK:
            names.append(function)
        else:
            names += [name for name, taken in cases.items() if taken > QUICK]
    return sorted(names)


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in slower(Path(sys.argv[1]))))
