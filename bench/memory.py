"""Memory of the worker and of the writer over a run of 1,000,000 samples: flat, or growing?

    python -m bench.memory [SAMPLES]

A run of `stub:384` as a user starts it; the resident set of each embq process is read from /proc twice a second.
Reported are the peaks up to 10 % and up to 100 % of the rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.report import table, write
from bench.runs import write_texts

LOOK_S = 0.5


def main() -> None:
    """Measure, print and write."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        source, output = write_texts(Path(folder) / "texts.jsonl", samples), Path(folder) / "out"
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "embq", "run", str(source), "--output", str(output), "--json"),
                *("--model", "stub:384", "--unit-size", "1000", "--devices", "cpu"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        series = watch(run, output, samples)
        assert run.stdout is not None
        status = json.loads(run.stdout.read())
    assert status["rows"] == samples, status
    figures = []
    for name, points in sorted(series.items()):
        early = max(rss for fraction, rss in points if fraction <= 0.1)
        whole = max(rss for _, rss in points)
        figures.append(
            {"process": name, "peak_mb_at_10": early, "peak_mb_at_100": whole, "growth": round(whole / early, 2)}
        )
    table(list(figures[0]), [list(row.values()) for row in figures])
    print(f"{samples:,} rows, {status['rows_per_s']:,.0f} rows/s")
    print("wrote", write("memory", {"rows": figures, "samples": samples, "rows_per_s": status["rows_per_s"]}))


def watch(run: subprocess.Popen[str], output: Path, samples: int) -> dict[str, list[tuple[float, int]]]:
    """Service -> (fraction of the rows that were committed, resident MB), twice a second until the run ends."""
    series: dict[str, list[tuple[float, int]]] = {}
    rows, record = 0, 1
    while run.poll() is None:
        while (path := output / "commits" / f"{record:08d}.json").exists():
            rows = json.loads(path.read_text())["totals"]["rows"]
            record += 1
        for pid in descendants(run.pid):
            name, rss = service(pid)
            if name:
                series.setdefault(name, []).append((rows / samples, rss))
        time.sleep(LOOK_S)
    return series


def descendants(pid: int) -> list[int]:
    """Process ids of all children and their children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children] + [below for child in children for below in descendants(int(child))]


def service(pid: int) -> tuple[str, int]:
    """Service that a process is, and its resident memory in MB; "" for one that is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "", 0
    rss = next((int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0)
    for word, name in (
        (b"embq.worker.process", "worker process"),
        (b"writer", "writer"),
        (b"producer", "producer"),
        (b"worker", "supervisor"),
    ):
        if word in words:
            return name, rss
    return ("broker", rss) if b"valkey-server" in words[0] else ("", 0)


if __name__ == "__main__":
    main()
