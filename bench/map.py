"""The coordinates of `embq atlas`: trustworthiness at 15 neighbours, and seconds, of UMAP in numpy beside PCA.

    python -m bench.map [--data bench/cache] [--vectors FILE.npy] [--rows 2000 17813 100000 2000000]

The vectors are those of `minilm` (`bench.index_data`), or of a file, (rows, d). Rows beyond these are made of them:
each is a mixture of a row with one of its 15 nearest, 0.5 to 1 of the first, and noise of length 0.2; of length 1.
So many rows have clusters of near equals that real ones need not have. Where umap-learn can be imported, it draws the
least number of rows too, if it is small: it was not done with 2,000,000 after 25 minutes.

Trustworthiness (Venna and Kaski, 2001) is of all numbers of the vectors, by a sample of rows against all. Seconds are
those of the clock and of the CPU, of the layout alone; axes and clusters stand beside them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.index_cases import DATA
from bench.index_data import make_texts
from bench.report import table, write
from embq.core.process.limits import cores
from embq.index.atlas.layout import LANDMARKS
from embq.index.atlas.projection import clusters, plane, reduce
from embq.index.faiss_module import faiss, set_threads

ROWS = (2_000, 17_813, 100_000, 2_000_000)
NEIGHBOURS = 15
SAMPLED = {False: 1_000, True: 200}
"""Rows whose neighbours are compared; fewer where there are more than MANY."""
MANY = 200_000
NOISE = 0.2
SEED = 1
HEADER = ("rows", "layout", "trustworthiness", "s", "CPU s", "axes s", "clusters s")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options = parser.parse_args()
    if options.vectors is None:
        make_texts(options.data, ROWS[1])
    real = np.load(options.vectors or options.data / "minilm" / "vectors.npy").astype(np.float32)[: max(options.rows)]
    figures: list[dict[str, Any]] = []
    for rows in options.rows:
        figures += measured(grown(real, rows), with_umap_learn=rows == min(options.rows) and rows <= ROWS[1])
        table(HEADER, [list(one.values()) for one in figures])
    written = {"real_rows": len(real), "landmarks": LANDMARKS, "load_average": os.getloadavg(), "maps": figures}
    print("wrote", write("map", written))


def measured(vectors: np.ndarray, *, with_umap_learn: bool) -> list[dict[str, Any]]:
    """Figures of each layout of some rows."""
    reduced, axes_s, _ = timed(lambda: reduce(lambda ids: vectors[ids], np.arange(len(vectors)), vectors.shape[1]))
    _, clusters_s, _ = timed(lambda: clusters(reduced.points, SEED))
    layouts = {method: lambda method=method: plane(reduced.points, method, SEED) for method in ("pca", "umap")}
    if with_umap_learn and find_spec("umap") is not None:
        layouts["umap-learn"] = lambda: umap_learn(reduced.points)
    figures = []
    for name, layout in layouts.items():
        places, seconds, cpu_s = timed(layout)
        trust = trustworthiness(vectors[reduced.ids], places, SAMPLED[len(places) > MANY])
        row = (len(places), name, round(trust, 3), *(round(one, 1) for one in (seconds, cpu_s, axes_s, clusters_s)))
        figures.append(dict(zip(HEADER, row, strict=True)))
    return figures


def grown(real: np.ndarray, rows: int) -> np.ndarray:
    """The first rows, and made ones beyond them: float32 (rows, d)."""
    if rows <= len(real):
        return real[:rows]
    random = np.random.default_rng(SEED)
    set_threads(cores())
    index = faiss().IndexFlatIP(real.shape[1])
    index.add(real)
    nearest = index.search(real, NEIGHBOURS + 1)[1]
    made = np.empty((rows, real.shape[1]), np.float32)
    made[: len(real)] = real
    for first in range(len(real), rows, 50_000):
        some = made[first : first + 50_000]
        one = random.integers(0, len(real), len(some))
        other = nearest[one, random.integers(1, NEIGHBOURS + 1, len(some))]
        share = random.uniform(0.5, 1.0, (len(some), 1)).astype(np.float32)
        noise = random.standard_normal(some.shape, np.float32) * np.float32(NOISE / some.shape[1] ** 0.5)
        some[:] = share * real[one] + (1 - share) * real[other] + noise
        some /= np.linalg.norm(some, axis=1, keepdims=True)
    return made


def trustworthiness(vectors: np.ndarray, places: np.ndarray, sampled: int) -> float:
    """By the ranks that the nearest in the plane of some rows have among all rows."""
    n, k = len(vectors), NEIGHBOURS
    chosen = np.random.default_rng(SEED).choice(n, min(sampled, n), replace=False)
    lengths = np.einsum("ij,ij->i", vectors, vectors)
    strange = 0
    for row in chosen:
        far = lengths - 2 * (vectors @ vectors[row])
        near = ((places - places[row]) ** 2).sum(axis=1)
        far[row] = near[row] = np.inf
        shown = np.argpartition(near, k)[:k]
        ranks = np.searchsorted(np.sort(far), far[shown]) + 1
        strange += int(np.maximum(ranks - k, 0).sum())
    return 1 - 2 * strange / (len(chosen) * k * (2 * n - 3 * k - 1))


def umap_learn(points: np.ndarray) -> np.ndarray:
    """The layout of umap-learn, the compiling by numba included."""
    import umap

    found: np.ndarray = umap.UMAP(n_neighbors=NEIGHBOURS, init="pca", random_state=SEED).fit_transform(points)
    return found


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, seconds, CPU seconds)."""
    clock, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - clock, time.process_time() - cpu


if __name__ == "__main__":
    main()
