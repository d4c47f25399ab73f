"""A run to which units are added: the writer, the ledger and the feeder take them up, at whatever moment they come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embq.app.status.run_monitor import RunMonitor
from embq.core.queue.keys import ACTIVE
from embq.core.queue.runs import active, go_on, register, restore_active
from embq.core.run.commit_log import CommitLog
from embq.core.run.generations import Generation, append
from embq.core.run.manifest import SegmentWriter
from embq.core.run.run_info import load_run
from embq.producer.announce import record_of
from embq.writer.service import WriterService
from tests.support.outputs.run_case import MakeRun, RunCase, unit_of
from tests.support.second_reader.checks import verify


def add(case: RunCase, units: int, *, samples: int = 3) -> None:
    """Add units to a run's folder, as `embq enqueue` does before it tells the broker."""
    there = load_run(case.layout.root)
    listed = [unit_of(number, samples) for number in range(there.units, there.units + units)]
    number = len(there.added) + 1
    segments = SegmentWriter(case.layout, f"gen-{number:04d}-test-")
    summary = segments.write(listed)
    generation = Generation(
        number=number,
        run=there.run,
        first=there.units,
        units=summary.units,
        samples=summary.samples,
        digest=summary.digest,
        segments=tuple(segments.names),
        inputs=("more",),
        options=(),
        version="test",
        created="2026-01-01T00:00:00+00:00",
    )
    append(case.layout.manifest, generation, temporary=case.layout.temporary)
    case.units += listed


def kinds(case: RunCase) -> list[str]:
    return [commit.kind for commit in CommitLog(case.layout).read()]


@pytest.fixture
def grown(run: RunCase) -> Iterator[RunCase]:
    """A run of 8 units that is done and closed, with 5 units added then; every file of it must be accounted for."""
    writer = run.writer()
    run.finish(writer)
    writer.release()
    add(run, 5)
    yield run
    run.assert_exact()
    found = [f"{one.invariant}: {one.message}" for one in verify(run.layout.root).violations]
    # The sources of these units are made up, so that verification cannot read them a second time.
    assert [text for text in found if not text.startswith(("keys", "source", "coverage"))] == []


def test_units_added_while_the_run_works_are_done_in_the_same_log(run: RunCase) -> None:
    writer = run.writer()
    run.feeder().tick()
    run.work_one(0)
    writer.step()
    add(run, 5)
    run.finish(writer)
    run.assert_exact()
    assert kinds(run).count("close") == 1
    assert run.ledger.meta()["total"] == "13"


def test_a_log_that_was_closed_is_gone_on_with(grown: RunCase) -> None:
    assert not CommitLog(grown.layout).replay(load_run(grown.layout.root).units).closed
    writer = grown.writer()
    assert grown.ledger.meta()["state"] == "running"
    grown.finish(writer)
    assert kinds(grown)[-1] == "close"
    assert kinds(grown).count("close") == 2
    assert "fence" in kinds(grown)[kinds(grown).index("close") :]


def test_a_writer_that_has_just_closed_the_log_goes_on_with_it(grown: RunCase) -> None:
    writer = grown.writer()
    grown.finish(writer)
    add(grown, 4)
    grown.clock.advance(31)
    writer.step()
    assert not writer.finished
    grown.finish(writer)
    assert kinds(grown).count("close") == 3


def test_a_broker_that_lost_everything_gets_all_generations(grown: RunCase) -> None:
    writer = grown.writer()
    grown.client.delete(*grown.ledger.keys)
    grown.clock.advance(31)
    writer.step()
    assert (grown.ledger.meta()["total"], grown.ledger.meta()["done"]) == ("13", "8")
    grown.finish(writer)


def test_units_added_between_the_last_commit_and_the_close_are_not_left_out(run: RunCase) -> None:
    writer = run.writer()
    for u in range(8):
        run.work_one(u)
    while run.ledger.meta()["done"] != "8" and writer.committer.state.count + len(writer.buffer.units) < 8:
        for entry, sender, published in writer.ledger.sent(writer.inbox.read(), 8)[0]:
            writer._accept(entry, sender, published=published)
    add(run, 2)
    writer.flush()
    assert not writer.finished
    run.finish(writer)
    run.assert_exact()
    assert kinds(run).count("close") == 1


def test_the_feeder_reads_the_manifest_again_when_the_queue_has_grown(run: RunCase) -> None:
    writer, feeder = run.writer(), run.feeder()
    assert feeder.tick() == 8
    add(run, 5)
    run.clock.advance(31)
    writer.step()
    assert feeder.tick() == 5
    hints = []
    while (hint := run.pop()) is not None:
        hints.append((hint.u, hint.unit))
    assert hints == list(enumerate(run.units))


def test_growing_twice_or_with_an_old_generation_of_the_queue_changes_nothing(run: RunCase) -> None:
    run.build("1-0")
    run.ledger.grow("1-0", 12)
    run.ledger.grow("1-0", 12)
    run.ledger.grow("1-0", 9)
    run.ledger.grow("0-9", 99)
    assert run.ledger.meta()["total"] == "12"


def test_a_resident_writer_opens_a_finished_run_again_when_it_is_announced_with_more_units(make_run: MakeRun) -> None:
    case = make_run(2)
    daemon, feeder = WriterService(case.client, version="test"), case.feeder()

    def done() -> bool:
        feeder.tick()
        case.work_off_hints()
        closes = kinds(case).count("close")
        if closes == 1 and len(case.units) == 2 and case.info.run not in active(case.client):
            add(case, 3)
            register(case.client, record_of(load_run(case.layout.root), case.layout.root))
        return closes == 2

    register(case.client, case.record)
    daemon.serve(done)
    case.assert_exact()


def test_a_broker_from_before_the_end_of_a_run_learns_that_it_is_over(make_run: MakeRun) -> None:
    case = make_run(4)
    daemon, feeder = WriterService(case.client, version="test"), case.feeder()

    times_over: list[str] = []

    def done() -> bool:
        feeder.tick()
        case.work_off_hints()
        if case.info.run in active(case.client):
            return False
        times_over.append(case.ledger.gen())
        if len(times_over) == 1:
            first = b"\x80"  # of four units
            case.ledger.rebuild(gen=times_over[0], total=4, done=first, counters={"rows": 3, "failures": 0})
            go_on(case.client, case.info.run)
        return len(times_over) == 2

    register(case.client, case.record)
    daemon.serve(done)
    meta = case.ledger.meta()
    assert (meta["state"], meta["done"], meta["rows"]) == ("done", "4", "12")
    assert kinds(case).count("close") == 1
    case.assert_exact()


def test_a_broker_that_lost_which_runs_are_not_over_learns_it_again(make_run: MakeRun) -> None:
    open_, waiting, over = (make_run(2) for _ in range(3))
    for run in (open_, waiting, over):
        register(run.client, run.record)
    closed = over.writer()
    over.finish(closed)
    writer = open_.writer()
    open_.client.delete(ACTIVE)
    open_.clock.advance(10)
    writer.step()
    assert set(active(open_.client)) == {open_.info.run}, "its writer says so"
    open_.client.delete(ACTIVE)
    restore_active(open_.client)
    known = active(open_.client)
    assert {open_.info.run, waiting.info.run} <= set(known)
    assert over.info.run not in known


def test_status_counts_what_was_added(grown: RunCase) -> None:
    watch = RunMonitor(grown.layout.root, None)
    assert (watch.poll().state, watch.poll().units_total, watch.poll().done) == ("stopped", 13, 8)
    writer = grown.writer()
    grown.finish(writer)
    assert (watch.poll().state, watch.poll().done, watch.poll().rows_total) == ("done", 13, 39)
    add(grown, 1)
    assert (watch.poll().state, watch.poll().units_total) == ("stopped", 14)
    grown.clock.advance(31)
    writer.step()
    grown.finish(writer)
