"""Inputs that are cut or have a byte flipped, before they are planned or after: what is lost is always said.

Every damaged copy is planned as `embq enqueue` does, and its units are read as a worker does.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import embq.sources.reader_process.client
from embq.core.errors import InputError
from embq.core.units import Unit
from embq.testing.sources import ROWS, Case
from tests.contract.inputs import CASES, write_shard
from tests.contract.reading import CPU_S, UNNAMED, Ended, Reading, ended, reading

FILES = [case for case in CASES if case.kind != "files"]
PLAIN_TEXTS = ("csv", "jsonl", "lines")
BLOCK = 512


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
    """A damaged HDF5 file can keep its library busy for ever."""
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


def places_of(data: bytes) -> dict[str, range]:
    """The parts of an archive of `ROWS` that ends in zeros, by their offsets."""
    end = len(ROWS) * 4 * BLOCK  # two members for each, of one block behind a header
    assert any(data[end - BLOCK : end])
    assert not any(data[end:])
    return {"members": range(end), "end marker": range(end, end + 2 * BLOCK), "zeros": range(end, len(data))}


def test_a_shard_cut_at_500_places_or_with_200_flipped_bytes_loses_nothing_unsaid(tmp_path: Path) -> None:
    shard = Damaged(Case(kind="tar", write=write_shard, change=Path.touch, listing=[]), tmp_path)
    rng = random.Random(500)
    places = places_of(shard.whole)
    borders = [border + by for border in range(0, places["end marker"].stop + BLOCK, BLOCK) for by in (-1, 0, 1)]
    cuts = {
        *rng.sample(sorted({at for at in borders if 0 <= at < len(shard.whole)}), 240),
        *rng.sample(places["members"], 200),
        *rng.sample(places["end marker"], 40),
        *rng.sample(places["zeros"], 40),
    }
    copies = [shard.whole[:at] for at in sorted(cuts)][:500] + list(flipped(shard.whole, 200, rng))
    assert len(copies) == 700
    outcomes: Counter[Ended] = Counter()
    for copy in copies:
        shard.becomes(copy)
        for units in (shard.planned, shard.planned_now()):
            found = [ended(unit) for unit in units]
            assert_nothing_is_lost(units, found, len(ROWS))
            outcomes.update(found)
    # Each kind of damage was met, and what is harmless was not refused: a byte of a picture, the zeros at the end.
    assert {"shard_changed", "shard_truncated", "shard_no_end_marker", "shard_bad_header", len(ROWS)} <= set(outcomes)


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
