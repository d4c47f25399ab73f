"""Prometheus metrics of runs, workers and services, by what the broker knows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import redis

from embq.app.status.broker_snapshot import BrokerSnapshot, Reports, take_snapshots
from embq.app.status.run_monitor import progress_of
from embq.app.status.run_progress import UNIT_STATES, RunProgress
from embq.core.queue.heartbeats import ROLES, STATES, Rate, Service, live_workers, rates_of, services
from embq.core.queue.keys import RATES, UPLOADS, queue_name, run_key
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, registered
from embq.core.run.control import VERBS, RunState
from embq.core.service.health import single_try_client
from embq.core.service.metrics import MetricSamples

ANSWER_S = 2.0
"""Timeout of one answer; less than the timeout of a scrape."""
SHOWN_S = 600.0
"""A run that has ended has all of its metrics for so long, so that the last values are scraped."""
UNIT_S = 1.0
"""Work of a unit whose samples or whose model's speed are not known yet: enough to start a first worker."""

_Run = tuple[RunRecord, BrokerSnapshot]


class BrokerMetrics:
    """Reads a broker, in as many exchanges for many runs as for one; see `embq.core.service.metrics.PRODUCER`.

    Args:
        client: leads to the broker. A client of its own is made of it, which does not wait while it is unreachable.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = single_try_client(client, answer_s=ANSWER_S)

    def __call__(self, samples: MetricSamples) -> None:
        """Put all; raises redis.exceptions.RedisError if the broker is unreachable."""
        samples.put("embq_broker_up", 0)
        records = list(registered(self._client).values())
        samples.put("embq_broker_up", 1)
        workers = live_workers(self._client)
        put_workers(samples, workers)
        put_services(samples, [report.service for report in services(self._client)], workers)
        ledgers = [Ledger(self._client, record.run, scripts={}) for record in records]
        snapshots = take_snapshots(ledgers, Reports(workers), [])
        states = Counter(snapshot.state for snapshot in snapshots)
        for state in (*VERBS.values(), RunState.DONE, RunState.ABSENT):
            samples.put("embq_runs", states[state], state or "waiting")
        self._put_queues(samples, [run for run in zip(records, snapshots, strict=True) if _is_shown(run[1])])

    def _put_queues(self, samples: MetricSamples, runs: Sequence[_Run]) -> None:
        """Put memory, uploads, queues and the shown runs."""
        models = {record.model.queue_key: record.model.spec for record, _ in runs}
        with self._client.pipeline(transaction=False) as pipe:
            pipe.info("memory")
            pipe.hlen(UPLOADS)
            for key in models:
                pipe.llen(f"rq:queue:{queue_name(key)}")
            for record, _ in runs:
                pipe.xlen(run_key(record.run, "res"))
                pipe.hvals(run_key(record.run, "busy"))
            pipe.hgetall(RATES)
            memory, uploads, *answers, rates = pipe.execute()
        put_memory(samples, memory)
        samples.put("embq_uploads", uploads)
        hints: Counter[str] = Counter()
        for spec, waiting in zip(models.values(), answers, strict=False):
            hints[spec] += waiting
        for spec, waiting in hints.items():
            samples.put("embq_queue_hints", waiting, spec)
        of_runs, left_s = answers[len(models) :], 0.0
        for (record, snapshot), results, busy in zip(runs, of_runs[::2], of_runs[1::2], strict=True):
            progress = put_run(samples, record, snapshot)
            if snapshot.state == RunState.RUNNING:
                left_s += work_left_s(progress, rates_of(record.model, rates))
            samples.put("embq_run_results", results, record.run)
            oldest_ms = min(_times(busy), default=snapshot.now_ms)
            samples.put("embq_run_oldest_unit_seconds", max(0.0, (snapshot.now_ms - oldest_ms) / 1000), record.run)
        samples.put("embq_work_left_seconds", left_s)


def _is_shown(snapshot: BrokerSnapshot) -> bool:
    """True if a run has more metrics than its state."""
    state, age_ms = snapshot.state, snapshot.now_ms - snapshot.moved_ms
    return state != RunState.ABSENT and (not state.ended or age_ms < SHOWN_S * 1000)


def put_memory(samples: MetricSamples, memory: Mapping[str, Any]) -> None:
    """Put the memory of the server."""
    samples.put("embq_broker_memory_bytes", int(memory.get("used_memory", 0)))
    if limit := int(memory.get("maxmemory", 0)):
        samples.put("embq_broker_memory_limit_bytes", limit)


def put_workers(samples: MetricSamples, workers: Sequence[Mapping[str, Any]]) -> None:
    """Put speed, bottleneck and stages of each worker, from its report."""
    models = Counter(str(worker.get("model", "")) for worker in workers)
    for model, count in (models or {"": 0}).items():
        samples.put("embq_workers", count, model)
    for worker in workers:
        name = str(worker.get("name", ""))
        device = (str(worker.get(part, "")) for part in ("host", "device", "device_name"))
        samples.put("embq_worker_rows_per_second", float(worker.get("rows_per_s") or 0.0), name, *device)
        samples.put("embq_worker_units_held", int(worker.get("held") or 0), name)
        if limit := str(worker.get("limit") or ""):
            samples.put("embq_worker_limit", 1, name, limit)
        for stage, states in (worker.get("attribution") or {}).get("late", {}).get("stages", {}).items():
            for state, share in states.items():
                samples.put("embq_worker_stage_share", share, name, stage, state)


def put_services(samples: MetricSamples, services: Sequence[Service], workers: Sequence[Mapping[str, Any]]) -> None:
    """Put the numbers of services, machines and devices by state."""
    for role in ROLES:
        samples.put("embq_services", sum(service.role == role for service in services), role)
    # A worker process may report before its supervisor, or its supervisor have another version.
    hosts = {str(worker.get("host")) for worker in workers}
    hosts |= {service.host for service in services if service.role == "worker"}
    samples.put("embq_machines", len(hosts))
    states = Counter(device.state for service in services for device in service.devices)
    for state in STATES:
        samples.put("embq_devices", states[state], state)


def work_left_s(progress: RunProgress, rates: Sequence[Rate]) -> float:
    """Seconds that one worker process of mean speed needs for the units of a run that are not embedded."""
    units = progress.queued + progress.in_flight
    speed = sum(rate.rows_per_s for rate in rates) / len(rates) if rates else 0.0
    if not speed or not progress.rows_total:
        return units * UNIT_S
    return units / progress.units_total * progress.rows_total / speed


def put_run(samples: MetricSamples, record: RunRecord, snapshot: BrokerSnapshot) -> RunProgress:
    """Put the metrics of one run; returns its progress."""
    progress = progress_of(record, snapshot)
    title = PurePosixPath(progress.output.rstrip("/")).name
    samples.put("embq_run_info", 1, progress.run, title, progress.model, snapshot.state)
    for state in UNIT_STATES:
        samples.put("embq_run_units", getattr(progress, state), progress.run, state)
    if progress.limit:
        samples.put("embq_run_limit", 1, progress.run, progress.limit)
    values = {
        "embq_run_rows_total": progress.rows,
        "embq_run_tokens_total": progress.tokens,
        "embq_run_rows_expected": progress.rows_total,
        "embq_run_failures": progress.failures,
        "embq_run_truncated": progress.truncated,
        "embq_run_rows_per_second": progress.rows_per_s,
        "embq_run_eta_seconds": progress.eta_s,
        "embq_run_results_limit": snapshot.number("limit_entries"),
        "embq_run_result_bytes": max(0, snapshot.number("bytes")),
        "embq_run_result_limit_bytes": snapshot.number("limit_bytes"),
        "embq_run_commit_age_seconds": max(0.0, (snapshot.now_ms - snapshot.moved_ms) / 1000),
    }
    for name, value in values.items():
        if value is not None:
            samples.put(name, value, progress.run)
    return progress


def _times(raw: Iterable[bytes]) -> list[int]:
    """The valid times in ms, each the first word of a value; anything else that a worker wrote is skipped."""
    words = (value.split(b" ", 1)[0] for value in raw)
    return [int(began) for began in words if len(began) < 16 and began.isdigit()]
