"""Simulated devices of unequal speed in one run: how close the end of the run is to the earliest one possible.

    python -m bench.devices

Two fleets, 10:1:1 and 5:3:1, take 2,000 units of 8 samples from one queue, with `embq run` as a user starts it. The
devices sleep (`stub:64?ms_per_sample=...`, divided by the speed); the passes are those of any other model, and so are
reading, publishing, the broker and the writer. Ideal = work / sum of the speeds. Makespan: from the beginning of the
first pass to the end of the last, of all devices (`EMBQ_TRACE`); the bar is 1.05 times the ideal. `of_present` counts
each device from its own first pass on, so that it leaves out what the processes took to start one after the other. The
control is computed: the same units, dealt out evenly beforehand.

Then a fleet in which a device of speed 3 is ended (SIGTERM) after a third of the run, one of speed 1 killed (SIGKILL)
after half of it, and one of speed 2 joins after two thirds; its ideal counts each device while it is there. And units
of 1, 10, 100 and 1,000 samples at 10 ms each on one device: the share of the time in which it is busy; the bar is that
units of one sample are within 10 % of the best.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from bench.devices_picture import draw
from bench.report import RESULTS, table, write
from bench.runs import until, write_texts
from bench.traces import Batch, busy_shares, idle_ends, makespan, read_traces, rows_twice, workers
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.keys import RUNS, run_key

FLEETS = ((10.0, 1.0, 1.0), (5.0, 3.0, 1.0))
UNITS, SAMPLES = 2000, 8
IDEAL_S = 40.0
"""The work is as much as takes so long."""
BAR = 1.05
SIZES, SIZE_MS, SIZE_S = (1, 10, 100, 1000), 10.0, 20.0
SIZE_BAR = 0.9
DEADLINE_S = 240.0


def main() -> None:
    """Measure, print, draw and write."""
    traces: dict[str, list[Batch]] = {}
    fleets = []
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
        folder = Path(name)
        for speeds in FLEETS:
            figures, batches = fleet(folder, speeds)
            fleets.append(figures)
            traces[figures["fleet"]] = batches
        changing, traces["changing"] = come_and_go(folder)
        sizes = [unit_size(folder, size) for size in SIZES]
    best = max(row["busy"] for row in sizes)
    for row in sizes:
        row["of_best"] = round(row["busy"] / best, 3)
    shown = (
        "fleet",
        "ideal_s",
        "makespan_s",
        "of_ideal",
        "of_present",
        "to_commit_s",
        "even_split_of_ideal",
        "rows_twice",
    )
    table(shown, [[row[name] for name in shown] for row in [*fleets, changing]])
    table(list(sizes[0]), [list(row.values()) for row in sizes])
    figures = {"fleets": fleets, "changing": changing, "unit_sizes": sizes, "bar": BAR, "unit_size_bar": SIZE_BAR}
    print("wrote", write("devices", figures))
    picture = RESULTS / "devices.png"
    draw(picture, list(traces.values()), [*fleets, changing])
    print("wrote", picture)


def name_of(speeds: Sequence[float]) -> str:
    """A fleet as it is written: 10:1:1."""
    return ":".join(f"{speed:g}" for speed in speeds)


def fleet(folder: Path, speeds: Sequence[float]) -> tuple[dict[str, Any], list[Batch]]:
    """One run on devices of these speeds; its figures, and what each device did."""
    ms = IDEAL_S * sum(speeds) / (UNITS * SAMPLES) * 1000
    status, batches = one_run(folder, name_of(speeds), UNITS, SAMPLES, ms=ms, speeds=speeds)
    took = makespan(batches)
    return {
        "fleet": name_of(speeds),
        "ms_per_sample": round(ms, 3),
        "ideal_s": IDEAL_S,
        "makespan_s": round(took, 2),
        "of_ideal": round(took / IDEAL_S, 3),
        "of_present": round(took / ideal_of(batches, {}, ms), 3),
        "to_commit_s": round(status["timing"]["embed_s"], 2),
        "even_split_of_ideal": round(even_split_s(speeds, ms) / IDEAL_S, 2),
        "rows_twice": rows_twice(batches, UNITS * SAMPLES),
        "devices": devices_of(batches),
    }, batches


def even_split_s(speeds: Sequence[float], ms: float) -> float:
    """Seconds until the last device is through where each gets as many of the same units as the others."""
    share = -(-UNITS // len(speeds))
    return share * SAMPLES * ms / 1000 / min(speeds)


def devices_of(batches: list[Batch]) -> list[dict[str, Any]]:
    """Figures of each worker process."""
    ends, shares = idle_ends(batches), busy_shares(batches)
    return [
        {
            "device": own[0].device,
            "rows": sum(batch.rows for batch in own),
            "busy": round(shares[name], 3),
            "late_s": round(own[0].began - batches[0].began, 2),
            "idle_end_s": round(ends[name], 2),
        }
        for name, own in workers(batches).items()
    ]


def one_run(
    folder: Path, name: str, units: int, samples: int, *, ms: float, speeds: Sequence[float]
) -> tuple[dict[str, Any], list[Batch]]:
    """`embq run` on simulated devices; gives its last status, and what was traced."""
    name = name.replace(":", "-")
    source, trace = write_texts(folder / f"{name}.jsonl", units * samples), folder / f"trace-{name}"
    devices = ",".join(f"sim:{speed:g}" for speed in speeds)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "embq", "run", str(source), "--output", str(folder / name), "--json"),
            *("--model", f"stub:64?ms_per_sample={ms}", "--unit-size", str(samples), "--devices", devices),
        ],
        env={**os.environ, "EMBQ_TRACE": str(trace)},
        capture_output=True,
        text=True,
        check=True,
    )
    status = json.loads(done.stdout)
    assert status["rows"] == units * samples, status
    return status, read_traces(trace)


def unit_size(folder: Path, size: int) -> dict[str, Any]:
    """One device, units of one size: the share of the time in which it is busy."""
    units = max(2, round(SIZE_S * 1000 / SIZE_MS / size))
    _, batches = one_run(folder, f"size-{size}", units, size, ms=SIZE_MS, speeds=(1.0,))
    ideal_s = units * size * SIZE_MS / 1000
    return {"samples_per_unit": size, "units": units, "busy": round(ideal_s / makespan(batches), 3)}


def come_and_go(folder: Path) -> tuple[dict[str, Any], list[Batch]]:
    """Devices of speed 4, 3 and 1 at first; one leaves, one is killed, and one joins."""
    ms = IDEAL_S * 6 / (UNITS * SAMPLES) * 1000
    trace, output = folder / "trace-changing", folder / "changing"
    source = write_texts(folder / "changing.jsonl", UNITS * SAMPLES)
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(folder / "broker"))
        client = stack.enter_context(connect(server.url))
        environment = {**os.environ, "EMBQ_BROKER_URL": server.url, "EMBQ_TRACE": str(trace)}

        def start(*arguments: str) -> psutil.Popen:
            log = stack.enter_context(open(folder / "services.log", "ab"))
            process = psutil.Popen([sys.executable, "-m", "embq", *arguments], env=environment, stdout=log, stderr=log)
            stack.callback(end, process)
            return process

        for verb in ("writer", "producer"):
            start(verb)
        staying, leaving, dying = (start("worker", "--devices", f"sim:{speed}") for speed in (4, 3, 1))
        start(
            "enqueue", str(source), "-o", str(output), "-m", f"stub:64?ms_per_sample={ms}", "--unit-size", str(SAMPLES)
        )
        until(lambda: client.hlen(RUNS) == 1)
        ((run, _),) = client.hgetall(RUNS).items()
        left: dict[str, float] = {}

        def done() -> int:
            return int(client.hget(run_key(run.decode(), "meta"), "done") or 0)

        until(lambda: done() >= UNITS // 3)
        leaving.send_signal(signal.SIGTERM)
        leaving.wait(60)
        left["sim:3"] = time.time()
        until(lambda: done() >= UNITS // 2)
        left["sim:1"] = time.time()
        for child in [*dying.children(recursive=True), dying]:
            child.kill()
        until(lambda: done() >= 2 * UNITS // 3)
        start("worker", "--devices", "sim:2")
        until(lambda: done() == UNITS)
        assert staying.is_running()
    batches = read_traces(trace)
    took, ideal_s = makespan(batches), ideal_of(batches, left, ms)
    return {
        "fleet": "4:3:1, 3 leaves, 1 is killed, 2 joins",
        "ms_per_sample": round(ms, 3),
        "ideal_s": round(ideal_s, 2),
        "makespan_s": round(took, 2),
        "of_ideal": round(took / ideal_s, 3),
        "of_present": round(took / ideal_s, 3),
        "to_commit_s": None,
        "even_split_of_ideal": None,
        "rows_twice": rows_twice(batches, UNITS * SAMPLES),
        "devices": devices_of(batches),
    }, batches


def ideal_of(batches: list[Batch], left: Mapping[str, float], ms: float) -> float:
    """Seconds until all the work could be done by devices that are there from their first pass until they leave."""
    work = UNITS * SAMPLES * ms / 1000
    began = batches[0].began
    there = []
    for own in workers(batches).values():
        device = own[0].device
        there.append((own[0].began - began, left.get(device, float("inf")) - began, float(device.partition(":")[2])))
    low, high = 0.0, DEADLINE_S
    while high - low > 1e-3:
        middle = (low + high) / 2
        could = sum(speed * max(0.0, min(middle, until) - since) for since, until, speed in there)
        low, high = (low, middle) if could >= work else (middle, high)
    return high


def end(process: psutil.Popen) -> None:
    """Stop a service, if it is there still."""
    if process.is_running() and process.poll() is None:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
