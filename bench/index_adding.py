"""Vectors that one core adds to lists, for keys of the PQ kind at 512 dimensions, and what the arithmetic allows.

    python -m bench.index_adding [--data bench/cache] [--rows 32768]

Centroids are rows drawn at random, and codebooks random numbers: training makes no difference to the time. The vectors
are rows of `minilm` with the first 128 numbers of another row behind them: real numbers, for speed alone. A
vector is compared with every centroid, 2 x 512 x lists operations, which at the rate of a large matrix product (sgemm)
of one core is the arithmetic limit: no exact assignment can be faster on it. Of several rounds the fastest counts.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np

from bench.index_cases import DATA, cached
from bench.report import table, write
from embq.index.faiss_module import faiss, set_threads
from embq.index.index_files.lists import empty_lists
from embq.index.index_files.template import Template

DIM = 512
LISTS = (4096, 16384)
CODECS = ("PQ64x8", "PQ128x4")
TRAIN_ROWS = 10_000
ROUNDS = 2
GOAL = 5_000


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=32_768)
    options = parser.parse_args()
    set_threads(1)
    vectors = _vectors(options.data, options.rows)
    gflops = sgemm_gflops(vectors)
    rows = [adding(vectors, lists, codec, gflops) for lists in LISTS for codec in CODECS]
    table(["key", "vectors/s/core", "limit by arithmetic", "of it", "goal"], [list(one.values()) for one in rows])
    print("sgemm, one thread:", gflops, "GFLOP/s; wrote", write("index_adding", {"sgemm_gflops": gflops, "keys": rows}))


def adding(vectors: np.ndarray, lists: int, codec: str, gflops: float) -> dict[str, Any]:
    """Add the vectors as the stage of the build does, on one thread."""
    key = f"IVF{lists},{codec}"
    index = faiss().index_factory(DIM, key)
    random = np.random.default_rng(1234)
    index.quantizer.add(vectors[random.permutation(len(vectors))[:lists]])
    if hasattr(index, "pq"):
        # Codes by codebooks of random numbers take the same time, and training those takes minutes.
        index.use_precomputed_table = -1
        books = random.normal(scale=DIM**-0.5, size=index.pq.ksub * DIM).astype(np.float32)
        faiss().copy_array_to_vector(books, index.pq.centroids)
        index.is_trained = True
    else:
        index.is_trained = False
        index.train(vectors[:TRAIN_ROWS])
    template = Template(index)
    best = np.inf
    for _ in range(ROUNDS):
        template.hold(empty_lists(lists, template.code_size), 0)
        began = time.perf_counter()
        for first in range(0, len(vectors), 32_768):
            batch = vectors[first : first + 32_768]
            template.add(batch, np.arange(first, first + len(batch)))
        best = min(best, time.perf_counter() - began)
    limit = gflops * 1e9 / (2 * DIM * lists)
    speed = len(vectors) / best
    return {
        "key": key,
        "vectors_s_core": round(speed),
        "limit": round(limit),
        "of_it": round(speed / limit, 2),
        "goal": "held" if speed >= GOAL else "not reached",
    }


def sgemm_gflops(vectors: np.ndarray) -> float:
    """Rate of a product of (16384, 512) by (512, 4096) in float32 on one thread."""
    left, right = vectors[:16384], np.ascontiguousarray(vectors[-4096:].T)
    best = np.inf
    for _ in range(5):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    return round(2 * left.shape[0] * DIM * right.shape[1] / best / 1e9, 1)


def _vectors(data: Path, rows: int) -> np.ndarray:
    every = np.load(cached(data / "minilm" / "vectors.npy"), mmap_mode="r", allow_pickle=False)[:rows].astype(
        np.float32
    )
    wide = np.hstack([every, np.roll(every, 1, axis=0)[:, : DIM - every.shape[1]]])
    return np.ascontiguousarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))


if __name__ == "__main__":
    main()
