"""The end of a run, from what workers report and what the writer commits, through a real broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor
from embq.core.broker.client import now_ms
from embq.core.errors import EmbqError
from embq.core.queue.heartbeats import WORKER_REPORTS, live_workers
from embq.core.queue.hints import Hint
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.scripts import load_scripts
from embq.core.settings import Settings
from embq.worker.claim.heartbeat import Heartbeat
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.meter.meter import Meter
from embq.worker.supervisor.supervisor import LeaseFreer
from tests.support.outputs.run_case import RunCase
from tests.support.waiting import wait_until


def report(case: RunCase, name: str, tokens_per_s: float, *begun: tuple[int, str, int]) -> None:
    """Report of a worker."""
    share = {"tokens_per_s": tokens_per_s, "units": 1, "size": 9, "begun": begun, "in_batch": 0}
    said = {"name": name, "model": case.info.model.spec, "runs": {case.info.run: share}}
    WORKER_REPORTS.report(case.client, said, life_s=60, scripts=load_scripts(case.client))


def look(case: RunCase) -> dict[str, Any]:
    """Progress of the run: the same from its folder and from the broker alone."""
    folder = RunMonitor(case.layout.root, case.client).poll().to_json()
    broker = RemoteRunMonitor(case.record, case.client).poll().to_json()
    for name in ("tokens", "tokens_total", "tokens_per_s", "eta_s", "eta_basis"):
        assert folder[name] == broker[name], name
    return folder


@pytest.fixture
def at_work(run: RunCase) -> Iterator[RunCase]:
    """A run of 8 equal units; the first has 100 tokens and is committed, and work began long ago."""
    writer = run.writer()
    run.work_one(0, tokens=100)
    writer.drain()
    run.client.hset(run.key("meta"), "began_ms", 1)
    assert len(run.units) == 8
    yield run
    for name in ("w", "second", "silent", "dead"):
        WORKER_REPORTS.sign_off(run.client, name)


def test_what_is_left_is_what_was_neither_committed_nor_published_nor_done_in_flight(at_work: RunCase) -> None:
    token = at_work.claim(1)
    report(at_work, "w", 10.0, (1, token, 40))
    seen = look(at_work)
    assert (seen["tokens"], seen["tokens_total"], seen["eta_basis"]) == (100, 800, "tokens")
    assert (seen["eta_s"], seen["tokens_per_s"]) == (66.0, 10.0)
    assert at_work.publish(1, token, tokens=100) is PublishVerdict.ACCEPTED
    assert look(at_work)["eta_s"] == 60.0, "its report is older than its result, and counts once"
    report(at_work, "second", 20.0)
    assert look(at_work)["eta_s"] == 20.0


def test_who_is_gone_or_silent_does_not_count(at_work: RunCase) -> None:
    report(at_work, "w", 10.0)
    report(at_work, "silent", 60.0)
    at_work.client.zadd("embq:workers", {"silent": 1})
    report(at_work, "dead", 60.0)
    assert look(at_work)["eta_s"] == 10.0
    freer = LeaseFreer(at_work.client)
    freer.start()
    freer.submit("dead", "killed", {})
    freer.close(30)
    assert look(at_work)["eta_s"] == 70.0


def test_a_writer_that_goes_on_knows_what_is_left_before_it_commits(at_work: RunCase) -> None:
    at_work.client.delete(*at_work.ledger.keys)
    at_work.writer()
    assert at_work.ledger.meta()["tokens_left"] == "700"


def test_nothing_is_told_where_nobody_works_or_the_run_is_done(at_work: RunCase) -> None:
    seen = look(at_work)
    assert (seen["eta_s"], seen["eta_basis"], seen["tokens_per_s"]) == (None, "", 0.0)
    writer = at_work.writer()
    for u in range(1, 8):
        at_work.work_one(u, tokens=100)
    writer.drain()
    seen = look(at_work)
    assert (seen["eta_s"], seen["tokens"], seen["tokens_total"]) == (0.0, 800, 800)


@pytest.fixture
def beating(at_work: RunCase) -> Iterator[tuple[Heartbeat, LeasedUnit]]:
    """A heartbeat, and the unit that its worker has in hand."""
    hint = Hint(run=at_work.info.run, gen=at_work.gen, u=1, unit=at_work.units[1])
    token = at_work.claim(1)
    work = LeasedUnit(hint, at_work.record, at_work.ledger, token, attempts=0, poison=frozenset())
    leases = Leases()
    leases.add(work)
    heartbeat = Heartbeat(
        at_work.client,
        leases,
        Meter(),
        Settings(lease_s=20.0, beat_s=0.05, stall_s=45.0),
        name="w",
        describe=lambda: {"name": "w", "model": at_work.info.model.spec},
    )
    heartbeat.start()
    yield heartbeat, work
    heartbeat.stop()


def test_a_worker_tells_the_broker_when_it_expects_to_end_a_unit(
    at_work: RunCase, beating: tuple[Heartbeat, LeasedUnit]
) -> None:
    heartbeat, work = beating
    heartbeat.meter.throughput.unit_claimed(work.unit)
    heartbeat.meter.throughput.batch_done(3, 3, since=time.monotonic() - 30.0)

    def told() -> list[bytes]:
        return at_work.client.hget(at_work.key("busy"), work.token).split()[1:]

    wait_until(told)
    ends_ms, size = map(int, told())
    assert (ends_ms, size) == (pytest.approx(now_ms(at_work.client) + 30_000, abs=5_000), 100)


def test_a_beat_that_the_broker_refuses_is_the_workers_error(
    at_work: RunCase, beating: tuple[Heartbeat, LeasedUnit]
) -> None:
    heartbeat, _ = beating
    at_work.client.delete(at_work.key("meta"))
    at_work.client.set(at_work.key("meta"), "of another type")
    heartbeat.join(10)
    assert not heartbeat.is_alive()
    assert isinstance(heartbeat.failed, redis.exceptions.RedisError | EmbqError)
    at_work.client.delete(at_work.key("meta"))


def test_a_worker_reports_its_speed_and_what_it_has_done_for_each_run(
    at_work: RunCase, beating: tuple[Heartbeat, LeasedUnit]
) -> None:
    heartbeat, work = beating
    work.tokens = 40
    heartbeat.meter.batch_done(3, {work.run: 40, "another": 10}, processed=50, took_s=2.0)

    def reports() -> list[dict[str, Any]]:
        of_us = [one for one in live_workers(at_work.client) if one["name"] == "w"]
        return [one for one in of_us if one["runs"][work.run]["tokens_per_s"]]

    wait_until(reports)
    (said,) = reports()
    assert said["runs"][work.run]["begun"] == [(1, work.token, 40)]
    assert (said["runs"][work.run]["units"], said["runs"][work.run]["size"]) == (1, 9)
    assert said["runs"][work.run]["tokens_per_s"] == pytest.approx(20.0, rel=0.01)
    assert said["runs"]["another"]["tokens_per_s"] == pytest.approx(5.0, rel=0.01)
    heartbeat.stop()
    assert "w" not in [one["name"] for one in live_workers(at_work.client)]
