"""A run whose failures are retried: writer, ledger and watches keep one account, whoever is killed or forgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor
from embq.core.queue.keys import VERSION
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.runs import RunRecord
from embq.core.rows.results import encode_result, row_schema
from embq.core.run.commit_log import CommitLog
from embq.core.run.manifest import Manifest
from embq.core.run.reader import row_tables
from embq.core.run.run_info import load_run
from embq.core.units import Failure, Retry, from_ranges, key_digest
from embq.producer.additions import PlanRecord, append_generation
from embq.producer.announce import record_of
from embq.writer.run_writer import RunWriter
from tests.support.outputs.run_case import DIM, FINGERPRINT, RunCase, sample, unit_of, vector

SAMPLES = 8 * 3


def retry(case: RunCase, failed: int, *, only: str = "", replaces: int, planned: int | None = None) -> int:
    """Add one retry unit, as `embq retry` does; gives its index.

    Args:
        failed: the unit whose failures are done again.
        planned: the unit that was planned first, where `failed` is a retry of it.
    """
    there = load_run(case.layout.root)
    u = failed if planned is None else planned
    again = Retry(
        unit=u,
        failed=failed,
        record=next(one.n for one in CommitLog(case.layout).read() if any(unit.u == failed for unit in one.units)),
        attempts=1 if planned is None else 4,
        replaces=replaces,
        only=only,
        keys=key_digest([f"{u}:{i}" for i in from_ranges(only)]),
    )
    unit = replace(unit_of(u), retry=again)
    append_generation(
        case.layout, there, PlanRecord(inputs=(), options=(), version="test"), [unit], check=lambda _: None
    )
    return there.units


def publish(case: RunCase, again: int, u: int, rows: list[int], failed: list[int] | None = None) -> None:
    """A worker's result of a retry of unit `u`: these ordinals have rows, and those failed once more."""
    failures = [Failure(ordinal=i, key=f"{u}:{i}", code="decode", message="no image", attempt=2) for i in failed or []]
    vectors = np.array([vector(u, i) for i in rows], dtype=np.float16).reshape(len(rows), DIM)
    schema = row_schema(("text",), {"text": DIM}, case.record.rows)
    fields: dict[str, str | bytes | int] = {
        "v": VERSION,
        "unit_id": Manifest(case.layout).unit_id(again),
        "rows": len(rows),
        "failures": len(failures),
        "fingerprint": FINGERPRINT,
        "data": encode_result([sample(u, i) for i in rows], {"embedding": vectors}, failures, schema),
    }
    assert case.ledger.publish(again, case.claim(again), fields, size=100) is PublishVerdict.ACCEPTED


def quarantine(case: RunCase, u: int) -> None:
    """Three deaths of workers in unit `u`."""
    for _ in range(3):
        case.claim(u, "mortal")
        assert case.die("mortal") == 1
        case.age()


def account(case: RunCase) -> tuple[int, int, int]:
    """Rows, failures and quarantined units, which the log, the broker and both watches agree on."""
    meta, info = case.ledger.meta(), load_run(case.layout.root)
    state = CommitLog(case.layout).replay(info.units)
    found = {(state.rows, state.failures, state.quarantined)}
    found.add((int(meta["rows"]), int(meta["failures"]), int(meta["quarantined"])))
    record: RunRecord = record_of(info, case.layout.root)
    for look in (RunMonitor(case.layout.root, case.client).poll(), RemoteRunMonitor(record, case.client).poll()):
        found.add((look.rows, look.failures, look.quarantined))
        assert look.quarantined or look.rows_total == SAMPLES
    assert len(found) == 1, found
    return found.pop()


@pytest.fixture
def failed(run: RunCase) -> Iterator[RunCase]:
    """A run of 8 units of 3 samples that is done, of which unit 0 lacks two samples and unit 5 one."""
    writer = run.writer()
    missing = {0: [0, 2], 5: [1]}
    for u in range(8):
        run.work_one(u, failed=missing.get(u, []))
    writer.drain()
    assert account(run) == (SAMPLES - 3, 3, 0)
    writer.release()
    yield run
    keys = [key for table in row_tables(run.layout.root, ["key"]) for key in table["key"].to_pylist()]
    assert sorted(keys) == sorted({f"{u}:{i}" for u in range(8) for i in range(3)})
    assert account(run) == (SAMPLES, 0, 0)


def opened(case: RunCase) -> RunWriter:
    """The next writer, on a run that has grown."""
    writer = case.writer()
    assert not writer.finished
    return writer


def test_what_a_retry_brings_takes_the_place_of_failures_in_every_count(failed: RunCase) -> None:
    first, second = retry(failed, 0, only="0,2", replaces=2), retry(failed, 5, only="1", replaces=1)
    writer = opened(failed)
    assert account(failed) == (SAMPLES - 3, 3, 0)
    publish(failed, second, 5, [1])
    writer.drain()
    assert account(failed) == (SAMPLES - 2, 2, 0)
    publish(failed, first, 0, [0], [2])
    writer.drain()
    assert account(failed) == (SAMPLES - 1, 1, 0)
    last = retry(failed, 0, only="2", replaces=1)
    failed.clock.advance(31)
    writer.step()
    publish(failed, last, 0, [2])
    writer.drain()
    assert [one.kind for one in CommitLog(failed.layout).read()].count("close") == 3


@pytest.mark.parametrize("lost", ["nothing", "the broker"])
def test_a_writer_killed_between_a_record_and_its_marks_is_followed_by_one_with_the_same_account(
    failed: RunCase, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    first, second = retry(failed, 0, only="0,2", replaces=2), retry(failed, 5, only="1", replaces=1)
    writer = opened(failed)

    class Killed(BaseException):
        pass

    def kill(*args: object) -> None:
        raise Killed

    publish(failed, first, 0, [0, 2])
    with monkeypatch.context() as patch:
        patch.setattr(writer.queue, "mark", kill)
        with pytest.raises(Killed):
            writer.drain()
    assert CommitLog(failed.layout).replay(10).failures == 1
    if lost == "the broker":
        failed.client.delete(*failed.ledger.keys)
    writer = opened(failed)
    assert account(failed) == (SAMPLES - 1, 1, 0)
    publish(failed, second, 5, [1])
    writer.drain()


@pytest.mark.parametrize("wrong", [([0], []), ([0, 1], []), ([0, 1, 2], []), ([0, 2], [1])])
def test_a_result_with_other_samples_than_those_of_the_retry_is_not_taken(
    failed: RunCase, caplog: pytest.LogCaptureFixture, wrong: tuple[list[int], list[int]]
) -> None:
    first, second = retry(failed, 0, only="0,2", replaces=2), retry(failed, 5, only="1", replaces=1)
    writer = opened(failed)
    publish(failed, first, 0, *wrong)
    with caplog.at_level("WARNING"):
        writer.step()
    assert "code=wrong_count" in caplog.text
    assert account(failed) == (SAMPLES - 3, 3, 0)
    publish(failed, first, 0, [0, 2])
    publish(failed, second, 5, [1])
    writer.drain()


def test_a_retry_whose_workers_die_is_one_more_failure_of_each_sample_and_quarantines_nothing(failed: RunCase) -> None:
    first, second = retry(failed, 0, only="0,2", replaces=2), retry(failed, 5, only="1", replaces=1)
    writer = opened(failed)
    publish(failed, second, 5, [1])
    quarantine(failed, first)
    writer.drain()
    assert account(failed) == (SAMPLES - 2, 2, 0)
    assert [row for row in failed.failures() if row[1] == "crash"] == [("0:0", "crash"), ("0:2", "crash")]
    again = retry(failed, first, planned=0, only="0,2", replaces=2)
    failed.clock.advance(31)
    writer.step()
    publish(failed, again, 0, [0, 2])
    writer.drain()


def test_a_quarantined_unit_that_is_done_again_is_quarantined_no_more(run: RunCase) -> None:
    writer = run.writer()
    for u in range(7):
        run.work_one(u)
    quarantine(run, 7)
    writer.drain()
    assert account(run) == (21, 1, 1)
    again = retry(run, 7, replaces=1)
    run.clock.advance(31)
    writer.step()
    quarantine(run, again)
    writer.drain()
    assert account(run) == (21, 1, 1)
    last = retry(run, again, planned=7, replaces=1)
    run.clock.advance(31)
    writer.step()
    publish(run, last, 7, [0, 1, 2])
    writer.drain()
    assert account(run) == (SAMPLES, 0, 0)
