"""Cost of a unit from the manifest to the commit record, for units of 1, 10, 100 and 1,000 samples on one worker.

    python -m bench.roundtrip

Two runs for each size, with `embq run` as a user starts it: `stub:384` without device time gives the cost of the
machinery (units/s, and CPU time of all embq processes and of the server per unit); `stub:384?ms_per_sample=10` gives
the share of the time in which the simulated device is busy. Busy share = samples x 10 ms / (last commit - first unit);
the time of the last commit includes the writer's final flush, so the share is a lower bound.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import table, write
from bench.runs import write_texts

SIZES = {1: 4000, 10: 2000, 100: 1000, 1000: 300}
"""Samples per unit -> units of the run without device time."""
DEVICE_MS = 10.0
DEVICE_S = 25.0
"""Simulated device time of each run with device time."""


def main() -> None:
    """Measure, print and write."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        for size, units in SIZES.items():
            free = measure(Path(folder), size, units, ms=0.0)
            busy_units = max(4, round(DEVICE_S * 1000 / DEVICE_MS / size))
            busy = measure(Path(folder), size, busy_units, ms=DEVICE_MS)
            figures.append(
                {
                    "samples_per_unit": size,
                    "units": units,
                    "units_per_s": round(units / free["embed_s"], 1),
                    "rows_per_s": round(units * size / free["embed_s"], 1),
                    "cpu_ms_per_unit": round(free["cpu_s"] * 1000 / units, 2),
                    "device_busy": round(busy_units * size * DEVICE_MS / 1000 / busy["embed_s"], 3),
                    "device_units": busy_units,
                }
            )
    table(list(figures[0]), [list(row.values()) for row in figures])
    print("wrote", write("roundtrip", {"rows": figures, "device_ms_per_sample": DEVICE_MS}))


def measure(folder: Path, size: int, units: int, *, ms: float) -> dict[str, float]:
    """One run: seconds from its first unit to its last commit, and CPU seconds of everything it started.

    The CPU time of a run of four units is subtracted: starting five processes is not the cost of a unit.
    """
    whole = _run(folder, size, units, ms)
    start_up = _run(folder, size, 4, 0.0)
    return {"embed_s": whole["embed_s"], "cpu_s": max(0.0, whole["cpu_s"] - start_up["cpu_s"])}


def _run(folder: Path, size: int, units: int, ms: float) -> dict[str, float]:
    name = f"{size}-{units}-{ms}"
    source, output = write_texts(folder / f"{size}-{units}.jsonl", size * units), folder / f"out-{name}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "embq", "run", str(source), "--output", str(output), "--json"),
            *("--model", f"stub:384?ms_per_sample={ms}", "--unit-size", str(size), "--devices", "cpu"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["rm", "-r", str(output)], check=True)
    status = json.loads(done.stdout)
    assert status["rows"] == size * units, status
    return {
        "embed_s": status["timing"]["embed_s"],
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


if __name__ == "__main__":
    main()
