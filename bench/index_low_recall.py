"""Keys for low recall, each built by `embq index`, searched in turns in one process at equal recall.

    python -m bench.index_low_recall NAME=VECTORS:QUERIES.npy:LISTS... [--data bench/cache] [--result index_low_recall]

VECTORS is a folder of npy files, LISTS the number of lists that the plan chooses. What is built stays under the data.
Microseconds of a query: `single` is the median of queries one by one on one thread, by the clock, the least of all
rounds for each query; `batch` is CPU time of all queries in one call. Both are interpolated at equal recall@10.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.index_cases import DATA, K
from bench.index_ours import build, on_one_core
from bench.index_scoring import mean_recall_with_ties, truth_of
from bench.report import write
from embq.index.searcher import Searcher

KEYS = {
    "plan": "IVF{lists}(PCA{quarter},Flat),PQ{half}x4",
    "half the bytes": "IVF{lists}(PCA{quarter},Flat),PQ{quarter}x4",
    "half the dimensions": "PCAR{half},IVF{lists}(PCA{quarter},Flat),PQ{quarter}x4",
    "1 bit": "IVF{lists}(PCA{quarter},Flat),RaBitQ",
    "1 bit, centroids whole": "IVF{lists},RaBitQ",
    "centroids whole": "IVF{lists},PQ{half}x4",
    "centroids by HNSW": "IVF{lists}_HNSW32,PQ{half}x4",
    "half the lists": "IVF{fewer}(PCA{quarter},Flat),PQ{half}x4",
}
RECALLS = (0.6, 0.7, 0.8, 0.85, 0.88)
SETTINGS = [(probes, factor) for probes in (4, 8, 12, 16, 24, 32, 48, 64, 96) for factor in (2, 4, 8)]
QUERIES, ROUNDS = 250, 3


def main() -> None:
    """Build, search, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="NAME=VECTORS:QUERIES.npy:LISTS")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--result", default="index_low_recall")
    options = parser.parse_args()
    on_one_core()
    figures = {}
    for name, _, rest in (one.partition("=") for one in options.sets):
        folder, queries, lists = rest.split(":")
        figures[name] = measure(Path(folder), Path(queries), int(lists), options.data / "low-recall" / name)
    print("wrote", write(options.result, figures))


def measure(folder: Path, queries: Path, lists: int, indexes: Path) -> dict[str, Any]:
    """Figures of each key over one set of vectors."""
    vectors = np.concatenate([np.load(file, mmap_mode="r") for file in sorted(folder.glob("*.npy"))])
    asked = np.ascontiguousarray(np.load(queries)[:QUERIES], dtype=np.float32)
    truth = truth_of(vectors, asked)
    open_: dict[str, Searcher] = {}
    for name, pattern in KEYS.items():
        key = pattern.format(
            lists=lists, fewer=lists // 2, half=asked.shape[1] // 2, quarter=asked.shape[1] // 4 // 8 * 8
        )
        if not (indexes / name / "CURRENT").exists():
            build(folder, indexes / name, "1G", "2G", key=key)
        open_[name] = Searcher.open(indexes / name, threads=1)

    def exact(query: int, ids: np.ndarray) -> np.ndarray:
        scores: np.ndarray = vectors[ids].astype(np.float32) @ asked[query]
        return scores

    single: dict[str, list[tuple[float, float]]] = {name: [] for name in open_}
    batch: dict[str, list[tuple[float, float]]] = {name: [] for name in open_}
    for probes, factor in SETTINGS:
        seconds = {name: np.full(len(asked), np.inf) for name in open_}
        cpu_s = dict.fromkeys(open_, math.inf)
        recall = {}
        for _ in range(ROUNDS):
            for name, searcher in open_.items():
                for row in range(len(asked)):
                    began = time.perf_counter()
                    searcher.search(asked[row : row + 1], K, nprobe=probes, k_factor=factor)
                    seconds[name][row] = min(seconds[name][row], time.perf_counter() - began)
                began = time.thread_time()
                found = searcher.search(asked, K, nprobe=probes, k_factor=factor)
                cpu_s[name] = min(cpu_s[name], (time.thread_time() - began) / len(asked))
                recall[name] = mean_recall_with_ties(found.ids, truth, K, exact)
        for name in open_:
            single[name].append((1e6 * float(np.median(seconds[name])), recall[name]))
            batch[name].append((1e6 * cpu_s[name], recall[name]))
    figures = {}
    for name, searcher in open_.items():
        sides = {"single_us": at_recalls(single[name]), "batch_us": at_recalls(batch[name])}
        figures[name] = {"key": searcher.version.plan.key, **sides}
        print(f"{name:24}", figures[name])
    return {"rows": len(vectors), "dim": int(vectors.shape[1]), "queries": len(asked), "keys": figures}


def at_recalls(points: list[tuple[float, float]]) -> dict[str, float | None]:
    """Microseconds at each recall, between the points of the front on a logarithmic scale; None beyond its end."""
    front: list[tuple[float, float]] = []
    for time_us, recall in sorted(points):
        if not front or recall > front[-1][1]:
            front.append((time_us, recall))
    times, recalls = [math.log(point[0]) for point in front], [point[1] for point in front]
    return {f"{at}": round(math.exp(np.interp(at, recalls, times)), 1) if at <= recalls[-1] else None for at in RECALLS}


if __name__ == "__main__":
    main()
