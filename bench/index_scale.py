"""The index at scale: millions of rows within a memory limit, planned beside measured, recall, cold and warm searches.

    python -m bench.index_scale [--data FOLDER] [--memory 4G] [--index-memory 1200M] [--workers 2] [--cgroup FOLDER]

Takes what `bench.index_corpus` has made: `static/part-*.npy`, all but the last ones built, those added as growth.
`--cgroup` names a control group with a memory limit that the processes of the build join.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.index_cases import DATA, QUERIES, K
from bench.index_ours import build
from bench.index_scoring import DEEP, truth_of
from bench.report import RESULTS, table, write
from embq.index.searcher import Searcher
from embq.index.tune.recall import Truth, mean_recall

NAME = "index_scale"
SHARE = 0.1
"""Part of the rows that is added."""
COLD = 100
"""Queries asked while no page of the index is in memory."""


def main() -> None:
    """Build, search, grow, write and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--memory", default="4G")
    parser.add_argument("--index-memory", default="1200M", help="with room for the rows that are added")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cgroup", type=Path)
    options = parser.parse_args()
    folder = options.data.resolve() / "scale"
    shutil.rmtree(folder, ignore_errors=True)
    vectors, index = folder / "vectors", folder / "index"
    vectors.mkdir(parents=True)
    parts = sorted((options.data / "static").glob("part-*.npy"))
    every = [np.load(part, mmap_mode="r", allow_pickle=False) for part in parts]
    rows = round(sum(map(len, every)) / (1 + SHARE))
    queries = np.load(options.data / "static" / "queries.npy", allow_pickle=False)[:QUERIES].astype(np.float32)
    figures: dict[str, Any] = {
        "texts": json.loads((options.data / "static" / "made.json").read_text()),
        "memory": options.memory,
        "index_memory": options.index_memory,
        "workers": options.workers,
        "cgroup_limit_bytes": _limit(options.cgroup),
    }
    for step, first, last in (("built", 0, rows), ("grown", rows, sum(map(len, every)))):
        place(every, vectors, first, last)
        load = os.getloadavg()[0]
        made = build(
            vectors, index, options.index_memory, options.memory, workers=options.workers, cgroup=options.cgroup
        )
        figures[step] = {"load_average": [round(load, 2), round(os.getloadavg()[0], 2)], **made}
        if step == "built":  # growth leaves the build's seconds in the report, and has its own in "growth"
            figures[step]["stages"] = stages(made["infos"], options.workers)
        figures["out_of_memory_kills"] = _kills(options.cgroup)
        write(NAME, figures)
        figures[step]["searches"] = searches(index, queries)
        write(NAME, figures)
    truth = joined([truth_of(part, queries) for part in every], [len(part) for part in every])
    found = Searcher.open(index).search(queries, K).ids
    figures["recall@10_grown"] = round(mean_recall(found, truth, K), 4)
    figures["rows"], figures["added"] = rows, sum(map(len, every)) - rows
    figures["growth_share_of_build"] = round(figures["grown"]["seconds"] / figures["built"]["seconds"], 3)
    print("wrote", write(NAME, figures), "and", plot(figures))
    table(list(figures["built"]["stages"][0]), [list(one.values()) for one in figures["built"]["stages"]])


def place(parts: list[np.ndarray], folder: Path, first: int, last: int) -> None:
    """Put the rows from `first` to `last` of all parts into a folder, in their order; whole parts as links."""
    begin = 0
    for number, part in enumerate(parts):
        low, high = max(first - begin, 0), min(last - begin, len(part))
        if low < high:
            file = folder / f"part-{number:02}-{low:07}.npy"
            if (low, high) == (0, len(part)):
                os.link(part.filename, file)
            else:
                np.save(file, part[low:high])
        begin += len(part)


def joined(truths: list[Truth], rows: list[int]) -> Truth:
    """True neighbours in all parts, from those in each."""
    scores = np.hstack([one.scores for one in truths])
    firsts = np.cumsum([0, *rows])
    ids = np.hstack([one.ids + first for one, first in zip(truths, firsts, strict=False)])
    best = np.argsort(-scores, axis=1, kind="stable")[:, :DEEP]
    return Truth(ids=np.take_along_axis(ids, best, axis=1), scores=np.take_along_axis(scores, best, axis=1))


def stages(infos: dict[str, Any], workers: int) -> list[dict[str, Any]]:
    """Seconds of each stage: planned for all workers together, measured by the clock and on the CPU."""
    planned = {one["stage"]: one["seconds"] for one in infos["plan"]["stages"]}
    alone = ("train", "tune", "queries")
    return [
        {
            "stage": stage,
            "planned_s": round(planned.get(stage, 0.0), 1),
            "wall_s": round(seconds / (1 if stage in alone else workers), 1),
            "cpu_s": round(infos["cpu_seconds"][stage], 1),
            "peak_rss_mb": round(infos["peak_rss_bytes"][stage] / 2**20),
        }
        for stage, seconds in infos["build_seconds"].items()
    ]


def searches(index: Path, queries: np.ndarray) -> dict[str, Any]:
    """Milliseconds of single searches on one thread: with the files dropped from memory, and once more."""
    found: dict[str, Any] = {}
    for memory in ("mmap", "ram"):
        _drop(index)
        began = time.perf_counter()
        searcher = Searcher.open(index, memory=memory)
        opened_s = time.perf_counter() - began
        cold, warm = _ms(searcher, queries[:COLD]), _ms(searcher, np.concatenate([queries, queries]))[len(queries) :]
        found[memory] = {"open_s": round(opened_s, 3), "first_ms": round(cold[0], 2)}
        for name, each in (("cold", cold), ("warm", warm)):
            found[memory] |= {f"{name}_p{part}_ms": round(float(np.percentile(each, part)), 3) for part in (50, 95)}
    return found


def _ms(searcher: Searcher, queries: np.ndarray) -> list[float]:
    each = []
    for row in range(len(queries)):
        began = time.perf_counter()
        searcher.search(queries[row : row + 1], K)
        each.append(1000 * (time.perf_counter() - began))
    return each


def _drop(index: Path) -> None:
    """Drop the pages of all files from the cache; other programs keep theirs."""
    for file in (file for file in index.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _limit(cgroup: Path | None) -> int | None:
    """Memory limit of a control group of either version."""
    if cgroup is None:
        return None
    file = next(file for name in ("memory.max", "memory.limit_in_bytes") if (file := cgroup / name).exists())
    return int(file.read_text())


def _kills(cgroup: Path | None) -> int | None:
    if cgroup is None:
        return None
    file = next(file for name in ("memory.events", "memory.oom_control") if (file := cgroup / name).exists())
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))


def plot(figures: dict[str, Any]) -> Path:
    """Bars of each stage: planned, by the clock, and on the CPU divided by the workers."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    each = figures["built"]["stages"]
    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    at = np.arange(len(each))
    for number, (name, color) in enumerate(
        (("planned_s", "tab:gray"), ("wall_s", "tab:blue"), ("cpu_s", "tab:orange"))
    ):
        bars = axis.bar(at + 0.27 * (number - 1), [one[name] for one in each], 0.26, color=color, label=name)
        axis.bar_label(bars, fmt="%.0f", fontsize=7)
    axis.set_xticks(at, [one["stage"] for one in each])
    axis.set_ylabel("seconds")
    axis.set_title(
        f"{figures['rows']:,} rows of 384 within {figures['memory']}, {figures['workers']} workers", fontsize=9
    )
    axis.legend(fontsize=8)
    path = RESULTS / f"{NAME}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    main()
