"""While one shard is embedded the next is fetched: as a whole, within its bound, and only for who still wants it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embq.core.errors import SourceError
from embq.core.queue.hints import Hint
from embq.core.queue.runs import RunRecord
from embq.core.units import Unit
from embq.sources.access import ranged_reads
from embq.sources.access.read_ahead import ReadAhead
from embq.sources.interface import unwatched
from embq.sources.kinds import SOURCES
from embq.sources.unit_reader import fetchable, read
from embq.testing.sources import OPTIONS
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages.batching import BATCHES_AHEAD
from embq.worker.stages.pipeline import Pipeline
from embq.worker.stages.publish import Publisher
from tests.contract.test_remote import content
from tests.e2e.session import write_tar
from tests.support.servers.storage import HttpServer, http_server
from tests.support.waiting import wait_until
from tests.unit.test_pipeline import complete
from tests.unit.test_stages import MODEL, AnsweringLedger

SAMPLES = 60
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged_reads, "PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(ranged_reads, "SMALL_BYTES", 5000)
    monkeypatch.setattr(ranged_reads, "LARGE_BYTES", 5000)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[HttpServer]:
    """Shards 0.tar to 3.tar behind a slow line."""
    folder = tmp_path / "web"
    folder.mkdir()
    for number in range(4):
        members = [(f"{number}-{n:02d}.txt", f"text {n} of shard {number}".encode()) for n in range(SAMPLES)]
        write_tar(folder / f"{number}.tar", members)
    with http_server(folder) as server:
        server.latency_s, server.bytes_per_s = 0.005, 2_000_000.0
        yield server


@pytest.fixture
def ahead() -> Iterator[ReadAhead]:
    ahead = ReadAhead()
    yield ahead
    ahead.close()


def units(web: HttpServer, count: int = 4) -> list[Unit]:
    found = [unit for n in range(count) for unit in SOURCES["tar"].split(f"{web.url}/{n}.tar", OPTIONS)]
    web.sent.clear()
    return found


def size(unit: Unit) -> int:
    assert unit.stop is not None
    return unit.stop


def begin(ahead: ReadAhead, unit: Unit) -> bool:
    return ahead.begin(unit, lambda: True)


class Publishing(Publisher):
    """Takes what is complete."""

    def __init__(self, leases: Leases) -> None:
        self.leases, self.done = leases, []  # type: ignore[var-annotated]

    def run(self, work: LeasedUnit) -> None:
        self.done.append(work)
        self.leases.remove(work)


def test_the_next_shard_is_fetched_as_a_whole_while_the_device_has_the_first_batch_of_the_one_before(
    web: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = units(web, 3)
    embedder = load(MODEL, "cpu")
    assert 2 * BATCHES_AHEAD * embedder.batch_size < SAMPLES, "or the reader could be done with the first shard"
    leases, ledger = Leases(), AnsweringLedger()
    publishing = Publishing(leases)
    embed, waited = embedder.embed, []

    def embed_once_the_next_ones_have_come(batch: Any) -> Any:
        if not waited:
            waited.append(True)
            for unit in (second, third):
                wait_until(lambda unit=unit: web.sent_of(unit.source[-5:]) == size(unit), DEADLINE_S)
        return embed(batch)

    monkeypatch.setattr(embedder, "embed", embed_once_the_next_ones_have_come)
    pipeline = Pipeline(embedder, leases, Meter(2), publishing, prefetch=3)
    works = [work_of(unit, u, ledger) for u, unit in enumerate((first, second, third))]
    complete(pipeline, leases, works)
    assert waited
    assert publishing.done == works
    assert [len(work.samples) for work in works] == [SAMPLES] * 3
    assert [web.sent_of(unit.source[-5:]) for unit in (first, second, third)] == [size(first)] * 3, "each once"


def work_of(unit: Unit, u: int, ledger: Any) -> LeasedUnit:
    record = RunRecord(run="r", output="/nowhere", model=MODEL, units=9)
    return LeasedUnit(Hint(run="r", gen="1-0", u=u, unit=unit), record, ledger, f"t{u}", attempts=0, poison=frozenset())


def test_what_was_fetched_is_what_would_have_been_read(web: HttpServer, ahead: ReadAhead) -> None:
    unit, other = units(web, 2)
    plain = content(list(read(unit, [])))
    web.sent.clear()
    assert begin(ahead, unit)
    with ahead.in_use():
        assert content(list(read(unit, []))) == plain
        assert web.sent_of("0.tar") == size(unit), "fetched once"
        assert len(content(list(read(other, [])))) == SAMPLES
        assert content(list(read(unit, []))) == plain
    assert web.sent_of("0.tar") == 2 * size(unit), "what was taken is not kept"


def test_who_waits_for_a_file_that_is_on_its_way_is_told_of_what_comes_in(web: HttpServer, ahead: ReadAhead) -> None:
    (unit,) = units(web, 1)
    asked: list[int] = []
    told: list[int] = []

    def wanted() -> bool:
        asked.append(1)
        if len(asked) > 2:  # when it begins, and for the first piece
            wait_until(lambda: told, DEADLINE_S)
        return True

    assert ahead.begin(unit, wanted)
    assert ahead.pop(unit, lambda: told.append(1)) is not None
    assert told


def test_files_to_come_take_no_more_memory_than_they_may(web: HttpServer) -> None:
    first, second, third, _ = units(web)
    ahead = ReadAhead(most_bytes=2 * size(first) + 100)
    assert [begin(ahead, unit) for unit in (first, second, third)] == [True, True, False]
    assert begin(ahead, first), "it is there already"
    assert ahead.held_bytes == 2 * size(first)
    assert ahead.pop(first, unwatched) is not None
    assert ahead.pop(third, unwatched) is None
    assert begin(ahead, third)
    assert web.sent_of("0.tar") == size(first)
    ahead.close()
    assert ahead.held_bytes == 0
    assert not begin(ahead, first)


def test_what_nobody_wants_any_more_is_not_fetched_to_its_end_and_not_kept(
    web: HttpServer, ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged_reads, "SMALL_BYTES", 1000)
    monkeypatch.setattr(ranged_reads, "LARGE_BYTES", 1000)
    first, second = units(web, 2)
    work = SimpleNamespace(lost=False)

    def wanted() -> bool:
        work.lost = work.lost or bool(web.sent_of("0.tar"))
        return not work.lost

    assert ahead.begin(first, wanted)
    assert begin(ahead, second)
    wait_until(lambda: web.sent_of("1.tar") == size(second), DEADLINE_S)  # after the first, by the same thread
    assert work.lost
    ahead.let_go()
    assert ahead.held_bytes == size(second)
    assert ahead.pop(first, unwatched) is None
    assert web.sent_of("0.tar") <= (1 + ranged_reads.PARALLEL) * 1000 < size(first)


def test_only_whole_files_that_may_be_read_are_fetched_before_their_turn() -> None:
    def may(source: str, *roots: str, kind: str = "tar") -> bool:
        return fetchable(Unit(kind=kind, source=source, stop=1), roots)

    assert may("https://host/data/a.tar")
    assert may("https://host/data/a.tar", "https://host/data")
    assert not may("https://host/data/a.tar", "https://host/other")
    assert not may("https://host/data/a.txt", kind="lines")
    assert not may("/data/a.tar")
    assert not may("pipe:cat a.tar")
    assert not may("file:///data/a.tar")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shard_that_changed_is_refused_though_it_was_fetched(web: HttpServer, ahead: ReadAhead, when: str) -> None:
    (unit,) = units(web, 1)
    if when == "after":
        assert begin(ahead, unit)
        wait_until(lambda: web.sent_of("0.tar") == size(unit), DEADLINE_S)
    (web.folder / "0.tar").write_bytes(bytes(size(unit)))
    assert begin(ahead, unit)
    with ahead.in_use(), pytest.raises(SourceError) as caught:
        list(read(unit, []))
    assert caught.value.code == "shard_changed"


def test_a_fetch_that_failed_leaves_it_to_the_reader(web: HttpServer, ahead: ReadAhead) -> None:
    (unit,) = units(web, 1)
    web.suffer("denied", 1)
    assert begin(ahead, unit)
    wait_until(lambda: web.left == 0, DEADLINE_S)
    with ahead.in_use():
        assert len(content(list(read(unit, [])))) == SAMPLES
