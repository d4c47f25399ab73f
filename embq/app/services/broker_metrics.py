"""Prometheus metrics of runs, workers and services, read from the broker in three round trips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, cast

import redis

from embq.app.status.broker_snapshot import BrokerSnapshot
from embq.app.status.eta import done_of, holders_wanted
from embq.app.status.reports import Reports
from embq.app.status.run_monitor import progress_of
from embq.app.status.run_progress import RunProgress
from embq.core.queue.heartbeats import ROLES, SERVICE_REPORTS, STATES, WORKER_REPORTS, Service, names_of
from embq.core.queue.keys import RUNS, SERVICES, UPLOADS, WORKERS, queue_name, run_key, service_key, worker_key
from embq.core.queue.ledger import read_meta
from embq.core.queue.runs import RunRecord, records_of
from embq.core.run.control import VERBS, RunState, requested_changes
from embq.core.service.health import single_try_client
from embq.core.service.metrics import MetricSamples

ANSWER_S = 2.0
"""Timeout of one answer; less than the timeout of a scrape."""
SHOWN_S = 600.0
"""A run that has ended has all of its metrics for so long, so that the last values are scraped."""

_Run = tuple[RunRecord, BrokerSnapshot]


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """First round trip: the runs, workers and services.

    Attributes:
        now_ms: by the broker's clock.
        silent_s: name of each worker -> seconds since its report.
        services: names.
    """

    now_ms: int
    memory: Mapping[str, Any]
    records: Sequence[RunRecord]
    silent_s: Mapping[str, float]
    services: Sequence[str]
    uploads: int


class BrokerMetrics:
    """Reads a broker; see `embq.core.service.metrics.PRODUCER`.

    Args:
        client: leads to the broker. A client of its own is made of it, which does not wait for one that is away.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = single_try_client(client, answer_s=ANSWER_S)

    def __call__(self, readings: MetricSamples) -> None:
        """Read all; raises redis.exceptions.RedisError where the broker is away."""
        readings.put("embq_broker_up", 0)
        first = self._first()
        readings.put("embq_broker_up", 1)
        put_memory(readings, first.memory)
        readings.put("embq_uploads", first.uploads)
        runs, workers, services = self._second(first)
        put_workers(readings, workers)
        put_services(readings, services, workers)
        for state in (*VERBS.values(), RunState.DONE, RunState.ABSENT):
            readings.put("embq_runs", sum(seen.state == state for _, seen in runs), state or "waiting")
        self._third(readings, [(record, seen) for record, seen in runs if _is_shown(seen)], workers)

    def _first(self) -> _First:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.info("memory")
            pipe.hgetall(RUNS)
            pipe.zrange(WORKERS, 0, -1, withscores=True)
            pipe.hkeys(UPLOADS)
            pipe.zrange(SERVICES, 0, -1)
            (seconds, micros), memory, records, scored, uploads, services = pipe.execute()
        now_ms = seconds * 1000 + micros // 1000
        return _First(
            now_ms=now_ms,
            memory=memory,
            records=list(records_of(records).values()),
            silent_s={name: max(0.0, (now_ms - at_ms) / 1000) for name, at_ms in names_of(scored).items()},
            services=list(names_of((name, 0.0) for name in services)),
            uploads=len(uploads),
        )

    def _second(self, first: _First) -> tuple[list[_Run], list[dict[str, Any]], list[Service]]:
        """Second round trip: counters of the runs, reports of workers and services."""
        keys = [*map(worker_key, first.silent_s), *map(service_key, first.services)]
        with self._client.pipeline(transaction=False) as pipe:
            # One key more, which holds no text, because none may not be asked for.
            pipe.mget([*keys, RUNS])
            for record in first.records:
                pipe.hgetall(run_key(record.run, "meta"))
                pipe.hgetall(run_key(record.run, "asked"))
            texts, *rest = pipe.execute()
        reports = WORKER_REPORTS.parse(dict(zip(first.silent_s, texts, strict=False)))
        workers = [{**report, "silent_s": first.silent_s[name]} for name, report in reports.items()]
        services = SERVICE_REPORTS.parse(dict(zip(first.services, texts[len(first.silent_s) :], strict=False)))
        runs = [
            (record, BrokerSnapshot(meta=read_meta(meta), asked=requested_changes(asked), now_ms=first.now_ms))
            for record, meta, asked in zip(first.records, rest[::2], rest[1::2], strict=True)
        ]
        return runs, workers, list(services.values())

    def _third(self, readings: MetricSamples, runs: Sequence[_Run], workers: Sequence[dict[str, Any]]) -> None:
        """Third round trip: queues and units of the shown runs."""
        reports = Reports(workers)
        queues = {record.model.queue_key: record.model.spec for record, _ in runs}
        with self._client.pipeline(transaction=False) as pipe:
            for key in queues:
                pipe.llen(f"rq:queue:{queue_name(key)}")
            for record, _ in runs:
                pipe.hlen(run_key(record.run, "pub"))
                pipe.hlen(run_key(record.run, "owner"))
                pipe.hvals(run_key(record.run, "busy"))
                pipe.xlen(run_key(record.run, "res"))
                # One field more than is wanted, because none may not be asked for.
                wanted = holders_wanted(reports.shares(record.run))
                pipe.hmget(run_key(record.run, "owner"), ["", *map(str, wanted)])
            answers = pipe.execute()
        for spec, waiting in zip(queues.values(), answers, strict=False):
            readings.add("embq_queue_hints", waiting, spec)
        rest = answers[len(queues) :]
        for at, (record, seen) in enumerate(runs):
            published, leased, busy, results, holders = rest[5 * at : 5 * at + 5]
            begun = done_of(reports.shares(record.run), holders[1:])
            seen = replace(seen, received=published, in_flight=leased, workers=reports, begun=begun)
            put_run(readings, seen, progress_of(record, seen))
            readings.put("embq_run_results", results, record.run)
            oldest_ms = min(_times(cast("list[bytes]", busy)), default=seen.now_ms)
            readings.put("embq_run_oldest_unit_seconds", max(0.0, (seen.now_ms - oldest_ms) / 1000), record.run)


def _is_shown(seen: BrokerSnapshot) -> bool:
    """True if a run has more metrics than its state."""
    return seen.state != RunState.ABSENT and (not seen.state.ended or seen.now_ms - seen.moved_ms < SHOWN_S * 1000)


def put_memory(readings: MetricSamples, memory: Mapping[str, Any]) -> None:
    """Memory of the server."""
    readings.put("embq_broker_memory_bytes", int(memory.get("used_memory", 0)))
    if limit := int(memory.get("maxmemory", 0)):
        readings.put("embq_broker_memory_limit_bytes", limit)


def put_workers(readings: MetricSamples, workers: Iterable[Mapping[str, Any]]) -> None:
    """Speed, bottleneck and stages of each worker, from its report."""
    listed = list(workers)
    if not listed:
        readings.put("embq_workers", 0, "")
    for worker in listed:
        name, told = str(worker.get("name", "")), worker.get("attribution") or {}
        readings.add("embq_workers", 1, str(worker.get("model", "")))
        device = (str(worker.get(part, "")) for part in ("host", "device", "device_name"))
        readings.put("embq_worker_rows_per_second", float(worker.get("rows_per_s") or 0.0), name, *device)
        readings.put("embq_worker_units_held", int(worker.get("held") or 0), name)
        if limit := str(worker.get("limit") or ""):
            readings.put("embq_worker_limit", 1, name, limit)
        for stage, states in told.get("late", {}).get("stages", {}).items():
            for state, share in states.items():
                readings.put("embq_worker_stage_share", share, name, stage, state)


def put_services(readings: MetricSamples, services: Sequence[Service], workers: Iterable[Mapping[str, Any]]) -> None:
    """Numbers of services, machines and devices by state."""
    for role in ROLES:
        readings.put("embq_services", sum(service.role == role for service in services), role)
    # A worker process may report before its supervisor, or its supervisor have another version.
    hosts = {str(worker.get("host")) for worker in workers}
    hosts |= {service.host for service in services if service.role == "worker"}
    readings.put("embq_machines", len(hosts))
    states = [device.state for service in services for device in service.devices]
    for state in STATES:
        readings.put("embq_devices", states.count(state), state)


def put_run(readings: MetricSamples, seen: BrokerSnapshot, look: RunProgress) -> None:
    """Metrics of one run."""
    name = look.run
    title = PurePosixPath(look.output.rstrip("/")).name
    readings.put("embq_run_info", 1, name, title, look.model, seen.state)
    for state in ("done", "received", "in_flight", "queued", "quarantined"):
        readings.put("embq_run_units", getattr(look, state), name, state)
    readings.put("embq_run_rows_total", look.rows, name)
    readings.put("embq_run_tokens_total", look.tokens, name)
    readings.put("embq_run_failures", look.failures, name)
    readings.put("embq_run_truncated", look.truncated, name)
    readings.put("embq_run_rows_per_second", look.rows_per_s, name)
    if look.rows_total is not None:
        readings.put("embq_run_rows_expected", look.rows_total, name)
    if look.eta_s is not None:
        readings.put("embq_run_eta_seconds", look.eta_s, name)
    if look.limit:
        readings.put("embq_run_limit", 1, name, look.limit)
    readings.put("embq_run_results_limit", seen.number("limit_entries"), name)
    readings.put("embq_run_result_bytes", max(0, seen.number("bytes")), name)
    readings.put("embq_run_result_limit_bytes", seen.number("limit_bytes"), name)
    readings.put("embq_run_commit_age_seconds", max(0.0, (seen.now_ms - seen.moved_ms) / 1000), name)


def _times(raw: Iterable[bytes]) -> list[int]:
    """The valid times in ms, each the first word of a value; anything else that a worker wrote is skipped."""
    words = (value.split(b" ", 1)[0] for value in raw)
    return [int(began) for began in words if len(began) < 16 and began.isdigit()]
