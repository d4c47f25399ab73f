"""The processor time of each test with the processes that it started, and the list of what `make test` leaves out.

`make durations` records the times with `--record-durations FOLDER`, a file for each process that runs tests, and writes
the list from them. A function is listed whole if its cases take over QUICK seconds on average, or wait for over WAIT;
a case is listed alone if it does so by itself. A test that is not listed fails in `make test` if it takes over LIMIT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

QUICK = 0.25
"""Seconds of processor time that a test of `make test` may take."""

WAIT = 2.0
"""Seconds that a test of `make test` may wait, for whatever it is."""

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
        began, before, imported = time.monotonic(), _spent(), LIBRARIES & sys.modules.keys()
        try:
            return (yield)
        finally:
            if imported == LIBRARIES & sys.modules.keys():
                seconds = _spent() - before
                record = [item.nodeid, round(seconds, 3), round(max(0.0, time.monotonic() - began - seconds), 3)]
                self._file.write(json.dumps(record) + "\n")


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
    """The functions and cases of the records that take or wait too long, in order.

    Of several records of a case the longer time counts, because whoever comes first pays for what many share, and the
    shorter wait, because a busy machine lets all wait.
    """
    cases: dict[str, tuple[float, float]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            name, taken, waited = json.loads(line)
            before = cases.get(name, (0.0, waited))
            cases[name] = max(taken, before[0]), min(waited, before[1])
    functions = defaultdict(list)
    for name, times in cases.items():
        functions[name.partition("[")[0]].append(times)
    averages = {name: [mean(column) for column in zip(*times, strict=True)] for name, times in functions.items()}
    whole = {name for name, times in averages.items() if _is_slow(*times)}
    alone = {name for name, times in cases.items() if _is_slow(*times) and name.partition("[")[0] not in whole}
    return sorted(whole | alone)


def _is_slow(taken: float, waited: float) -> bool:
    return taken > QUICK or waited > WAIT


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in slower(Path(sys.argv[1]))))
