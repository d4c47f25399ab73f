"""Inputs that are cut or have a byte flipped, before they are planned or after: what is lost is always said.

Every damaged copy is planned as `embq enqueue` does, and its units are read as a worker does.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import embq.sources.reader_process.client
from embq.core.errors import InputError
from embq.core.units import Unit
from embq.testing.sources import ROWS, Case
from tests.contract.inputs import CASES
from tests.contract.reading import CPU_S, UNNAMED, Ended, Reading, reading

FILES = [case for case in CASES if case.kind != "files"]
PLAIN_TEXTS = ("csv", "jsonl", "lines")


@pytest.fixture(params=FILES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    case = request.param
    assert isinstance(case, Case)
    return case


@pytest.fixture(scope="module")
def reader() -> Iterator[Reading]:
    with reading() as process:
        yield process


@pytest.fixture(autouse=True)
def soon_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file can keep a library busy for ever."""
    monkeypatch.setattr(embq.sources.reader_process.client, "CPU_S", CPU_S)


def flipped(data: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    """Copies of `data` with one byte changed at random."""
    for _ in range(count):
        copy = bytearray(data)
        copy[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        yield bytes(copy)


class Damaged:
    """A file that is damaged again and again.

    Attributes:
        planned: the units of the whole one.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.path = case.write(folder)
        self.whole = self.path.read_bytes()
        self.planned = case.split(self.path)
        self._case = case
        self._status = self.path.stat()

    def becomes(self, data: bytes) -> None:
        """Put other bytes there; the version stays, as with a disk that forgets, where the length does."""
        self.path.write_bytes(data)
        os.utime(self.path, ns=(self._status.st_atime_ns, self._status.st_mtime_ns))

    def planned_now(self) -> list[Unit]:
        """The units as planned from what is there; [] where it is refused with its name."""
        try:
            return self._case.split(self.path)
        except InputError as error:
            return [] if str(self.path) in error.message else self.planned


def assert_nothing_is_lost(units: list[Unit], found: list[Ended], keys: int) -> None:
    """A unit failed with a name, or there are as many samples as an untouched copy has keys."""
    assert UNNAMED not in found
    assert any(isinstance(one, str) for one in found) or sum(map(int, found)) >= keys, (units, found)


# --- shards ---


# --- every kind ---


def test_an_input_that_is_damaged_after_it_was_planned_loses_nothing_unsaid(
    case: Case, tmp_path: Path, reader: Reading
) -> None:
    damaged = Damaged(case, tmp_path)
    rng = random.Random(str(case))
    copies = [damaged.whole[: rng.randrange(len(damaged.whole))] for _ in range(5)]
    for copy in [*copies, *flipped(damaged.whole, 60, rng)]:
        damaged.becomes(copy)
        assert_nothing_is_lost(damaged.planned, reader.of(damaged.planned), len(ROWS))
    damaged.becomes(damaged.whole)
    assert sum(map(int, reader.of(damaged.planned))) == len(ROWS)


def test_an_input_that_is_planned_damaged_loses_nothing_unsaid(case: Case, tmp_path: Path, reader: Reading) -> None:
    damaged = Damaged(case, tmp_path)
    rng = random.Random(f"planned {case}")
    copies = [damaged.whole[: rng.randrange(1, len(damaged.whole))] for _ in range(30)]
    for copy in [*copies, *flipped(damaged.whole, 60, rng)]:
        damaged.becomes(copy)
        units = damaged.planned_now()
        found = reader.of(units)
        if units and case.kind in PLAIN_TEXTS and not case.form:
            # Nothing in a plain text says how long it was: what its lines are is what counts.
            assert len(found) == len(units)
            assert case.kind == "csv" or sum(map(int, found)) == len(copy.removesuffix(b"\n").split(b"\n"))
        else:
            assert_nothing_is_lost(units, found, len(ROWS) if units else 0)
