"""Services tell the broker that they are there, and notice in their logs who else is."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from embq.app.doctor.fleet_checks import fleet
from embq.app.status.fleet import fleet_status
from embq.core import wire
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue import reporting
from embq.core.queue.heartbeats import (
    SERVICE_REPORTS,
    WORKER_REPORTS,
    Device,
    Service,
    competing_services,
    live_workers,
    services,
)
from embq.core.queue.keys import RUNS, SERVICES, VERSION, service_key
from embq.core.queue.reporting import CLOCK_OFFSET_S, Reporter, clock_ahead_s, this_service
from embq.core.queue.runs import foreign_runs, registered
from embq.core.queue.scripts import load_scripts
from tests.support.outputs.run_case import make_case
from tests.support.waiting import wait_until

EVERY_S = 0.05
DEVICES = (Device(device="cuda:0", name="NVIDIA H200", state="idle", worker="box.cuda0.abc"),)


@pytest.fixture
def report(own_server: EmbeddedServer) -> Any:
    """Starts reporters on this test's own server, all ended with the test; `waits` counts looks for a broker."""
    with ExitStack() as stack:

        def start(service: Service, **options: Any) -> Reporter:
            def client(give_up: Callable[[], bool]) -> redis.Redis:
                def counted() -> bool:
                    start.waits += 1
                    return give_up()

                return connect(own_server.url, give_up=counted)

            return stack.enter_context(Reporter(client, service, every_s=EVERY_S, **options))

        start.waits = 0
        yield start


def more_reports(client: redis.Redis) -> None:
    """Wait until services have reported five times each, which is when what they said once would be said again."""

    def calls() -> int:
        stats = client.info("commandstats")["cmdstat_evalsha"]
        return int(stats["calls"]) + int(stats["rejected_calls"])

    wanted = calls() + 5 * max(1, len(services(client)))
    wait_until(lambda: calls() >= wanted)


def of(role: str, **changes: Any) -> Service:
    return replace(this_service(role, version="1.0"), **changes)


def heard(client: redis.Redis) -> dict[str, Service]:
    return {one.service.name: one.service for one in services(client)}


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(name)]


# --- being there ---


def test_a_service_is_heard_of_from_its_first_moment_on_and_forgotten_when_it_ends(
    own_server: EmbeddedServer, own_client: redis.Redis, report: Any
) -> None:
    worker = of("worker", cores=8, memory_bytes=1 << 40, cache_free_bytes=1 << 41)
    reporter = report(worker, refresh=lambda service: replace(service, devices=DEVICES))
    wait_until(lambda: heard(own_client))
    (one,) = services(own_client)
    assert one.service == replace(worker, devices=DEVICES, began_ms=one.service.began_ms, clock_s=one.service.clock_s)
    assert abs(one.last_ms - one.service.began_ms) < 10_000
    assert abs(one.service.clock_s) < CLOCK_OFFSET_S
    reporter.__exit__(None, None, None)
    assert heard(own_client) == {}
    assert own_client.keys("embq:service*") == []


def test_a_broker_that_is_away_costs_a_service_nothing_and_gets_the_report_when_it_is_back(
    own_server: EmbeddedServer, own_client: redis.Redis, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report(of("producer"))
    wait_until(lambda: heard(own_client))
    (before,) = heard(own_client).values()
    own_client.delete(SERVICES, service_key(before.name))
    own_server.stop()
    tried = report.waits
    wait_until(lambda: report.waits >= tried + 4)
    own_server.start()
    wait_until(lambda: heard(own_client))
    assert heard(own_client)[before.name].began_ms == before.began_ms
    assert events(caplog, "service_not_reported") == []


def test_a_service_that_may_not_report_says_so_once(
    own_client: redis.Redis, own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    rights = {"keys": ["*"], "categories": ["+@all"], "commands": ["-evalsha", "-eval"]}
    own_client.acl_setuser("mute", enabled=True, nopass=True, **rights)  # type: ignore[arg-type]
    url = own_server.url.replace("unix://", "unix://mute:x@")

    with Reporter(lambda give_up: connect(url, give_up=give_up), of("writer"), every_s=EVERY_S):
        wait_until(lambda: events(caplog, "service_not_reported"))
        more_reports(own_client)

    assert len(events(caplog, "service_not_reported")) == 1


def test_a_bug_in_what_is_reported_is_told_and_leaves_the_service_alone(
    report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def look(_service: Service) -> Service:
        raise ZeroDivisionError

    report(of("worker"), refresh=look)
    wait_until(lambda: [record for record in caplog.records if record.getMessage() == "bug" and record.exc_info])


def test_reports_are_taken_while_the_server_is_out_of_memory(own_client: redis.Redis, report: Any) -> None:
    own_client.config_set("maxmemory", 1)
    report(of("producer"))
    wait_until(lambda: heard(own_client))


def test_names_of_those_that_are_gone_leave_the_list(own_client: redis.Redis, report: Any) -> None:
    own_client.zadd(SERVICES, {"gone": 1.0})
    report(of("worker"))
    wait_until(lambda: heard(own_client))
    more_reports(own_client)
    assert own_client.zscore(SERVICES, "gone") == 1.0, "a worker may have no right to remove it"
    report(of("producer"))
    wait_until(lambda: own_client.zscore(SERVICES, "gone") is None)
    assert len(heard(own_client)) == 2


def test_reports_and_farewells_that_are_sent_twice_change_nothing_more(own_client: redis.Redis) -> None:
    service, scripts = of("writer"), load_scripts(own_client)
    for _ in range(2):
        SERVICE_REPORTS.report(own_client, service, scripts=scripts)
    assert own_client.zrange(SERVICES, 0, -1) == [service.name.encode()]
    assert 0 < own_client.pttl(service_key(service.name)) <= 20_000
    for _ in range(2):
        SERVICE_REPORTS.sign_off(own_client, service.name)
    assert own_client.exists(SERVICES) == 0


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"name": "x"}',
        json.dumps({**json.loads(wire.write(of("worker"))), "clock_s": "late"}).encode(),
        json.dumps({**json.loads(wire.write(of("worker"))), "devices": [1]}).encode(),
        json.dumps({**json.loads(wire.write(of("worker"))), "host": None}).encode(),
    ],
)
def test_what_is_no_report_is_not_heard(own_client: redis.Redis, said: bytes) -> None:
    own_client.zadd(SERVICES, {"odd": 1e13})
    own_client.set(service_key("odd"), said)
    assert services(own_client) == []


def test_a_report_with_fields_of_a_later_version_is_heard(own_client: redis.Redis) -> None:
    service = of("writer", protocol=VERSION + 1)
    own_client.zadd(SERVICES, {service.name: 1e13})
    own_client.set(service_key(service.name), json.dumps({**json.loads(wire.write(service)), "planets": 9}))
    assert heard(own_client) == {service.name: service}


# --- who else is there ---


def test_services_of_two_versions_say_so_once_each(
    own_client: redis.Redis, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report(of("writer", host="box"))
    report(of("worker", host="old", version="0.9", devices=DEVICES))
    report(of("worker", host="strange", protocol=VERSION + 1))
    wait_until(lambda: len(events(caplog, "versions_differ")) >= 4)
    more_reports(own_client)
    said = events(caplog, "versions_differ")
    assert len(said) == 4, "the writer of both workers, each worker of the writer, and none of the other"
    assert any("other='worker on old'" in line and "they work together" in line for line in said)
    assert any("other='worker on strange'" in line and "do not see each other's runs" in line for line in said)


@pytest.mark.parametrize("role", ["producer", "writer"])
def test_two_of_a_kind_name_both_hosts_once(
    own_client: redis.Redis, report: Any, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    report(of(role, host="box"))
    report(of(role, host="attic"))
    report(of("worker", host="box"))
    report(of("worker", host="attic"))
    wait_until(lambda: len(events(caplog, "two_of_a_kind")) >= 2)
    more_reports(own_client)
    assert [f"role={role} hosts='attic and box'" in line for line in events(caplog, "two_of_a_kind")] == [True, True]
    ((one, other),) = competing_services(services(own_client))
    assert {one.host, other.host} == {"attic", "box"}


def test_services_of_different_runs_and_one_that_follows_a_killed_one_are_not_two_of_a_kind(
    own_client: redis.Redis, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    now = round(time.time() * 1000)
    killed = of("producer", host="box", version="0.9", began_ms=now - 60_000)
    SERVICE_REPORTS.report(own_client, killed, scripts=load_scripts(own_client))
    wait_until(lambda: time.time() * 1000 > now + 20)
    report(of("producer", host="box"))
    report(of("producer", host="laptop", run="0123456789abcdef"))
    wait_until(lambda: len(heard(own_client)) == 3)
    more_reports(own_client)
    assert competing_services(services(own_client)) == []
    assert events(caplog, "two_of_a_kind") == events(caplog, "versions_differ") == []


def test_a_run_of_another_protocol_version_is_told_of_instead_of_unseen(
    own_client: redis.Redis, tmp_path: Path, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    case = make_case(own_client, tmp_path / "out")
    case.build()
    announced = json.loads(own_client.hget(RUNS, case.info.run) or b"")
    own_client.hset(RUNS, "f" * 16, json.dumps({**announced, "v": VERSION - 1, "output": "/data/old"}))
    own_client.hset(RUNS, "no record", "[]")
    assert [(run.run, run.output, run.protocol) for run in foreign_runs(own_client)] == [
        ("f" * 16, "/data/old", str(VERSION - 1)),
    ]
    assert list(registered(own_client)) == [case.info.run]
    report(of("writer"))
    wait_until(lambda: len(events(caplog, "run_of_another_version")) >= 1)
    more_reports(own_client)
    assert len(events(caplog, "run_of_another_version")) == 1


def test_the_records_of_runs_are_read_when_their_number_changes_and_after_a_minute(
    own_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[int] = []
    monkeypatch.setattr(reporting, "foreign_runs", lambda client: read.append(client.hlen(RUNS)) or [])
    reporter = Reporter(lambda _stopped: own_client, of("worker"))
    for _ in range(3):
        reporter._report(own_client)
    assert read == [0]
    make_case(own_client, tmp_path / "out").build()
    for _ in range(3):
        reporter._report(own_client)
    assert read == [0, 1]
    monkeypatch.setattr(reporter, "_records_at", 0.0)
    reporter._report(own_client)
    assert read == [0, 1, 1]


def test_a_broker_that_is_set_to_lose_work_while_services_run_is_told_of_once(
    own_client: redis.Redis, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report(of("producer"))
    report(of("worker"))
    wait_until(lambda: len(heard(own_client)) == 2)
    more_reports(own_client)
    assert events(caplog, "broker_unsafe") == fleet_status(own_client).warnings() == []
    own_client.config_set("maxmemory-policy", "allkeys-lru")
    wait_until(lambda: events(caplog, "broker_unsafe"))
    more_reports(own_client)
    (line,) = events(caplog, "broker_unsafe")
    (warning,) = fleet_status(own_client).warnings()
    for text in (line, warning):
        assert "maxmemory-policy is allkeys-lru" in text
        assert "CONFIG SET maxmemory-policy noeviction" in text


@pytest.mark.parametrize("own_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("at_s", [0.0, 3.0, 11.0])
def test_a_slow_answer_of_the_broker_is_no_difference_of_clocks(
    monkeypatch: pytest.MonkeyPatch, at_s: float, own_s: float
) -> None:
    """Given a command that takes 11 s, at whichever moment of them the broker reads its clock."""
    began_s, took_s = 1_700_000_000.0, 11.0
    clock = iter([began_s + own_s, began_s + took_s + own_s])
    monkeypatch.setattr(reporting, "time", SimpleNamespace(time=lambda: next(clock)))
    client: Any = SimpleNamespace(time=lambda: (int(began_s + at_s), 0))
    ahead_s = clock_ahead_s(client)
    assert abs(ahead_s - own_s) <= took_s
    assert (abs(ahead_s) > CLOCK_OFFSET_S) == (own_s != 0)


@pytest.mark.parametrize("hours", [-3, 5])
def test_a_clock_that_is_hours_off_is_told_of_once_and_changes_nothing(
    own_client: redis.Redis, report: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hours: int
) -> None:
    caplog.set_level(logging.INFO)
    real = time.time

    class Wrong:
        """The clock of this one client."""

        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def time() -> float:
            return real() + hours * 3600

    monkeypatch.setattr(reporting, "time", Wrong)
    report(of("worker", host="late"))
    wait_until(lambda: len(events(caplog, "clock_differs")) >= 1)
    more_reports(own_client)
    (one,) = services(own_client)
    assert len(events(caplog, "clock_differs")) == 1
    assert abs(one.service.clock_s - hours * 3600) < 2
    assert abs(one.last_ms - one.service.began_ms) < 10_000, "the broker's clock counts"
    assert one.silent_s < 5


# --- what doctor says of all that ---


def test_doctor_tells_of_parts_that_are_missing_doubled_or_of_another_version(own_client: redis.Redis) -> None:
    def rows() -> list[tuple[str, str]]:
        return [(check.name, check.state) for check in fleet(own_client, "1.0")]

    scripts = load_scripts(own_client)
    assert rows() == [("services", "warn"), ("versions", "ok")]
    for role in ("producer", "writer"):
        SERVICE_REPORTS.report(own_client, of(role, host="box"), scripts=scripts)
    assert rows() == [("services", "ok"), ("versions", "ok")]
    SERVICE_REPORTS.report(own_client, of("writer", host="attic", version="0.9"), scripts=scripts)
    own_client.hset(RUNS, "f" * 16, json.dumps({"v": VERSION - 1, "output": "/data/\x1b[31mold"}))
    assert rows() == [("services", "ok"), ("versions", "warn"), ("services", "warn"), ("runs", "warn")]
    told = {check.name: check for check in fleet(own_client, "1.0")}
    assert "on attic and box" in told["services"].detail
    assert "a broker of its own" in told["services"].fix
    assert "embq 0.9, protocol" in told["versions"].detail
    assert "/data/\\x1b[31mold" in told["runs"].detail
    assert "embq resume" in told["runs"].fix


def test_states_that_a_stage_has_not_are_left_out_of_a_report(own_client: redis.Redis) -> None:
    """They would be values of a label of the metrics."""
    span = {"causes": {}, "stages": {"embed": {"busy": 0.5, "asleep": 0.1}}}
    told = {"threads": 1, "cores": 1, "decode": "", "late": span, "whole": span}
    fields = {"name": "w", "attribution": told}
    WORKER_REPORTS.report(own_client, fields, life_s=60, scripts=load_scripts(own_client))
    (worker,) = live_workers(own_client)
    assert worker["attribution"]["late"]["stages"] == {"embed": {"busy": 0.5}}
