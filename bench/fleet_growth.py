"""CPU time and bytes of what services do for a fleet, by its size: the real clients against a real server.

`bench.fleet` runs it. Reports of devices are there as a fleet leaves them; each operation is called again and again by
itself, and its CPU time is that of the calling thread and of the server.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import redis

from bench.fleet_page import SimulatedFleet
from bench.runs import until, write_texts
from embq.app.services.broker_metrics import BrokerMetrics
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.heartbeats import WORKER_REPORTS, services
from embq.core.queue.keys import run_key
from embq.core.queue.reporting import Reporter, this_service
from embq.core.queue.runs import RunRecord, active, end, register
from embq.core.queue.scripts import load_scripts
from embq.core.service.metrics import MetricSamples
from embq.producer.feeder import TICK_S, Feeder
from embq.retrieval.ui.fleet.fragments import Fragments
from embq.retrieval.ui.fleet.history import Histories
from embq.retrieval.ui.fleet.live import frame
from embq.retrieval.ui.fleet.snapshot import Sampler
from embq.retrieval.ui.fleet.sources import BrokerSource
from embq.worker.claim.claim_policy import ClaimPolicy
from embq.worker.claim.lease import Leases
from embq.worker.claim.scheduler import Scheduler

FINISHED = 1_000
DEVICES, RUNS = 1_000, 100
"""Of the pages."""
LEASE_S = 30.0
COMMAND = [sys.executable, "-m", "embq"]


@contextmanager
def broker(folder: Path) -> Iterator[tuple[EmbeddedServer, redis.Redis]]:
    """A server and a client of it."""
    with EmbeddedServer(folder) as server, connect(server.url, patient=True) as client:
        yield server, client


@contextmanager
def service(*words: str, url: str, log: Path) -> Iterator[Any]:
    """A service of its own process."""
    environment = {**os.environ, "EMBQ_BROKER_URL": url, "EMBQ_LEASE_S": f"{LEASE_S:g}"}
    with log.open("w") as file:
        process = psutil.Popen([*COMMAND, *words], env=environment, stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def operations(folder: Path, count: int, times: int) -> dict[str, dict[str, float]]:
    """What each operation costs beside so many devices, and beside `FINISHED` runs that are over."""
    with broker(folder / f"broker-{count}") as (_, client):
        fleet = SimulatedFleet(client, folder / f"fleet-{count}", devices=count, runs=1, life_s=3600, units=1_000)
        (case,) = fleet.runs
        finished(client, case.record, FINISHED)
        policy = ClaimPolicy(
            client,
            Leases(),
            SimpleNamespace(unit_samples=10.0, unit_s=10.0, ahead_s=lambda _held: 0.0),  # type: ignore[arg-type]
            case.record.model,
            name="looks",
            runs=lambda: [case.record.run],
            prefetch=2,
            embedder=SimpleNamespace(batch_size=1, window=1),  # type: ignore[arg-type]
        )

        def look() -> None:
            policy._look_at = 0.0
            policy.room()

        skipped_s = 0.0
        feeder = Feeder(client, lease_s=LEASE_S, clock=lambda: time.monotonic() + skipped_s)

        def tick() -> None:
            nonlocal skipped_s
            feeder.tick()
            skipped_s += TICK_S  # as if it had slept: it reads the reports after a time, not at each tick

        def looks() -> dict[str, float]:
            while True:
                feeder._look_at = 0.0
                feeder.tick()
                found = cost(client, look, times)
                if policy._peers:
                    return found
                # The sum of speeds is valid for three seconds, and a busy machine did not give us as long.

        scripts, gen = load_scripts(client), case.gen
        report = fleet.worker("gpu-0.cuda0.abcdef", "gpu-0", 0)
        held = [(u, case.claim(u)) for u in (20, 21)]
        reporter = Reporter(lambda _stopped: client, this_service("worker", version="0.1.0"))
        scheduler = Scheduler(client, run="", slice_s=60.0)
        return {
            "look": looks(),
            "tick": cost(client, tick, 5 * max(5, times // 5)),
            "report": cost(client, lambda: WORKER_REPORTS.report(client, report, scripts=scripts), times),
            "beat": cost(client, lambda: case.ledger.beat(gen, held, lease_s=LEASE_S), times),
            "idle_look": cost(client, scheduler._survey, times),
            "service_round": cost(client, lambda: reporter._report(client), times),
        }


def finished(client: redis.Redis, record: RunRecord, count: int) -> None:
    """So many runs that are over."""
    meta = client.hgetall(run_key(record.run, "meta"))
    for number in range(count):
        one = replace(record, run=f"{number:016x}", output=f"{record.output}-{number}")
        register(client, one)
        client.hset(run_key(one.run, "meta"), mapping=meta | {b"state": b"done", b"done": meta[b"total"]})
        end(client, one.run, one.units)


def cost(client: redis.Redis, do: Callable[[], object], times: int) -> dict[str, float]:
    """ms of CPU of the caller and of the server, and bytes that the server sends: means of so many calls."""
    do()
    _server(client)
    before, began = _server(client), time.thread_time()
    for _ in range(times):
        do()
    spent_s = time.thread_time() - began
    empty, after = _server(client), _server(client)
    # What `_server` itself costs is in both differences, once.
    broker_s, sent = (2 * e - b - a for b, e, a in zip(before, empty, after, strict=True))
    return {
        "client_ms": round(1000 * spent_s / times, 3),
        "broker_ms": round(1000 * max(0.0, broker_s) / times, 3),
        "bytes": round(sent / times),
    }


def _server(client: redis.Redis) -> tuple[float, float]:
    """CPU seconds of the server, and bytes that it has sent."""
    told = client.info("cpu", "stats")
    return told["used_cpu_user"] + told["used_cpu_sys"], float(told["total_net_output_bytes"])


def idle_worker(folder: Path, seconds: float) -> dict[str, float]:
    """Shares of a core of a worker process with nothing to do beside `FINISHED` runs, and of its supervisor."""
    with broker(folder / "broker-idle") as (server, client):
        fleet = SimulatedFleet(client, folder / "idle", devices=1, runs=1, life_s=1)
        finished(client, fleet.runs[0].record, FINISHED)
        for run, record in active(client).items():
            end(client, run, record.units)
        assert not active(client)
        with service("worker", "--devices", "cpu", url=server.url, log=folder / "idle.log") as process:
            until(lambda: "idle" in [device.state for one in services(client) for device in one.service.devices])
            time.sleep(3)
            before, began = _of_both(process), time.monotonic()
            time.sleep(seconds)
            spent = [now - then for now, then in zip(_of_both(process), before, strict=True)]
            return {
                name: round(one / (time.monotonic() - began), 4)
                for name, one in zip(("supervisor", "worker"), spent, strict=True)
            }


def _of_both(process: Any) -> tuple[float, float]:
    """CPU seconds of a supervisor, and of its worker process."""
    own = float(sum(process.cpu_times()[:2]))
    return own, family_s(process) - own


def family_s(process: Any) -> float:
    """CPU seconds of a process and its descendants so far."""
    return float(sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True))))


def pages(folder: Path, times: int) -> dict[str, float]:
    """CPU seconds of `embq status`, of the metrics and of the fleet page, at `DEVICES` devices and `RUNS` runs.

    Of `embq status` it is the whole process without what the same takes before a broker that knows nothing.
    """
    with broker(folder / "broker-pages") as (server, client), broker(folder / "broker-none") as (nothing, _):
        SimulatedFleet(client, folder / "pages", devices=DEVICES, runs=RUNS, life_s=3600)
        metrics, sampler, fragments = BrokerMetrics(client), Sampler([BrokerSource(server.url)]), Fragments(Histories())

        def metrics_page() -> None:
            metrics(samples := MetricSamples("producer"))
            samples.text()

        def fleet_page() -> None:
            parts = fragments.fleet(sampler.sample(), may_act=False)
            sum(len(frame(name, html)) for name, html in parts.items())

        found = {"metrics": _cpu_s(metrics_page, times), "fleet_page": _cpu_s(fleet_page, times)}
        sampler.stop()
        commands = {"status": ["status"], "status_json": ["status", "--json"]}
        for name, words in list(commands.items())[: 1 if times == 1 else 2]:
            whole, start = (
                statistics.median(_command_s(words, one.url) for _ in range(max(1, times // 3)))
                for one in (server, nothing)
            )
            found |= {name: round(whole - start, 3), f"{name}_start": round(start, 3)}
        return found


def _cpu_s(do: Callable[[], object], times: int) -> float:
    do()
    began = time.thread_time()
    for _ in range(times):
        do()
    return round((time.thread_time() - began) / times, 3)


def _command_s(words: list[str], url: str) -> float:
    """CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "EMBQ_BROKER_URL": url}
    subprocess.run([*COMMAND, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def one_text(folder: Path, units: int) -> dict[str, float]:
    """ms of CPU of each process for a unit of one text, from the queue to the last commit; the start is not counted."""
    with broker(folder / "broker-text") as (server, client):
        assert server.process is not None
        parts: dict[str, Any] = {"broker": psutil.Process(server.process.pid)}

        def run(count: int) -> None:
            source = write_texts(folder / f"text-{count}.jsonl", count)
            words = ["enqueue", str(source), "--output", str(folder / f"text-{count}"), "--model", "stub:16"]
            environment = {**os.environ, "EMBQ_BROKER_URL": server.url}
            subprocess.run([*COMMAND, *words, "--unit-size", "1"], env=environment, check=True, capture_output=True)
            until(lambda: not active(client))

        with (
            service("producer", url=server.url, log=folder / "producer.log") as parts["producer"],
            service("writer", url=server.url, log=folder / "writer.log") as parts["writer"],
            service("worker", "--devices", "cpu", url=server.url, log=folder / "worker.log") as parts["worker"],
        ):
            run(8)
            before = {name: family_s(part) for name, part in parts.items()}
            run(units)
            spent = {name: 1000 * (family_s(part) - before[name]) / units for name, part in parts.items()}
    return {name: round(value, 3) for name, value in spent.items()} | {"all": round(sum(spent.values()), 3)}
