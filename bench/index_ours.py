"""Our side: an index by `embq index`, as a user builds it, and its answers to queries one by one.

    python -m bench.index_ours INDEX QUERIES.npy ANSWERS [THREADS]

answers as `bench.index_theirs search` does, in a process of its own; `build` is called by `bench.index`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import numpy as np
import psutil

from bench.index_cases import RECALL, K
from bench.runs import anonymous_bytes, watched
from embq.index.searcher import Searcher

LOOK_S = 0.05
FACTORS = (1, 2, 4, 8, 16)
REACHED = (0, 3)
"""Exit statuses of `embq index` with which the index is there; 3 says that the recall was missed."""


def build(
    vectors: Path,
    index: Path,
    index_memory: str,
    memory: str,
    *,
    key: str = "",
    queries: dict[str, Path] | None = None,
    workers: int = 1,
    cgroup: Path | None = None,
    adds: bool = False,
) -> dict[str, Any]:
    """`embq index`: seconds, CPU seconds and memory of all its processes, and what it reports itself.

    Args:
        workers: one is kept on one core; several have all of them.
        cgroup: folder of the control group that the processes join, for a limit that the kernel enforces.
        adds: add what is new to the index, instead of building one.

    Raises RuntimeError with what the command said where it fails.
    """
    command = ["-m", "embq", "index", "add" if adds else "build", vectors, "--output", index, "--json"]
    command += ["--current-memory-available", memory, "--workers", workers]
    command += [] if adds else ["--recall", RECALL, "--max-index-memory-usage", index_memory]
    command += ["--index-key", key] if key else []
    for name, file in (queries or {}).items():
        command += ["--queries", f"{name}={file}"]

    def confined() -> None:
        if workers == 1:
            on_one_core()
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    began, before = time.perf_counter(), _cpu_s_of_children()
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=confined,
    ) as process:
        meter = Meter()
        with watched(process.pid, LOOK_S, meter.look):
            said, errors = process.communicate()
    seconds = time.perf_counter() - began
    if process.returncode not in REACHED:
        raise RuntimeError(errors.strip() or said.strip())
    folder = index / (index / "CURRENT").read_text().strip()
    infos = json.loads((folder / "infos.json").read_text())
    return {
        "key": infos["index_key"],
        "status": process.returncode,
        "seconds": round(seconds, 2),
        "cpu_s": round(_cpu_s_of_children() - before, 2),
        "peak_rss_bytes": meter.peak_bytes,
        "peak_anonymous_bytes": meter.peak_anonymous_bytes,
        "bytes_on_disk": sizes(index),
        # Where it is built says nothing, and would differ from machine to machine.
        "infos": {name: value for name, value in infos.items() if name != "index_path"},
    }


def on_one_core() -> None:
    """Keep this process, and those it starts, on the last core: both sides are measured so."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def sizes(index: Path) -> dict[str, int]:
    """Bytes of the files that the current version names, by what they are."""
    found: dict[str, int] = {}
    record = (index / (index / "CURRENT").read_text().strip() / "version.json").read_text()
    for file in (index / "files").iterdir():
        if file.name in record:
            kind = file.suffixes[0].lstrip(".")
            found[kind] = found.get(kind, 0) + file.stat().st_size
    return found


class Meter:
    """Memory of a process and all its descendants together.

    Attributes:
        peak_bytes: most that was resident together at a time, mapped files and shared pages counted each time.
        peak_anonymous_bytes: most that they had asked for together, mapped files not counted.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.peak_anonymous_bytes = 0

    def look(self, processes: list[psutil.Process]) -> None:
        """Take one look."""
        resident = anonymous = 0
        for process in processes:
            with suppress(psutil.Error):  # it has just ended
                memory = process.memory_info()
                resident += memory.rss
                anonymous += memory.rss - memory.shared
        self.peak_bytes = max(self.peak_bytes, resident)
        self.peak_anonymous_bytes = max(self.peak_anonymous_bytes, anonymous)


def search(index: Path, queries: Path, answers: Path, threads: int) -> None:
    """Answer each query alone, in every setting."""
    asked = np.load(queries, allow_pickle=False).astype(np.float32)
    before, began = anonymous_bytes(), time.perf_counter()
    searcher = Searcher.open(index, memory="ram", threads=threads)
    opened_s, opened_bytes = time.perf_counter() - began, anonymous_bytes() - before
    answers.mkdir(parents=True, exist_ok=True)
    told: list[dict[str, Any]] = []
    for number, (nprobe, factor) in enumerate(settings(searcher)):
        ids = np.empty((len(asked), K), dtype=np.int64)
        seconds = np.empty(len(asked))
        for row in range(len(asked)):
            start = time.perf_counter()
            ids[row] = searcher.search(asked[row : row + 1], K, nprobe=nprobe, k_factor=factor).ids[0]
            seconds[row] = time.perf_counter() - start
        np.save(answers / f"{number}.ids.npy", ids)
        np.save(answers / f"{number}.seconds.npy", seconds)
        chosen = searcher.version.search
        name = f"nprobe={nprobe or chosen['nprobe']},k_factor={factor or chosen['k_factor']}"
        told.append({"setting": name, "tuned": number == 0})
    figures = {"settings": told, "open_s": opened_s, "open_bytes": opened_bytes, "threads": threads}
    (answers / "answers.json").write_text(json.dumps(figures, indent=1))


def settings(searcher: Searcher) -> list[tuple[int | None, int | None]]:
    """The tuned one as (None, None), then (nprobe, k_factor) over the whole range."""
    probes = [2**power for power in range(13) if 2**power <= searcher.nlist]
    factors = FACTORS if searcher.refines else FACTORS[:1]
    return [(None, None), *((nprobe, factor) for nprobe in probes for factor in factors)]


def _cpu_s_of_children() -> float:
    """CPU seconds of processes that this one, or one of theirs, has waited for."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    search(*map(Path, sys.argv[1:4]), int(sys.argv[4]) if len(sys.argv) > 4 else 1)
