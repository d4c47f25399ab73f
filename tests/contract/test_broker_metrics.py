"""Metrics of the producer about the broker: the figures of `embq status`, whatever the number of runs."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from redis.connection import AbstractConnection

from embq.app.services.broker_metrics import SHOWN_S, BrokerMetrics
from embq.app.status.run_monitor import RemoteRunMonitor
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.broker.users import ROLES
from embq.core.queue.heartbeats import SERVICE_REPORTS, WORKER_REPORTS, Device, Rate, report_rate
from embq.core.queue.keys import run_key
from embq.core.queue.reporting import this_service
from embq.core.queue.result_stream import LIMIT_BYTES, LIMIT_ENTRIES
from embq.core.queue.runs import register
from embq.core.queue.scripts import load_scripts
from embq.core.service.metrics import METRICS, MetricSamples
from tests.support.outputs.run_case import RunCase, make_case

Told = dict[str, dict[tuple[str, ...], float]]


def told(meter: BrokerMetrics) -> Told:
    """Metric -> values of its labels -> value; read even where the broker is away."""
    readings = MetricSamples("producer")
    with suppress(redis.exceptions.RedisError):
        meter(readings)
    labels = {metric.name: metric.labels for metric in METRICS["producer"]}
    found: Told = {}
    for family in text_string_to_metric_families(readings.text().decode()):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(one.labels[label] for label in labels[one.name])] = one.value
    return found


@pytest.fixture
def run(own_client: redis.Redis, tmp_path: Path) -> RunCase:
    return make_case(own_client, tmp_path / "notes")


def report(case: RunCase, name: str, **said: object) -> None:
    """A worker says something of itself."""
    late = {"causes": {"device": 1.0}, "stages": {"embed": {"busy": 0.9, "starved": 0.1, "blocked": 0.0}}}
    fields = {
        "name": name,
        "host": "box",
        "device": "cuda:0",
        "device_name": "NVIDIA H100",
        "rows_per_s": 40.0,
        "held": 1,
        "model": case.record.model.spec,
        "limit": "device",
        "attribution": {"threads": 1, "cores": 2, "decode": "", "late": late, "whole": {"limit": "device", **late}},
        **said,
    }
    WORKER_REPORTS.report(case.client, fields, life_s=60, scripts=case.ledger._scripts)


def test_a_run_is_told_as_status_tells_it(run: RunCase, own_client: redis.Redis) -> None:
    meter, name = BrokerMetrics(own_client), run.info.run
    register(own_client, run.record)
    before = told(meter)
    assert before["embq_runs"][("waiting",)] == 1
    assert "embq_run_info" not in before, "nothing is known of a run that no writer has opened"

    writer = run.writer()
    run.work_one(0)
    run.work_one(1, failed=[2])
    writer.step()
    run.clock.advance(31)
    writer.step()
    run.work_one(2)
    token = run.claim(3)
    report(run, "box.cuda0.abc", runs={name: _share(3, token, tokens=2)})

    seen, look = told(meter), RemoteRunMonitor(run.record, own_client).poll()
    assert seen["embq_run_info"] == {(name, "notes", run.record.model.spec, "running"): 1}
    units = {state: seen["embq_run_units"][name, state] for state in ("done", "received", "in_flight", "queued")}
    assert units == {"done": look.done, "received": look.received, "in_flight": look.in_flight, "queued": look.queued}
    assert units == {"done": 2, "received": 1, "in_flight": 1, "queued": 4}
    assert (seen["embq_run_rows_total"][name,], seen["embq_run_failures"][name,]) == (5, 1)
    assert seen["embq_run_rows_expected"][name,] == look.rows_total == 24
    assert seen["embq_run_limit"] == {(name, look.limit): 1}
    assert (seen["embq_run_results"][name,], seen["embq_run_result_bytes"][name,]) == (1, 100)
    assert seen["embq_run_results_limit"][name,] == LIMIT_ENTRIES
    assert seen["embq_run_result_limit_bytes"][name,] == LIMIT_BYTES
    assert 0 <= seen["embq_run_commit_age_seconds"][name,] < 60
    assert 0 <= seen["embq_run_oldest_unit_seconds"][name,] < 60
    assert seen["embq_runs"][("running",)] == 1
    assert (seen["embq_broker_up"][()], seen["embq_machines"][()]) == (1, 1)
    assert seen["embq_broker_memory_bytes"][()] > 0
    assert seen["embq_workers"] == {(run.record.model.spec,): 1}
    assert seen["embq_worker_rows_per_second"] == {("box.cuda0.abc", "box", "cuda:0", "NVIDIA H100"): 40}
    assert seen["embq_worker_stage_share"]["box.cuda0.abc", "embed", "busy"] == 0.9

    began_ms = int(own_client.time()[0]) * 1000 - 90_000
    run.client.hset(run.key("busy"), token, f"{began_ms} {began_ms + 200_000} 100")
    assert 89 < told(meter)["embq_run_oldest_unit_seconds"][name,] < 100
    writer.release()


def test_the_work_that_is_left_is_seconds_of_one_worker_and_is_there_without_any(
    run: RunCase, own_client: redis.Redis
) -> None:
    meter = BrokerMetrics(own_client)
    register(own_client, run.record)
    assert told(meter)["embq_work_left_seconds"][()] == 0, "nothing can be embedded before a writer has opened the run"
    writer = run.writer()
    assert told(meter)["embq_work_left_seconds"][()] == 8, "one second a unit, enough for a first worker"
    run.work_one(0)
    writer.step()
    run.clock.advance(31)
    writer.step()
    assert told(meter)["embq_work_left_seconds"][()] == 7, "the speed of the model is not known"
    for device, rows_per_s in (("NVIDIA H100", 0.75), ("NVIDIA L4", 0.25)):
        rate = Rate(device=device, rows_per_s=rows_per_s, dims=8)
        report_rate(own_client, run.record.model, rate, scripts=run.ledger._scripts)
    run.work_one(1)
    assert told(meter)["embq_work_left_seconds"][()] == 36, "6 units of 3 samples, half a sample a second"
    own_client.hset(run.key("meta"), "state", "paused")
    assert told(meter)["embq_work_left_seconds"][()] == 0
    own_client.hset(run.key("meta"), "state", "running")
    run.finish(writer)
    assert told(meter)["embq_work_left_seconds"][()] == 0


def _share(u: int, token: str, *, tokens: int) -> dict[str, object]:
    return {"tokens_per_s": 9.0, "units": 1, "size": 9, "begun": [(u, token, tokens)], "in_batch": 0}


def test_a_run_that_has_ended_is_told_for_a_while_and_then_only_counted(run: RunCase, own_client: redis.Redis) -> None:
    run.finish(run.writer())
    seen = told(BrokerMetrics(own_client))
    assert seen["embq_run_rows_total"] == {(run.info.run,): 24}
    assert seen["embq_run_eta_seconds"] == {(run.info.run,): 0}
    earlier = int(own_client.time()[0]) * 1000 - int(SHOWN_S * 1000) - 1
    own_client.hset(run_key(run.info.run, "meta"), "last_commit_ms", earlier)
    later = told(BrokerMetrics(own_client))
    assert "embq_run_rows_total" not in later
    assert later["embq_runs"][("done",)] == 1


def test_many_runs_cost_no_more_exchanges_with_the_broker_than_one(
    own_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges, send = 0, AbstractConnection.send_packed_command

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal exchanges
        exchanges += 1
        send(*arguments, **options)

    meter = BrokerMetrics(own_client)
    told(meter)  # connects
    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)
    for count in (1, 30):
        while len(list(tmp_path.glob("out*"))) < count:
            make_case(own_client, tmp_path / f"out{len(list(tmp_path.iterdir()))}").build()
        exchanges = 0
        assert len(told(meter)["embq_run_info"]) == count
        assert exchanges == 5, "and two for the reports of workers and services, of which there are none"


def test_a_broker_that_is_away_is_told_as_such(own_client: redis.Redis, own_server: EmbeddedServer) -> None:
    meter = BrokerMetrics(own_client)
    assert told(meter)["embq_broker_up"] == {(): 1}
    own_server.stop()
    assert told(meter) == {"embq_broker_up": {(): 0}}
    own_server.start()
    assert told(meter)["embq_broker_up"] == {(): 1}


@pytest.mark.parametrize("user", ["writer", "monitor"])
def test_who_tells_may_read_all_of_it(
    user: str, run: RunCase, own_client: redis.Redis, own_server: EmbeddedServer
) -> None:
    rules = re.findall(r"\([^)]*\)|\S+", ROLES[user].rules())
    own_client.execute_command("ACL", "SETUSER", user, "on", ">secret", *rules)
    writer = run.writer()
    run.claim(0)
    report(run, "box.cuda0.abc")
    device = Device(device="cuda:0", name="NVIDIA H100", state="serving", worker="box.cuda0.abc")
    service = replace(this_service("worker", version="1"), devices=(device,), began_ms=1)
    SERVICE_REPORTS.report(own_client, service, scripts=load_scripts(own_client))

    with connect(own_server.url.replace("://:", f"://{user}:").replace(own_server._password, "secret")) as restricted:
        readings = MetricSamples("producer")
        BrokerMetrics(restricted)(readings)
    seen = told(BrokerMetrics(own_client))
    assert (seen["embq_services"]["worker",], seen["embq_devices"]["serving",], seen["embq_machines"][()]) == (1, 1, 2)
    assert b'embq_services{role="worker"} 1.0' in readings.text()
    assert readings.text().count(b"\nembq_run_") == sum(len(v) for k, v in seen.items() if k.startswith("embq_run_"))
    writer.release()
