"""Time of the stages of a worker, in a run that decoding limits and in one that the device limits.

    python -m bench.stages [--seconds 20]

Both are `embq run` as a user starts it, over the same photographs of 1024x768 pixels in a folder (60 of them, each
linked many times), with a device that sleeps: half a millisecond for each image in the first run, and 8 ms in the
second. All else is that of any model: reading, decoding to 224x224 by `cpu-exact`, queues, publishing, the broker and
the writer. The shares are those that the worker reports every second, as `embq status` shows them; a figure of a second
is the difference of two reports. Writes `build/bench/stages.json` and `stages.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from bench.pictures import jpegs
from bench.report import RESULTS, table, write
from bench.stages_picture import draw
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.process.limits import cores as usable_cores
from embq.core.queue.heartbeats import live_workers
from embq.core.run.layout import Layout

SIZE, DIFFERENT, SEED = (1024, 768), 60, 0
DECODED_PER_S = 300
"""By one core, about: so many images are linked as fill the time."""
RUNS = {"decode-bound": "stub:64?pixels=224&ms_per_sample=0.5", "device-bound": "stub:64?pixels=224&ms_per_sample=8"}
DEVICE_PER_S = 125
LOOK_S = 0.1
LEAST_S = 0.5
"""Interval of a figure over time; two reports may come sooner one after the other."""


def main() -> None:
    """Measure, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run, about")
    seconds = parser.parse_args().seconds
    cores = usable_cores()
    counts = {
        "decode-bound": int(seconds * DECODED_PER_S * cores),
        "device-bound": int(seconds * min(DEVICE_PER_S, DECODED_PER_S * cores)),
    }
    runs = []
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
        folder = Path(name)
        originals = folder / "originals"
        originals.mkdir()
        for number, content in enumerate(jpegs(SIZE, DIFFERENT, SEED)):
            (originals / f"{number:03d}.jpg").write_bytes(content)
        for kind, model in RUNS.items():
            photographs = folder / kind
            photographs.mkdir()
            for number in range(counts[kind]):
                os.link(originals / f"{number % DIFFERENT:03d}.jpg", photographs / f"{number:06d}.jpg")
            runs.append({"run": kind, "model": model, "images": counts[kind], **one_run(photographs, folder, model)})
    show(runs)
    figures = {"size": list(SIZE), "decode": "cpu-exact", "threads": cores, "runs": runs}
    draw(RESULTS / "stages.png", figures)
    print(f"wrote {write('stages', figures)} and {RESULTS / 'stages.png'}")


def one_run(photographs: Path, folder: Path, model: str) -> dict[str, Any]:
    """`embq run` from start to finish, with what its worker reported."""
    out = folder / f"{photographs.name}-out"
    command = [sys.executable, "-m", "embq", "run", photographs, "-o", out, "-m", model, "--devices", "cpu"]
    process = subprocess.Popen([*map(str, command), "--unit-size", "100", "--quiet", "--json"], stdout=subprocess.PIPE)
    reports: list[dict[str, Any]] = []
    client: redis.Redis | None = None
    while process.poll() is None:
        url = EmbeddedServer.find(Layout(out).broker) if client is None else None
        client = connect(url) if url else client
        if client is not None:
            with suppress(redis.exceptions.RedisError):  # before the server answers, and after it has ended
                for said in live_workers(client):
                    told = said["attribution"]["whole"]
                    if told["seconds"] >= LEAST_S + (reports[-1]["seconds"] if reports else 0.0):
                        reports.append(told)
        time.sleep(LOOK_S)
    if process.returncode or process.stdout is None:
        raise SystemExit(f"embq run ended with status {process.returncode}")
    done = json.loads(process.stdout.read())
    if done["rows"] != len(list(photographs.iterdir())):
        raise SystemExit(f"{done['rows']} rows of {photographs}: the figures would be wrong")
    whole = done["limit_detail"]["so_far"]
    return {"rows_per_s": done["rows_per_s"], **whole, "over_time": over_time(reports)}


def over_time(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From one report to the next: where the time went between them, in seconds since the first unit and in shares."""
    empty: dict[str, Any] = {"seconds": 0.0, "causes": {}, "stages": {}}
    return [
        {
            "from_s": before["seconds"],
            "to_s": after["seconds"],
            "causes": _between(before["causes"], after["causes"], before["seconds"], after["seconds"]),
            "stages": {
                stage: _between(before["stages"].get(stage, {}), states, before["seconds"], after["seconds"])
                for stage, states in after["stages"].items()
            },
        }
        for before, after in zip([empty, *reports], reports, strict=False)
    ]


def _between(before: Mapping[str, float], after: Mapping[str, float], from_s: float, to_s: float) -> dict[str, float]:
    """Shares of the time between two reports, from those of the time until each."""
    spent = {name: share * to_s - before.get(name, 0.0) * from_s for name, share in after.items()}
    return {name: round(min(1.0, max(0.0, seconds / (to_s - from_s))), 3) for name, seconds in spent.items()}


def show(runs: list[dict[str, Any]]) -> None:
    """The totals as a table."""
    rows = [
        (run["run"], stage, *(f"{states[state]:.0%}" for state in ("busy", "starved", "blocked")))
        for run in runs
        for stage, states in run["stages"].items()
    ]
    table(("run", "stage", "busy", "waits for input", "blocked"), rows)
    for run in runs:
        cores = f", {run['cores_needed']} cores would keep the device busy" if run["cores_needed"] else ""
        print(f"{run['run']}: {run['rows_per_s']:,.0f} images/s, limited by {run['limit']}{cores}")


if __name__ == "__main__":
    main()
