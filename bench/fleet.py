"""What a thousand devices cost: each operation by the size of the fleet, and simulated fleets with exact rows.

    python -m bench.fleet [--devices 100,300] [--sizes 10,100,300,1000,3000] [--seconds 60] [--unit-s 10] [--quick]

First the operations of `bench.fleet_growth`, alone and beside the reports of so many devices. Then fleets in real time:

Broker, producer and writer are those of `embq`, in processes of their own; the units are planned by `embq enqueue`. A
device is a task that speaks the protocol of a worker through its own classes (`ClaimPolicy`, `Ledger`, `PublishStage`),
and only waits where a worker would compute: the fastest ones are ten times as fast as the slowest, and a unit takes the
mean of them UNIT_S seconds. A tenth of the devices is killed at a third of the time, as many come at a half, and the
server is killed and started again at two thirds, from data up to a second old.

At the end `embq verify` looks at every row. Figures: CPU time of broker, producer and writer as shares of a core while
all devices work; CPU time and bytes of a device's look; seconds from the first idle device to the last commit. The
share of a fleet that this machine cannot simulate in time (`rate_of_ideal` below 0.9) says nothing; that of 1,000
devices is computed from the operations. `--quick` does a little of everything in a minute, and writes nothing.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from bench import fleet_growth, fleet_picture
from bench.fleet_growth import COMMAND, LEASE_S
from bench.report import RESULTS, table, write
from bench.runs import until, write_texts
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue import hints
from embq.core.queue.heartbeats import WORKER_REPORTS
from embq.core.queue.hints import Hint
from embq.core.queue.keys import run_key, speeds_key
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.runs import active
from embq.core.queue.scripts import load_scripts
from embq.core.units import Unit
from embq.producer.feeder import TICK_S
from embq.sources.unit_reader import read
from embq.worker.claim.claim_policy import ClaimPolicy
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages.publish import PublishStage

ROWS = 10
"""Rows of a unit: the writer takes them without being the limit."""
PROCESSES = 4
SPEEDS = 10
"""Kinds of devices, from 1 to as many times as fast."""
BEAT_S, REPORT_S = 5.0, 1.0
AGAIN_S = 0.5
"""After which a device with enough in hand asks itself again. A worker does so up to a hundred times a second, on its
own machine."""
FILLER = {"attribution": {f"part{n}": {"seconds": 1.25, "causes": {"device": 0.5}} for n in range(24)}}
"""Makes a report as long as that of a worker."""


class Speed:
    """What a device knows of its speed, which is exact here; in place of `Throughput`."""

    unit_samples = float(ROWS)

    def __init__(self, unit_s: float) -> None:
        self.unit_s = unit_s
        self.ends = 0.0

    def ahead_s(self, held: list[LeasedUnit]) -> float:
        """Seconds until what is held is done."""
        rest = max(0.0, self.ends - time.monotonic())
        return rest + self.unit_s * max(0, len(held) - 1)

    def seconds_of(self, unit: Unit) -> float:
        """Seconds for a unit; all are alike."""
        return self.unit_s

    def unit_claimed(self, unit: Unit) -> None:
        """All are alike."""


class Device:
    """One device and its worker process, without the waiting."""

    def __init__(self, name: str, unit_s: float, world: World) -> None:
        self.name, self.world = name, world
        self.leases, self.speed = Leases(), Speed(unit_s)
        self.waiting: deque[LeasedUnit] = deque()
        self.current: LeasedUnit | None = None
        self.idle_since: float | None = None
        self.policy = ClaimPolicy(
            world.client,
            self.leases,
            self.speed,  # type: ignore[arg-type]
            world.record.model,
            name=name,
            runs=lambda: [world.record.run],
            prefetch=2,
            embedder=SimpleNamespace(batch_size=1, window=1),  # type: ignore[arg-type]
        )

    def claim(self) -> float:
        """Claim what there is room for; gives seconds until the next time."""
        looked, began = self.policy._looked_at, time.thread_time()
        room = self.policy.room()
        what = "room" if self.policy._looked_at == looked else "look"
        self.world.spent.setdefault(what, []).append(time.thread_time() - began)
        if room:
            queue = self.policy._queue
            with self.world.timed("claim"):
                jobs = hints.pop(queue, room)
                found = [(job, Hint.from_job(job)) for job in jobs]
                fit = self.policy.fits([hint.unit for _, hint in found]) if found else 0
                hints.put_back(queue, [job.id for job, _ in found[fit:]])
                for _, hint in found[:fit]:
                    self._claim(hint)
                with self.world.client.pipeline() as pipe:
                    for job, _ in found[:fit]:
                        hints.drop(pipe, queue, job.id)
                    pipe.execute()
        if not self.waiting and self.current is None and self.idle_since is None:
            self.idle_since = time.monotonic()
        return AGAIN_S

    def _claim(self, hint: Hint) -> None:
        ledger, token = self.world.ledger, new_token(hint.gen, self.name)
        claim = ledger.claim(
            *(hint.u, token),
            lease_s=LEASE_S,
            fingerprint=self.world.embedder.fingerprint,
            idle=not self.leases.snapshot(),
            unit_s=self.speed.unit_s,
        )
        if claim.granted:
            unit = LeasedUnit(hint, self.world.record, ledger, token, attempts=claim.attempts, poison=claim.poison)
            self.policy.claimed(hint.unit, from_far=False)
            self.leases.add(unit)
            self.waiting.append(unit)

    def begin(self) -> float | None:
        """Begin the next unit; gives the seconds that it takes, None where there is none."""
        while self.current is None and self.waiting:
            unit = self.waiting.popleft()
            with self.world.timed("start"):
                if not unit.lost and unit.begin():
                    self.current, self.idle_since = unit, None
                    self.speed.ends = time.monotonic() + self.speed.unit_s
                    return self.speed.unit_s
            unit.drop()
        return None

    def end(self) -> None:
        """The unit in hand is computed: publish it."""
        unit, self.current = self.current, None
        if unit is None or unit.lost:
            return
        samples = list(read(unit.unit, ()))
        embedder = self.world.embedder
        vectors = embedder.embed(embedder.prepare(samples))
        unit.add_rows(samples, {name: np.asarray(rows, np.float16) for name, rows in vectors.items()})
        unit.end_of_read(len(samples))
        with self.world.timed("publish"):
            self.world.publish.run(unit)

    def report(self) -> None:
        """Say what it does, as a worker does each second."""
        held = self.leases.snapshot()
        fields = {
            "name": self.name,
            "model": self.world.record.model.spec,
            "held": len(held),
            "device": "cuda:0",
            **self.policy.describe(),
            **FILLER,
        }
        with self.world.timed("report"):
            WORKER_REPORTS.report(self.world.client, fields, life_s=3 * LEASE_S, scripts=self.world.scripts)

    def beat(self) -> None:
        """Extend its leases."""
        if held := self.leases.snapshot():
            with self.world.timed("beat"):
                _, lost = self.world.ledger.beat(
                    held[0].gen,
                    [(one.u, one.token) for one in held],
                    lease_s=LEASE_S,
                    outlook={self.current.token: (self.speed.ends - time.monotonic(), 1.0)} if self.current else None,
                )
            for unit in held:
                if unit.token in lost and not unit.publishing:
                    unit.lost = True
                    unit.end()


class World:
    """What the devices of one process share: a connection, and the clock of events."""

    def __init__(self, url: str) -> None:
        self.client = connect(url, patient=True)
        self.scripts = load_scripts(self.client)
        (self.record,) = active(self.client).values()
        self.ledger = Ledger(self.client, self.record.run, scripts=self.scripts)
        self.embedder: Any = load(self.record.model, "cpu")
        self.publish = PublishStage(
            Meter(), fingerprint=self.embedder.fingerprint, dims=self.embedder.dims, transport="payload"
        )
        self.spent: dict[str, list[float]] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the CPU time of a step of a device."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.spent.setdefault(what, []).append(time.thread_time() - began)

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Do something later."""
        self._number += 1
        heapq.heappush(self._events, (time.monotonic() + seconds, self._number, do))

    def add(self, device: Device, alive: Callable[[], bool]) -> None:
        """Have a device work for as long as it is alive."""

        def work() -> None:
            if alive() and (seconds := device.begin()) is not None:
                self.after(seconds, ended)

        def ended() -> None:
            if alive():
                device.end()
                work()

        def claim() -> None:
            if alive():
                seconds = device.claim()
                if device.current is None:
                    work()
                self.after(seconds, claim)

        def every(seconds: float, do: Callable[[], object]) -> None:
            if alive():
                do()
                self.after(seconds, lambda: every(seconds, do))

        delay = self._number % 997 / 997
        self.after(delay, claim)
        self.after(delay, lambda: every(REPORT_S, device.report))
        self.after(delay * BEAT_S, lambda: every(BEAT_S, device.beat))

    def run(self, over: Callable[[], bool]) -> None:
        """Let time pass until it is over."""
        looked = 0.0
        while True:
            now = time.monotonic()
            if now - looked > 0.2:
                looked = now
                if over():
                    return
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
                self.publish.again()
            time.sleep(min(0.05, max(0.0, self._events[0][0] - time.monotonic())) if self._events else 0.05)


def devices(url: str, numbers: range, unit_s: float, schedule: dict[str, float], ready: Any, found: Any) -> None:
    """The devices of one process."""
    os.environ["EMBQ_LOG"] = "error"
    world = World(url)
    ready.wait(300)
    began = time.monotonic()

    def unit_s_of(number: int) -> float:
        mean = sum(range(1, SPEEDS + 1)) / SPEEDS
        return unit_s * mean / (1 + number % SPEEDS)

    made: list[Device] = []

    def add(number: int) -> None:
        device = Device(f"d{number}", unit_s_of(number), world)
        dies = schedule["kill"] if number % 10 == 3 and number in numbers else float("inf")
        world.add(device, lambda: time.monotonic() - began < dies)
        made.append(device)

    for number in numbers:
        add(number)
    for number in numbers:
        if number % 10 == 3:
            world.after(schedule["join"], lambda number=number: add(number + 1_000_000))  # type: ignore[misc]
    world.run(lambda: world.record.run not in active(world.client))
    idle = [one.idle_since for one in made if one.idle_since is not None]
    found.put((world.spent, min(idle, default=time.monotonic())))


def measure(folder: Path, count: int, seconds: float, unit_s: float) -> dict[str, Any]:
    """One run on so many devices, of about so many seconds."""
    units = int(count * seconds / unit_s)
    source, output = write_texts(folder / f"{count}.jsonl", units * ROWS), folder / "out"
    with (
        fleet_growth.broker(folder / "broker") as (server, client),
        fleet_growth.service("producer", url=server.url, log=folder / "producer.log") as producer,
        fleet_growth.service("writer", url=server.url, log=folder / "writer.log") as writer,
    ):
        environment = {**os.environ, "EMBQ_BROKER_URL": server.url}
        words = ["enqueue", str(source), "--output", str(output), "--model", "stub:16", "--unit-size", str(ROWS)]
        subprocess.run([*COMMAND, *words], env=environment, check=True, capture_output=True)
        until(lambda: any(Ledger(client, run).gen() for run in active(client)))
        services = {"producer": producer, "writer": writer}
        return watch(client, server, services, count, seconds, unit_s) | verified(output, environment)


def watch(
    client: Any, server: EmbeddedServer, services: dict[str, Any], count: int, seconds: float, unit_s: float
) -> dict[str, Any]:
    """Let the devices work, with what goes wrong on the way; the figures."""
    (record,) = active(client).values()
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    schedule = {"kill": seconds / 3, "join": seconds / 2}
    share = max(25, -(-count // PROCESSES))
    ready = context.Barrier(1 + -(-count // share))
    url = server.url
    processes = [
        context.Process(
            target=devices, args=(url, range(at, min(count, at + share)), unit_s, schedule, ready, found), daemon=True
        )
        for at in range(0, count, share)
    ]
    for process in processes:
        process.start()
    ready.wait(300)
    began = time.monotonic()
    time.sleep(min(10.0, seconds / 4))
    assert server.process is not None
    parts = {"broker": psutil.Process(server.process.pid), **services}
    before = {name: sum(part.cpu_times()[:2]) for name, part in parts.items()}
    sent, looked = int(client.info("stats")["total_net_output_bytes"]), time.monotonic()
    units = finished_units(client, record.run)
    time.sleep(max(0.0, began + 0.6 * seconds - time.monotonic()))
    taken, units = time.monotonic() - looked, finished_units(client, record.run) - units
    shares = {name: (sum(part.cpu_times()[:2]) - before[name]) / taken for name, part in parts.items()}
    sent = int(client.info("stats")["total_net_output_bytes"]) - sent
    look_bytes = len(client.get(speeds_key(record.model.queue_key)) or b"")
    server.process.kill()
    server.process.wait()
    server.start()
    answers = [found.get(timeout=20 * seconds + 120) for _ in processes]
    ended = time.monotonic()
    spent: dict[str, list[float]] = {}
    for one, _ in answers:
        for what, times in one.items():
            spent.setdefault(what, []).extend(times)
    return {
        "devices": count,
        "rate_of_ideal": round(units / taken * unit_s / count, 2),
        "looks_per_unit": round(len(spent.get("look", ())) / max(1, len(spent["publish"])), 2),
        **{f"{name}_share": round(value, 3) for name, value in shares.items()},
        "sent_mb_per_s": round(sent / taken / 1e6, 2),
        "look_bytes": look_bytes,
        **{f"{what}_us": round(1e6 * sum(times) / len(times)) for what, times in sorted(spent.items())},
        "took_s": round(ended - began, 1),
        "idle_tail_s": round(ended - min(first for _, first in answers), 1),
        "slowest_unit_s": round(unit_s * sum(range(1, SPEEDS + 1)) / SPEEDS, 1),
    }


def finished_units(client: Any, run: str) -> int:
    """Units that are published or committed."""
    return int(client.hlen(run_key(run, "pub"))) + int(client.bitcount(run_key(run, "done")))


def verified(output: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What `embq verify` says of the rows."""
    done = subprocess.run(
        [*COMMAND, "verify", str(output), "--json"], env=environment, capture_output=True, text=True, check=False
    )
    said = json.loads(done.stdout) if done.stdout.startswith("{") else {"stderr": done.stderr[-500:]}
    return {"verified": done.returncode == 0, "said": {name: said[name] for name in list(said)[:12]}}


BROKER_BAR = 0.35
IN_TIME = 0.9
"""Units per second of those that the devices could do, below which a simulation was not held in real time."""


def extrapolated_share(rows: list[dict[str, Any]]) -> float | None:
    """The server's share for 1,000 devices by the largest fleet that was held in time; None without one."""
    row = max((row for row in rows if row["rate_of_ideal"] >= IN_TIME), key=lambda row: row["devices"], default=None)
    return None if row is None else round(row["broker_share"] * 1_000 / row["devices"], 3)


def computed_share(costs: dict[str, Any], text: dict[str, float], looks_per_unit: float) -> float:
    """The server's share of a core for 1,000 devices, from the costs of its operations beside so many.

    Of each device a report a second, a beat in five, and a unit of 10 s with its looks; of each of 125 machines the
    report of its supervisor each five seconds; of the producer five rounds a second.
    """
    ms = {name: told["broker_ms"] for name, told in costs.items()}
    devices = 1_000 * (ms["report"] / REPORT_S + ms["beat"] / BEAT_S)
    units = 1_000 / 10 * (text["broker"] + looks_per_unit * ms["look"])
    machines = 125 * ms["service_round"] / 5
    return round((devices + units + machines + ms["tick"] / TICK_S) / 1000, 3)


def bars(figures: dict[str, Any], rows: list[dict[str, Any]]) -> list[tuple[str, float, float | str, str]]:
    """(what, figure, bar, whether it is held) of each bar."""
    at, page = figures["growth"]["1000"], figures["pages"]
    found: list[tuple[str, float, float]] = [
        ("look before a claim at 1,000 devices, ms", at["look"]["client_ms"], 1.0),
        ("the same, bytes", at["look"]["bytes"], 2000),
        ("producer's round, 1,000 devices and 1,000 runs over, ms", at["tick"]["client_ms"], 10.0),
        ("idle worker beside 1,000 runs over, share of a core", figures["idle_worker"]["worker"], 0.005),
        *((f"{name}, 1,000 devices and 100 runs, s", page[name], 0.2) for name in page if "start" not in name),
        ("all processes, unit of one text, ms", figures["one_text"]["all"], 5.0),
        ("server for 1,000 devices, computed, share of a core", figures["computed_share"], BROKER_BAR),
    ]
    if (share := figures["extrapolated_share"]) is not None:
        found.append(("the same, by the largest fleet held in time", share, BROKER_BAR))
    for row in rows:
        found.append((f"idle tail, {row['devices']} devices, s", row["idle_tail_s"], row["slowest_unit_s"]))
        found.append((f"rows wrong or missing, {row['devices']} devices", 0 if row["verified"] else 1, 0))
    return [(what, figure, bar, "held" if figure <= bar else "MISSED") for what, figure, bar in found]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description="What a fleet costs, simulated.")
    parser.add_argument("--devices", default="100,300")
    parser.add_argument("--sizes", default="10,100,300,1000,3000")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--unit-s", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    times, texts, idle_s, rounds = (10, 60, 3.0, 1) if asked.quick else (100, 2_000, 30.0, 9)
    if asked.quick:
        asked.devices, asked.sizes, asked.seconds, asked.unit_s = "20", "1000", 4.0, 1.0
    figures: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 1), "growth": {}}
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
        folder = Path(name)
        for size in asked.sizes.split(","):
            figures["growth"][size] = fleet_growth.operations(folder, int(size), times)
            print(size, json.dumps(figures["growth"][size]), flush=True)
        figures["one_text"] = fleet_growth.one_text(folder, texts)
        figures["idle_worker"] = fleet_growth.idle_worker(folder, idle_s)
        figures["pages"] = fleet_growth.pages(folder, rounds)
    rows = []
    for count in map(int, filter(None, asked.devices.split(","))):
        with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
            rows.append(measure(Path(name), count, asked.seconds, asked.unit_s))
        print(json.dumps(rows[-1]), flush=True)
    looks = max((row["looks_per_unit"] for row in rows), default=2.0)
    figures["computed_share"] = computed_share(figures["growth"]["1000"], figures["one_text"], looks)
    figures["extrapolated_share"] = extrapolated_share(rows) if asked.unit_s == 10.0 else None
    if rows:
        shown = [name for name in rows[0] if name != "said"]
        table(["", *(str(row["devices"]) for row in rows)], [[name, *(row[name] for row in rows)] for name in shown])
    table(["", "measured", "bar", ""], bars(figures, rows))
    if not asked.quick:
        figures |= {"bars": bars(figures, rows), "seconds": asked.seconds, "unit_s": asked.unit_s, "rows": rows}
        in_time = [row for row in rows if row["rate_of_ideal"] >= IN_TIME]
        fleet_picture.draw(RESULTS / "fleet.png", figures["growth"], in_time, figures["computed_share"], BROKER_BAR)
        print("wrote", write("fleet", figures))


if __name__ == "__main__":
    main()
