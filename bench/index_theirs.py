"""autofaiss, in an environment of its own: build an index within a memory, and answer queries one by one.

    .venv-autofaiss/bin/python bench/index_theirs.py build VECTORS INDEX --index-memory 12M --memory 1G --threads 1
    .venv-autofaiss/bin/python bench/index_theirs.py search INDEX QUERIES.npy ANSWERS --threads 1

VECTORS is a folder of npy files. `build` writes INDEX/knn.index, autofaiss's infos.json and build.json; `search`
writes ANSWERS/answers.json and, for each setting, the ids, (queries, K) int64, and the seconds of each query. Nothing
of embq is imported. The setting "tuned" is the one that autofaiss has chosen itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

K = 10
PACKAGES = ("autofaiss", "faiss-cpu", "numpy", "pyarrow")


def main() -> None:
    """One build, or the answers of one index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    building = what.add_parser("build")
    building.add_argument("vectors", type=Path)
    building.add_argument("index", type=Path)
    building.add_argument("--index-memory", required=True)
    building.add_argument("--memory", required=True)
    building.add_argument("--metric", default="ip")
    searching = what.add_parser("search")
    searching.add_argument("index", type=Path)
    searching.add_argument("queries", type=Path)
    searching.add_argument("answers", type=Path)
    for one in (building, searching):
        one.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "OPENBLAS_NUM_THREADS": str(options.threads)}
    if options.what == "build":
        build(options.vectors, options.index, options.index_memory, options.memory, options.metric, options.threads)
    else:
        search(options.index, options.queries, options.answers, options.threads)


def build(vectors: Path, index: Path, index_memory: str, memory: str, metric: str, threads: int) -> None:
    """`autofaiss.build_index` as its users call it, with the memory given and all else by default."""
    from autofaiss import build_index

    index.mkdir(parents=True, exist_ok=True)
    before, began = _cpu_s(), time.perf_counter()
    made, infos = build_index(
        str(vectors),
        index_path=str(index / "knn.index"),
        index_infos_path=str(index / "infos.json"),
        max_index_memory_usage=index_memory,
        current_memory_available=memory,
        metric_type=metric,
        nb_cores=threads,
        verbose=logging.WARNING,
    )
    seconds, cpu_s = time.perf_counter() - began, _cpu_s() - before
    if made is None:
        raise SystemExit(f"autofaiss makes no index within {index_memory} and {memory}")
    figures = {
        "key": infos["index_key"],
        "param": infos["index_param"],
        "metric": metric,
        "threads": threads,
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "peak_rss_bytes": getrusage(RUSAGE_SELF).ru_maxrss * 1024,
        "bytes_on_disk": (index / "knn.index").stat().st_size,
        "versions": {name: version(name) for name in PACKAGES},
    }
    (index / "build.json").write_text(json.dumps(figures, indent=1))


def search(index: Path, queries: Path, answers: Path, threads: int) -> None:
    """Answer each query alone, in every setting."""
    import faiss
    import numpy as np

    faiss.omp_set_num_threads(threads)
    asked = np.load(queries, allow_pickle=False).astype(np.float32)
    began, anonymous = time.perf_counter(), _anonymous_bytes()
    loaded = faiss.read_index(str(index / "knn.index"))
    opened_s, opened_bytes = time.perf_counter() - began, _anonymous_bytes() - anonymous
    tuned = json.loads((index / "build.json").read_text())["param"]
    answers.mkdir(parents=True, exist_ok=True)
    told: list[dict[str, Any]] = []
    for number, param in enumerate([tuned, *_params(loaded, tuned)]):
        faiss.ParameterSpace().set_index_parameters(loaded, param)
        ids = np.empty((len(asked), K), dtype=np.int64)
        seconds = np.empty(len(asked))
        for row in range(len(asked)):
            start = time.perf_counter()
            _, ids[row : row + 1] = loaded.search(asked[row : row + 1], K)
            seconds[row] = time.perf_counter() - start
        np.save(answers / f"{number}.ids.npy", ids)
        np.save(answers / f"{number}.seconds.npy", seconds)
        told.append({"setting": param, "tuned": number == 0})
    figures = {"settings": told, "open_s": opened_s, "open_bytes": opened_bytes, "threads": threads}
    (answers / "answers.json").write_text(json.dumps(figures, indent=1))


def _params(index: Any, tuned: str) -> list[str]:
    """Settings over the whole range, in the form in which autofaiss itself sets them."""
    import faiss

    if "nprobe" not in tuned:
        return [f"efSearch={ef}" for ef in (16, 32, 64, 128, 256, 512, 1024)] if "efSearch" in tuned else []
    lists = faiss.extract_index_ivf(index).nlist
    probes = [2**power for power in range(13) if 2**power <= lists]
    coarse = "quantizer_efSearch" in tuned
    table = ",ht=2048" if "ht=" in tuned else ""
    return [f"nprobe={probe}" + (f",quantizer_efSearch={2 * probe}" if coarse else "") + table for probe in probes]


def _anonymous_bytes() -> int:
    """Resident memory of this process without that of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it started and that have ended."""
    return sum(used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


if __name__ == "__main__":
    main()
