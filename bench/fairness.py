"""Sharing of devices by runs: a small one beside a huge one, runs of different weight, and units of different size.

    python -m bench.fairness

Real services around a real server: a producer, a writer and two worker processes with `stub:16`, whose simulated device
takes 1 ms for a sample. In the first two cases a run of 10,000 units (10 samples each) and one of 50 have equal
priority, and the figure is how much of the large one was done when the small one was: 5 % is the bar. In the next ones
two runs go on for ten seconds, and the figure is how many samples the second got done for one of the first.

In the last two the runs have different models, and the workers change theirs in slices of one second. Two runs at
weights of 1 and 3 go on for forty seconds; a sample is a millisecond of a device, so the ratio of samples is that of
device seconds, and 10 % is the bar. And a run of 50 units comes to a large one: how long it waits for its first unit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from bench.report import table, write
from bench.runs import until
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.keys import RUNS, run_key
from embq.core.run.run_info import load_run

MODEL = "stub:16?ms_per_sample=1"
WORKERS = 2
LARGE, SMALL, SAMPLES = 10_000, 50, 10
BAR = 0.05
SECONDS = 10.0
OTHER_MODEL = "stub:17?ms_per_sample=1"
SLICE_S, SLICED_SECONDS, RATIO_BAR = 1.0, 40.0, 0.1


class Cluster:
    """A private server, and services that are started when they are wanted."""

    def __init__(self, folder: Path, server: EmbeddedServer) -> None:
        self.folder = folder
        self.client: redis.Redis = connect(server.url)
        self.environment = {**os.environ, "EMBQ_BROKER_URL": server.url, "EMBQ_SLICE_S": str(SLICE_S)}
        self._services: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the services."""
        for verb in (["writer"], ["producer"], ["worker", "--devices", "cpu", "--workers", str(WORKERS)]):
            with open(self.folder / f"{verb[0]}.log", "ab") as log:
                command = [sys.executable, "-m", "embq", *verb]
                self._services.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def stop(self) -> None:
        for service in reversed(self._services):
            service.terminate()
        for service in self._services:
            service.wait(60)

    def enqueue(self, name: str, units: int, *, samples: int = SAMPLES, priority: int = 10, model: str = MODEL) -> Run:
        """Make a run; returns as soon as it is announced, before the command itself has ended."""
        source, output = self.folder / f"{name}.jsonl", self.folder / name
        with source.open("w") as file:
            for i in range(units * samples):
                file.write(json.dumps({"id": f"{name}{i:08d}", "text": f"{name}: sample number {i}"}) + "\n")
        command = [sys.executable, "-m", "embq", "enqueue", str(source), "-o", str(output), "-m", model]
        command += ["--unit-size", str(samples), "--priority", str(priority)]
        known = self.client.hlen(RUNS)
        with open(self.folder / "enqueue.log", "ab") as log:
            self._services.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        until(lambda: self.client.hlen(RUNS) > known)
        return Run(self.client, load_run(output).run, units, samples)


class Run:
    """A run as the broker sees it."""

    def __init__(self, client: redis.Redis, run: str, units: int, samples: int) -> None:
        self.client = client
        self.run = run
        self.units = units
        self.samples = samples

    def finished(self) -> int:
        """Units that are published or committed."""
        published = int(self.client.hlen(run_key(self.run, "pub")))
        return published + int(self.client.bitcount(run_key(self.run, "done")))


@contextmanager
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder, EmbeddedServer(Path(folder) / "b") as server:
        made = Cluster(Path(folder), server)
        try:
            yield made
        finally:
            made.stop()
            made.client.close()


def small_beside_large(case: str, *, later: bool) -> dict[str, Any]:
    """Units of the large run that were finished from the announcement of the small one to its end."""
    with cluster() as made:
        large = made.enqueue("large", LARGE)
        if later:
            made.start()
            until(lambda: large.finished() >= 500)
        small = made.enqueue("small", SMALL)
        before, began = large.finished(), time.monotonic()
        if not later:
            made.start()
            until(lambda: large.finished() + small.finished())
            began = time.monotonic()
        until(lambda: small.finished() == SMALL)
        share = (large.finished() - before) / LARGE
        seconds = time.monotonic() - began
    return {"case": case, "small_done_s": round(seconds, 2), "large_done": round(share, 4), "bar": BAR}


def side_by_side(case: str, *, priority: int, samples: int) -> dict[str, Any]:
    """Samples of the second run for one of the first, and what it ought to be."""
    with cluster() as made:
        first = made.enqueue("first", 4000)
        second = made.enqueue("second", 40_000 // samples, samples=samples, priority=priority)
        made.start()
        until(lambda: first.finished() and second.finished())
        before = [run.finished() for run in (first, second)]
        time.sleep(SECONDS)
        done = [(run.finished() - n) * run.samples for run, n in zip((first, second), before, strict=True)]
    return {"case": case, "first_samples": done[0], "ratio": round(done[1] / done[0], 2), "wanted": priority / 10}


def two_models(case: str, *, priority: int) -> dict[str, Any]:
    """Samples of the second run for one of the first, whose model is another one, and what it ought to be."""
    with cluster() as made:
        first = made.enqueue("first", 10_000)
        second = made.enqueue("second", 10_000, priority=priority, model=OTHER_MODEL)
        made.start()
        until(lambda: first.finished() and second.finished())
        before = [run.finished() for run in (first, second)]
        time.sleep(SLICED_SECONDS)
        done = [(run.finished() - n) * run.samples for run, n in zip((first, second), before, strict=True)]
    busy = sum(done) / 1000 / WORKERS / SLICED_SECONDS
    ratio = round(done[1] / done[0], 2)
    return {"case": case, "ratio": ratio, "wanted": priority / 10, "device_busy": round(busy, 2), "slice_s": SLICE_S}


def small_of_another_model(case: str) -> dict[str, Any]:
    """Seconds that a small run waits for its first unit while a large one with another model is served."""
    with cluster() as made:
        large = made.enqueue("large", LARGE)
        made.start()
        until(lambda: large.finished() >= 500)
        small, began = made.enqueue("small", SMALL, model=OTHER_MODEL), time.monotonic()
        until(small.finished)
        first_s = time.monotonic() - began
        until(lambda: small.finished() == SMALL)
        done_s = time.monotonic() - began
    return {"case": case, "first_unit_s": round(first_s, 2), "done_s": round(done_s, 2), "slice_s": SLICE_S}


def main() -> None:
    """Measure, print and write."""
    load = os.getloadavg()[0]
    small = [
        small_beside_large("10,000 and 50 units, together", later=False),
        small_beside_large("10,000 units, and 50 that come later", later=True),
    ]
    table(list(small[0]), [list(row.values()) for row in small])
    shared = [
        side_by_side("equal priority, equal units", priority=10, samples=10),
        side_by_side("priority 10 and 30", priority=30, samples=10),
        side_by_side("units of 10 and 100 samples", priority=10, samples=100),
    ]
    table(list(shared[0]), [list(row.values()) for row in shared])
    sliced = two_models("two models, priority 10 and 30", priority=30)
    table(list(sliced), [list(sliced.values())])
    late = small_of_another_model("50 units of another model that come later")
    table(list(late), [list(late.values())])
    missed = [row["case"] for row in small if row["large_done"] > BAR]
    print(f"at most {BAR:.0%} of the large run first: " + (f"MISSED by {', '.join(missed)}" if missed else "held"))
    off = abs(sliced["ratio"] / sliced["wanted"] - 1)
    print(f"two models within {RATIO_BAR:.0%} of their weights: {'held' if off <= RATIO_BAR else 'MISSED'}")
    figures = {
        "small_beside_large": small,
        "side_by_side": shared,
        "two_models": sliced,
        "small_of_another_model": late,
        "load_average": round(load, 2),
    }
    print("wrote", write("fairness", figures))


if __name__ == "__main__":
    main()
