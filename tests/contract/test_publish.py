"""The publish stage of a worker on a real ledger: how a result is staged, and what a disk does to that."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest

from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import OutputError, OutsideError
from embq.core.queue.hints import Hint
from embq.core.queue.keys import MAX_ATTEMPTS
from embq.core.queue.result_stream import PublishVerdict
from embq.core.storage.durable import link
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.meter.meter import Meter
from embq.worker.stages import publish as module
from embq.worker.stages.publish import PublishStage
from tests.support.fakes.clock import FakeClock
from tests.support.outputs.run_case import DIM, FINGERPRINT, MakeRun, RunCase, make_case, next_file_is, sample, vector

LARGE = 16 << 20


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
def stage() -> PublishStage:
    return PublishStage(Meter(), fingerprint=FINGERPRINT, dims={"text": DIM}, transport="staging")


def embedded_unit(run: RunCase, leases: Leases, u: int) -> LeasedUnit:
    """A unit of 3 samples that has only to be published."""
    hint = Hint(run=run.info.run, gen=run.gen, u=u, unit=run.units[u])
    work = LeasedUnit(hint, run.record, run.ledger, run.claim(u), attempts=0, poison=frozenset())
    samples = [sample(u, ordinal) for ordinal in range(3)]
    work.add_rows(samples, {"text": np.array([vector(u, s.ordinal) for s in samples], run.record.rows.dtype)})
    work.end_of_read(3)
    leases.add(work)
    return work


@pytest.fixture
def on_full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """The lines that say that the disk is full."""
    told: list[logging.LogRecord] = []
    keep = logging.Handler()
    keep.emit = told.append  # type: ignore[method-assign]
    keep.addFilter(lambda record: "staging_full" in record.getMessage())
    logging.getLogger("worker").addHandler(keep)
    yield told
    logging.getLogger("worker").removeHandler(keep)


def test_a_staged_result_becomes_rows(run: RunCase, stage: PublishStage, leases: Leases) -> None:
    writer = run.writer()
    stage.run(embedded_unit(run, leases, 0))
    writer.drain()
    run.assert_exact([0])
    assert leases.snapshot() == []


def test_a_full_disk_is_waited_out_with_the_result_in_hand(
    run: RunCase, stage: PublishStage, leases: Leases, on_full: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = run.writer()
    for u in (0, 1):
        work = embedded_unit(run, leases, u)
        next_file_is("/dev/full", monkeypatch)
        stage.run(work)
        assert len(on_full) == u + 1, "said once for each time that it fills up"
        assert stage.full_runs() == {run.info.run}
        assert leases.snapshot() == [work]
        wait_for_room(stage)
    writer.drain()
    run.assert_exact([0, 1])


def test_a_full_disk_is_tried_at_twice_the_interval_each_time_until_it_takes_a_result(
    run: RunCase, stage: PublishStage, leases: Leases, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    takes = {5}
    real = module.written

    @contextmanager
    def mostly_full(*place: Any, **names: str) -> Iterator[IO[bytes]]:
        tried.append(round(clock() - 1000.0, 3))
        with real(*place, **names) if len(tried) in takes else open("/dev/full", "wb") as file:
            yield file

    monkeypatch.setattr(module, "written", mostly_full)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    run.writer()
    stage.run(embedded_unit(run, leases, 0))
    stage.run(embedded_unit(run, leases, 1))
    assert tried == [0.0], "the second result waits behind the first"
    assert run.ledger.next_units(run.gen, 5, queue_empty=True, reap_at=0) == ([], []), "its units are hinted"
    while len(tried) < 14:
        clock.advance(0.001)
        stage.again()
    intervals = [round(after - before, 3) for before, after in pairwise(tried)]
    fresh = [0.05, 0.1, 0.2, 0.4]
    # The fifth is taken, and the second result is offered at once; a second is the longest interval.
    assert intervals == pytest.approx([*fresh, 0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], abs=0.002)


def wait_for_room(stage: PublishStage) -> None:
    """Offer what was set aside until nothing is."""
    deadline = time.monotonic() + 10
    while stage.full_runs() and time.monotonic() < deadline:
        time.sleep(0.01)
        stage.again()
    assert stage.full_runs() == frozenset()


def test_a_run_without_room_holds_up_no_other(make_run: MakeRun, stage: PublishStage, leases: Leases) -> None:
    full, other = make_run(3), make_run(2)
    writers = [run.writer() for run in (full, other)]
    first = embedded_unit(full, leases, 0)
    stage.run(first)
    full.client.hset(full.key("meta"), "limit_entries", 1)
    held = [embedded_unit(full, leases, u) for u in (1, 2)]
    for work in held:
        stage.run(work)
    stage.again()
    assert stage.full_runs() == {full.info.run}
    for u in (0, 1):
        stage.run(embedded_unit(other, leases, u))
    assert leases.snapshot() == held
    writers[1].drain()
    other.assert_exact([0, 1])
    writers[0].drain()  # which makes room for one at a time
    deadline = time.monotonic() + 10
    while stage.full_runs() and time.monotonic() < deadline:
        time.sleep(0.01)
        stage.again()
        writers[0].drain()
    full.assert_exact([0, 1, 2])
    assert leases.snapshot() == []


@pytest.mark.parametrize("clients", ["0", "50%"], ids=["command refused", "client disconnected"])
def test_a_result_that_the_broker_has_no_memory_for_holds_up_no_other(
    clients: str, own_server: EmbeddedServer, tmp_path: Path, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(own_server.url, patient=True) as client:  # as of a worker, which waits for a server that is full
        large, other = (make_case(client, tmp_path / name) for name in ("large", "other"))
        writers = [run.writer() for run in (large, other)]
        stage = PublishStage(Meter(), fingerprint=FINGERPRINT, dims={"text": DIM}, transport="payload")
        publish = large.ledger.publish

        def publish_large(u: int, token: str, fields: dict[str, Any], *, size: int) -> PublishVerdict:
            return publish(u, token, {**fields, "more": b"-" * LARGE}, size=LARGE)

        client.config_set("maxmemory-clients", clients)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (8 << 20))
        with monkeypatch.context() as patch:
            patch.setattr(large.ledger, "publish", publish_large)
            stage.run(embedded_unit(large, leases, 0))
        assert stage.full_runs() == {large.info.run}
        stage.run(embedded_unit(other, leases, 0))
        writers[1].drain()
        other.assert_exact([0])
        wait_for_room(stage)
        writers[0].drain()
        large.assert_exact([0])


def test_a_run_without_room_gets_no_hints_until_it_has(run: RunCase) -> None:
    writer, feeder = run.writer(), run.feeder()
    feeder.tick()
    popped = run.pop()
    assert popped is not None
    run.work_one(0 if popped.u else 1)
    run.client.hset(run.key("meta"), "limit_entries", 1)
    run.ledger.hint_again(popped.u)

    def hinted() -> tuple[list[int], list[int]]:
        return run.ledger.next_units(run.gen, 5, queue_empty=True, reap_at=0)

    assert hinted() == ([], [])
    writer.drain()
    assert hinted()[0] == [popped.u], "at once, in front of others"


def test_what_is_set_aside_is_not_at_work(run: RunCase, stage: PublishStage, leases: Leases) -> None:
    run.writer()
    stage.run(embedded_unit(run, leases, 0))
    run.client.hset(run.key("meta"), "limit_entries", 1)
    stage.run(held := embedded_unit(run, leases, 1))
    assert leases.snapshot() == [held]
    assert leases.at_work() == []
    assert leases.wait_until_at_most(0, timeout_s=0.0)
    assert held.samples == [], "they are encoded"


def test_what_there_is_no_memory_for_is_given_back_uncharged(
    run: RunCase, stage: PublishStage, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = run.writer()
    stage.run(embedded_unit(run, leases, 0))
    run.client.hset(run.key("meta"), "limit_entries", 1)
    monkeypatch.setattr(module, "ASIDE_BYTES", 1)
    held = [embedded_unit(run, leases, u) for u in (1, 2)]
    for work in held:
        stage.run(work)
    assert held[0].lost
    assert leases.snapshot() == held[1:], "the last one stays, however large it is"
    assert run.client.zscore(run.key("hinted"), "1") == 0, "it is hinted at once"
    assert run.client.hget(run.key("att"), "1") in (None, b"0")
    writer.drain()
    wait_for_room(stage)
    writer.drain()
    run.assert_exact([0, 2])


def test_a_result_too_large_for_the_broker_ends_as_a_failure_that_says_so(
    run: RunCase, stage: PublishStage, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESULT_BYTES", 100)
    writer, stage.transport = run.writer(), "payload"
    for _ in range(MAX_ATTEMPTS):
        run.age()
        stage.run(embedded_unit(run, leases, 0))
    writer.drain()
    assert run.failures() == [("", "result_too_large")]
    assert leases.snapshot() == []


def test_a_full_disk_is_waited_for_only_as_long_as_the_lease_is_ours(
    run: RunCase, stage: PublishStage, leases: Leases, on_full: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.writer()
    work = embedded_unit(run, leases, 0)
    next_file_is("/dev/full", monkeypatch)

    class LosesTheLease(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            work.lost = True

    losing = LosesTheLease()
    logging.getLogger("worker").addHandler(losing)
    try:
        stage.run(work)
        wait_for_room(stage)
    finally:
        logging.getLogger("worker").removeHandler(losing)
    assert len(on_full) == 1
    assert leases.snapshot() == []
    assert {path.name for path in run.layout.staging.iterdir()} == {".shared"}
    assert run.client.hlen(run.key("pub")) == 0


def test_any_other_error_of_the_disk_ends_the_worker(
    run: RunCase, stage: PublishStage, leases: Leases, on_full: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.writer()
    work = embedded_unit(run, leases, 0)
    next_file_is("/nowhere/at/all", monkeypatch)
    with pytest.raises(OutputError):
        stage.run(work)
    assert on_full == []
    assert {path.name for path in run.layout.staging.iterdir()} == {".shared"}


def test_a_result_is_not_written_where_a_link_of_another_worker_leads(
    run: RunCase, stage: PublishStage, leases: Leases, tmp_path: Path
) -> None:
    """All workers may write to `_staging` and read the tokens of the others, which name the files."""
    writer = run.writer()
    private = tmp_path / "notes.txt"
    private.write_text("private")
    work = embedded_unit(run, leases, 0)
    (run.layout.staging / f".{work.unit_id}.{work.token.replace(':', '_')}.arrow").symlink_to(private)
    stage.run(work)
    writer.drain()
    run.assert_exact([0])
    assert private.read_text() == "private"


def test_a_staging_folder_that_has_become_a_link_is_not_written_to(
    run: RunCase, stage: PublishStage, leases: Leases, tmp_path: Path
) -> None:
    run.writer()
    stage.run(embedded_unit(run, leases, 0))
    work = embedded_unit(run, leases, 1)
    run.layout.staging.rename(run.layout.root / "old")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.layout.staging.symlink_to(elsewhere)
    with pytest.raises(OutputError, match="is a symbolic link"):
        stage.run(work)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("exchanged", ["file", "folder"])
def test_a_part_that_becomes_a_link_after_it_was_looked_at_is_not_named(exchanged: str, tmp_path: Path) -> None:
    private, staging, path = tmp_path / "private", tmp_path / "_staging", tmp_path / "part"
    private.mkdir()
    (private / "a.part").write_text("private")
    if exchanged == "file":
        staging.mkdir()
        (staging / "a.part").symlink_to(private / "a.part")
    else:
        staging.symlink_to(private)
    with pytest.raises(OutsideError):
        link(staging / "a.part", path, tmp_path / "temporary")
    assert not os.path.lexists(path)


# --- what is stored of vectors ---
