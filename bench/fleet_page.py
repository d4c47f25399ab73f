"""The fleet page with 1,000 devices, 100 runs and 200 viewers: time of its parts, and what the broker and viewers cost.

    python -m bench.fleet_page

A real valkey holds reports of 125 machines with 8 devices, and 100 runs, 20 of them at work. Rates move between two
samples, so that every part that can change does.
"""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from starlette.applications import Starlette

from bench.report import write
from embq.app.services.http_server import bound, server_of
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.heartbeats import SERVICE_REPORTS, WORKER_REPORTS, Device
from embq.core.queue.reporting import this_service
from embq.core.queue.runs import register
from embq.core.queue.scripts import load_scripts
from embq.retrieval.ui.fleet.fragments import Fragments
from embq.retrieval.ui.fleet.history import Histories
from embq.retrieval.ui.fleet.live import frame
from embq.retrieval.ui.fleet.pages import FleetPages
from embq.retrieval.ui.fleet.snapshot import Sampler
from embq.retrieval.ui.fleet.sources import BrokerSource
from tests.support.outputs.run_case import RunCase, make_case

DEVICES, RUNS, AT_WORK, VIEWERS, SECONDS = 1000, 100, 20, 200, 15
OF_A_MACHINE = 8
"""Devices."""
TIMES = 30
"""Renderings that are measured."""
LIFE_S = 3600


def main() -> int:
    """Measure, print and write."""
    with (
        tempfile.TemporaryDirectory(prefix="embq-ui") as folder,
        EmbeddedServer(Path(folder) / "b") as server,
        connect(server.url) as client,
    ):
        fleet = SimulatedFleet(client, Path(folder))
        machines = DEVICES // OF_A_MACHINE
        figures = {"machines": machines, "devices": DEVICES, "runs": RUNS, **rendering(server.url, fleet)}
        with fleet.moving():
            for viewers in (1, VIEWERS):
                figures[f"viewers_{viewers}"] = asyncio.run(watched(server.url, client, viewers))
    print(figures)
    print(write("fleet_page", figures))
    return 0


class SimulatedFleet:
    """Reports of machines, and runs, in a real broker.

    Args:
        units: of a run.
        life_s: of a report.
    """

    def __init__(
        self,
        client: redis.Redis,
        folder: Path,
        *,
        devices: int = DEVICES,
        runs: int = RUNS,
        units: int = 40,
        life_s: float = LIFE_S,
    ) -> None:
        self._client, self._scripts = client, load_scripts(client)
        self._devices, self._life_s = devices, life_s
        self.runs = [make_case(client, folder / f"run-{number:03d}", units) for number in range(runs)]
        for number, case in enumerate(self.runs):
            register(client, case.record)
            self._progress(case, number)
        self.services = [this_service("writer", version="0.1.0"), this_service("producer", version="0.1.0")]
        self.report()

    def _progress(self, case: RunCase, number: int) -> None:
        writer = case.writer()
        for u in range(40 if number >= AT_WORK else 12):
            case.work_one(u, failed=[1] if u % 9 == 0 else [])
        writer.step()
        case.clock.advance(31)
        for _ in range(3):
            writer.step()

    def report(self) -> None:
        """All services and workers report, as they do every few seconds."""
        for first in range(0, self._devices, OF_A_MACHINE):
            host = f"gpu-{first // OF_A_MACHINE:03d}"
            devices = []
            for number in range(min(OF_A_MACHINE, self._devices - first)):
                name = f"{host}.cuda{number}.abcdef"
                devices.append(
                    Device(
                        device=f"cuda:{number}",
                        name="NVIDIA H100 80GB HBM3",
                        state="serving",
                        worker=name,
                        memory_used_bytes=random.randrange(9, 40) * 10**9,
                        memory_bytes=85 * 10**9,
                    )
                )
                WORKER_REPORTS.report(
                    self._client, self.worker(name, host, number), life_s=self._life_s, scripts=self._scripts
                )
            service = this_service("worker", version="0.1.0")
            values = {"name": f"{host}.worker.abcdef", "host": host, "devices": tuple(devices), "cores": 64}
            report = type(service)(**{**_fields(service), **values, "memory_bytes": 10**12})
            SERVICE_REPORTS.report(self._client, report, life_s=self._life_s, scripts=self._scripts)

    def worker(self, name: str, host: str, number: int) -> dict[str, Any]:
        """The report of a worker."""
        run = self.runs[number % min(AT_WORK, len(self.runs))]
        busy = random.uniform(0.5, 1.0)
        late = {
            "causes": {"device": busy},
            "stages": {
                "read": {"busy": 0.1, "starved": 0.0, "blocked": 0.9},
                "prepare": {"busy": 0.4, "starved": 0.1, "blocked": 0.5},
                "embed": {"busy": busy, "starved": 1 - busy, "blocked": 0.0},
                "publish": {"busy": 0.05, "starved": 0.95, "blocked": 0.0},
            },
        }
        return {
            "name": name,
            "host": host,
            "device": f"cuda:{number}",
            "device_name": "NVIDIA H100 80GB HBM3",
            "model": run.record.model.spec,
            "rows_per_s": random.uniform(600, 1100),
            "ahead_s": random.uniform(0, 5),
            "unit_s": random.uniform(2, 20),
            "held": 2,
            "unit": "7b02ee" + "0" * 26,
            "stage": "embed",
            "age_s": random.uniform(0, 12),
            "limit": "device",
            "attribution": {
                "threads": 8,
                "cores": 64,
                "decode": "",
                "late": late,
                "whole": {"limit": "device", **late},
            },
            "runs": {run.info.run: {"tokens_per_s": 900.0, "units": 2, "size": 1000, "begun": [], "in_batch": 10}},
        }

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Reports go on in a thread until the block ends."""
        stopped = threading.Event()

        def go() -> None:
            while not stopped.wait(1.0):
                self.report()

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def _fields(service: Any) -> dict[str, Any]:
    return {name: getattr(service, name) for name in service.__slots__}


def rendering(url: str, fleet: SimulatedFleet) -> dict[str, Any]:
    """Time of a sample, and of the page's parts from it."""
    sampler = Sampler([BrokerSource(url)])
    sampler.sample()
    samples, renders, size = [], [], 0
    fragments = Fragments(Histories())
    for _ in range(TIMES):
        fleet.report()
        began = time.perf_counter()
        snapshot = sampler.sample()
        samples.append(time.perf_counter() - began)
        began = time.perf_counter()
        parts = fragments.fleet(snapshot, may_act=False)
        size = sum(len(frame(name, html)) for name, html in parts.items())
        renders.append(time.perf_counter() - began)
    sampler.stop()
    return {
        "sample_ms": _spread(samples),
        "render_ms": _spread(renders),
        "bytes_of_all_parts": size,
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered) * 1000, 1),
        "p95": round(ordered[int(0.95 * len(ordered))] * 1000, 1),
    }


async def watched(url: str, client: redis.Redis, viewers: int) -> dict[str, Any]:
    """Commands of the broker, processor time, and age of what viewers get, with a number of viewers."""
    pages = FleetPages([BrokerSource(url)])
    app = Starlette(routes=pages.routes)
    with bound("127.0.0.1", 0) as listener:
        listener.listen(512)
        server = server_of(app, pages.leave)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.05)
        port = listener.getsockname()[1]
        counts = [0] * viewers
        streams = [asyncio.create_task(_view(port, counts, number)) for number in range(viewers)]
        while min(counts) == 0:
            await asyncio.sleep(0.1)
        before, began = _commands(client), time.monotonic()
        cpu, first = _cpu_s(), list(counts)
        await asyncio.sleep(SECONDS)
        elapsed = time.monotonic() - began
        commands, cpu = _commands(client) - before, _cpu_s() - cpu
        events = [now - then for now, then in zip(counts, first, strict=True)]
        began = time.monotonic()
        server.should_exit = True
        await serving
        ended = time.monotonic() - began
        await asyncio.gather(*streams, return_exceptions=True)
    pages.stop()
    return {
        "commands_per_s": round(commands / elapsed, 1),
        "cpu_share_with_clients_and_reports": round(cpu / elapsed, 3),
        "updates_per_viewer_per_s": [round(min(events) / elapsed, 2), round(max(events) / elapsed, 2)],
        "stop_s": round(ended, 2),
    }


async def _view(port: int, counts: list[int], number: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    writer.write(f"GET /ui/fleet/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    while data := await reader.read(2**20):
        counts[number] += data.count(b"event: machines\n")
    writer.close()


def _commands(client: redis.Redis) -> int:
    """Commands that the broker has answered, without those of the reports."""
    stats = client.info("commandstats")
    return sum(
        int(one["calls"]) for name, one in stats.items() if name.startswith("cmdstat_") and not _of_reports(name)
    )


def _of_reports(name: str) -> bool:
    return name in ("cmdstat_evalsha", "cmdstat_zadd", "cmdstat_set", "cmdstat_info", "cmdstat_time")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
