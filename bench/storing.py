"""The writer's speed and memory with each part format, beside the plain library calls that write the same rows.

    python -m bench.storing [FORMAT ...]

The writer does all that it does in a run: it reads published results from the broker, checks each against the
manifest, writes parts, hashes and syncs them, creates the commit record and acknowledges. The plain calls write the
same rows with the same columns from memory, hash nothing and sync nothing (see `bench.storing_plain`). Both write on
one disk, in turns; figures are medians over the rounds. `ratio` is the speed of the writer over that of the plain call,
`ratio_synced` over that of the plain call and an fsync of what it wrote, which is what the writer gives.

Then the CPU time of the writer for each unit of 10,000 rows: where it writes them, and where workers have written them
as parts.

At last, for each format, a run that is larger than memory would let a writer hold: the rate that one writer sustains,
and its peak memory over the size of its largest part, in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.report import RESULTS, table, write
from bench.storing_plain import PLAIN
from bench.storing_run import DIM, UNIT_ROWS, StoredRun
from embq.core.broker.embedded import EmbeddedServer
from embq.core.formats.part import UNIT_FORMATS
from embq.core.run.reader import row_tables
from embq.core.storage.durable import fsync_file

UNITS, ROUNDS = 40, 5
SUSTAINED_UNITS = 200
LARGE_ROWS, LARGE_UNITS = 10_000, {"staging": 20, "part": 400}
BAR, MEMORY_BAR = 0.8, 1.5
GPU_ROWS_PER_S = (500, 2_000, 10_000)
"""Rows per second of one device for which the number of devices that one writer carries is told."""


def main() -> None:
    """Measure, print, write and plot."""
    formats = sys.argv[1:] or list(PLAIN)
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_number in range(ROUNDS):
        for name in formats:
            _one_round(name, round_number, seconds)
    rows = UNITS * UNIT_ROWS
    speed = [_speed(name, who, values, rows, seconds) for (name, who), values in sorted(seconds.items())]
    table(list(speed[0]), [list(figures.values()) for figures in speed])
    units = [_unit_cost(name, "staging") for name in formats]
    units += [_unit_cost(name, "part") for name in formats if name in UNIT_FORMATS]
    table(list(units[0]), [list(figures.values()) for figures in units])
    sustained = [_sustained(name) for name in formats]
    table(list(sustained[0]), [list(figures.values()) for figures in sustained])
    carries = [_carries(one) for one in sustained]
    figures = {
        "speed": speed,
        "units": units,
        "sustained": sustained,
        "carries": carries,
        "rows": rows,
        "dim": DIM,
        "dtype": "float16",
        "rounds": ROUNDS,
        "bar": BAR,
        "memory_bar": MEMORY_BAR,
        "memory_baseline": "resident memory of the writer's process when it has opened the run and read no result",
    }
    table(list(carries[0]), [list(one.values()) for one in carries])
    print("wrote", write("storing", figures), "and", _plot(speed))


def _one_round(name: str, seed: int, seconds: dict[tuple[str, str], list[float]]) -> None:
    for transport in ("staging", "payload"):
        with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
            run = StoredRun(Path(folder) / "out", units=UNITS, format=name, seed=seed)
            with EmbeddedServer(run.layout.broker) as server:
                writer, ledger = run.writer(server), run.ledger(server)
                for u in range(UNITS):
                    run.publish(ledger, u, run.result(u), transport)
                began = time.perf_counter()
                while not writer.finished:
                    writer.step()
                seconds.setdefault((name, f"embq, {transport}"), []).append(time.perf_counter() - began)
            rows = pa.concat_tables(row_tables(run.layout.root)).combine_chunks()
            assert rows.num_rows == run.rows
            for who, plain in PLAIN[name].items():
                began = time.perf_counter()
                plain(rows, Path(folder))
                seconds.setdefault((name, who), []).append(time.perf_counter() - began)
                for path in Path(folder).glob("plain.*"):
                    fsync_file(path)
                seconds.setdefault((name, f"{who}, and fsync"), []).append(time.perf_counter() - began)
                for path in Path(folder).glob("plain.*"):
                    path.unlink()


def _speed(
    name: str, who: str, values: list[float], rows: int, seconds: dict[tuple[str, str], list[float]]
) -> dict[str, Any]:
    median = statistics.median(values)
    plain = list(PLAIN[name])[-1]
    bound, synced = (statistics.median(seconds[name, one]) for one in (plain, f"{plain}, and fsync"))
    return {
        "format": name,
        "who": who,
        "seconds": round(median, 3),
        "rows_per_s": round(rows / median),
        "mb_per_s": round(rows * DIM * 2 / 1e6 / median),
        "ratio": round(bound / median, 2),
        "ratio_synced": round(synced / median, 2),
    }


def _unit_cost(name: str, transport: str) -> dict[str, Any]:
    """CPU time of the writer for a unit."""
    count = LARGE_UNITS[transport]
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        run = StoredRun(Path(folder) / "out", units=count, format=name, unit_rows=LARGE_ROWS)
        with EmbeddedServer(run.layout.broker) as server:
            writer, ledger = run.writer(server), run.ledger(server)
            run.publish_all(ledger, transport)
            began, began_cpu = time.perf_counter(), time.process_time()
            while not writer.finished:
                writer.step()
            seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
            assert writer.committer.state.rows == run.rows
    return {
        "format": name,
        "rows_of": "workers" if transport == "part" else "the writer",
        "units": count,
        "cpu_ms_per_unit": round(cpu / count * 1e3, 3),
        "ms_per_unit": round(seconds / count * 1e3, 3),
    }


def _sustained(name: str) -> dict[str, Any]:
    """One writer that does nothing else, over a long run."""
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        root = Path(folder) / "out"
        run = StoredRun(root, units=SUSTAINED_UNITS, format=name)
        with EmbeddedServer(run.layout.broker) as server:
            child = subprocess.Popen(
                [sys.executable, "-m", "bench.storing_memory", str(root), server.url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            began = time.perf_counter()
            child.stdin.write("go\n")
            child.stdin.close()
            run.publish_all(run.ledger(server))
            before, peak = (int(word) for word in child.stdout.readline().split())
            elapsed = time.perf_counter() - began
            assert child.wait() == 0
        records = [json.loads(path.read_text()) for path in sorted((root / "commits").iterdir())]
        parts = [sum(f["bytes"] for f in record["files"]) for record in records if record["kind"] == "data"]
        assert records[-1]["totals"]["rows"] == run.rows
    return {
        "format": name,
        "rows_per_s": round(run.rows / elapsed),
        "mb_per_s": round(sum(parts) / 1e6 / elapsed),
        "bytes_per_row": round(sum(parts) / run.rows),
        "parts": len(parts),
        "part_mb": round(max(parts) / 1e6, 1),
        "baseline_mb": round(before / 1e6, 1),
        "peak_mb": round(peak / 1e6, 1),
        "peak_over_part": round((peak - before) / max(parts), 2),
        "with_baseline": round(peak / max(parts), 2),
    }


def _carries(sustained: dict[str, Any]) -> dict[str, Any]:
    """Number of devices of each speed that fill one writer: its rows/s over theirs."""
    devices = {f"devices_at_{rate}_rows_per_s": round(sustained["rows_per_s"] / rate, 1) for rate in GPU_ROWS_PER_S}
    return {"format": sustained["format"], "rows_per_s": sustained["rows_per_s"], **devices}


def _plot(speed: list[dict[str, Any]]) -> Path:
    """Bars of MB/s by format: ours, and those of the plain calls."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(speed) + 1.2), layout="constrained")
    names = [f"{one['format']}: {one['who']}" for one in speed]
    colors = ["tab:blue" if one["who"].startswith("embq") else "tab:gray" for one in speed]
    bars = axes.barh(names, [one["mb_per_s"] for one in speed], color=colors)
    axes.bar_label(bars, [f"{one['mb_per_s']} (x {one['ratio']})" for one in speed], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(one["mb_per_s"] for one in speed))
    axes.set_xlabel("MB/s of vectors; x: over the plain call")
    figure.suptitle(f"Writing rows of {DIM} float16 with captions")
    path = RESULTS / "storing.svg"
    figure.savefig(path)
    return path


if __name__ == "__main__":
    main()
