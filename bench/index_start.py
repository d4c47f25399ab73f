"""Seconds of `embq search INDEX "text"` from the shell, model and all.

    python -m bench.index_start [--data bench/cache] [--runs 7] [--index-memory 16G]

Indexes the run of `minilm` under the data, keys and texts with it, where it is not indexed yet, and asks it one text
at a time, each time in a new process. "evicted" is after the files of the index have been given out of the page cache;
Python and the model's files stay in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.index_cases import DATA, cached
from bench.report import table, write

BAR_S = 2.0
TEXTS = ("parse a date from a string", "release the lock when the process dies", "matrix multiplication on the GPU")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--run", type=Path, default=None, help="an output of embq run  [the largest of the data]")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--index-memory", default="16G")
    options = parser.parse_args()
    there = sorted(options.data.glob("minilm/run-[0-9]*"), key=lambda path: int(path.name.removeprefix("run-")))
    run = options.run or cached(there[-1] if there else options.data / "minilm" / "run-60000")
    run = run.resolve()
    index = next(iter(run.glob("index/*/CURRENT")), None)
    if index is None:
        command = ["-m", "embq", "index", run, "--max-index-memory-usage", options.index_memory, "--quiet"]
        subprocess.run([sys.executable, *map(str, command)], check=False)
        index = next(run.glob("index/*/CURRENT"))
    infos = json.loads((index.parent / index.read_text().strip() / "infos.json").read_text())
    waits: dict[str, list[float]] = {"files in the page cache": [], "evicted": []}
    for number in range(options.runs):
        for name, before in (("files in the page cache", _nothing), ("evicted", _evicted(index.parent))):
            before()
            began = time.perf_counter()
            command = ["-m", "embq", "search", index.parent, TEXTS[number % len(TEXTS)], "--json"]
            subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
            waits[name].append(round(time.perf_counter() - began, 3))
    rows = [
        {"files": name, "median_s": statistics.median(each), "least_s": min(each), "most_s": max(each), "bar_s": BAR_S}
        for name, each in waits.items()
    ]
    table(list(rows[0]), [list(row.values()) for row in rows])
    figures = {"rows": infos["nb vectors"], "key": infos["index_key"], "bytes": infos["bytes"], "starts": rows}
    print("wrote", write("index_start", figures))


def _nothing() -> None:
    """The page cache stays as it is."""


def _evicted(index: Path) -> Callable[[], None]:
    def evict() -> None:
        for file in (index / "files").iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    return evict


if __name__ == "__main__":
    main()
