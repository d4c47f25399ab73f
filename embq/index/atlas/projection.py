"""Axes, coordinates and clusters of rows: exact PCA by blocks, UMAP, k-means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from embq.core.process.limits import cores
from embq.index.atlas.layout import neighbour_layout
from embq.index.collection.collection import faults
from embq.index.faiss_module import faiss, set_threads

METHODS = ("umap", "pca")

REDUCED = 50
"""Dimensions that UMAP and k-means see: the leading ones hold the structure, and distances of the rest are noise."""

BLOCK_BYTES = 64 * 2**20
"""Of vectors that are read at once, as float32."""

MOST_CLUSTERS = 64
CLUSTER_POINTS = 1_000
"""Rows for each centroid that k-means is trained with."""

ReadVectors = Callable[[np.ndarray], np.ndarray]
"""Vectors of ascending ids: float32 (n, dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """Rows on their principal axes.

    Attributes:
        ids: int64 (n,), ascending: the rows whose vectors are finite and not zero.
        points: float32 (n, REDUCED or fewer), the axis of the largest variance first.
        shares: of the variance that each axis holds.
    """

    ids: np.ndarray
    points: np.ndarray
    shares: np.ndarray


def reduce(read: ReadVectors, ids: np.ndarray, dim: int) -> Reduced:
    """Project rows on their principal axes, from the exact covariance. Vectors are read twice, a block at a time.

    Args:
        ids: int64 (n,), ascending.
    """
    valid_ids: list[np.ndarray] = []
    shift: np.ndarray | None = None  # near the mean, so that no digits of the covariance are lost to it
    total, squares = np.zeros(dim), np.zeros((dim, dim))
    for block_ids, vectors in _blocks(read, ids, dim):
        good = ~faults(vectors)
        valid_ids.append(block_ids[good])
        rows = vectors[good]
        if not len(rows):
            continue
        if shift is None:
            shift = rows.mean(axis=0)
        rows -= shift
        total += rows.sum(axis=0, dtype=np.float64)
        squares += rows.T @ rows
    good_ids = np.concatenate(valid_ids) if valid_ids else ids[:0]
    n = max(1, len(good_ids))
    mean = total / n
    variances, axes = np.linalg.eigh(squares / n - np.outer(mean, mean))
    most = min(REDUCED, dim)
    axes = axes[:, ::-1][:, :most]
    # The sign of an axis is arbitrary: its largest number is positive, so that equal rows give equal maps.
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(most)])
    centre = mean + (0.0 if shift is None else shift)
    points = np.empty((len(good_ids), most), np.float32)
    first = 0
    for block_ids, vectors in _blocks(read, good_ids, dim):
        points[first : first + len(block_ids)] = (vectors - centre.astype(np.float32)) @ axes.astype(np.float32)
        first += len(block_ids)
    shares = np.maximum(variances[::-1][:most], 0.0)
    return Reduced(ids=good_ids, points=points, shares=shares / max(float(np.trace(squares / n)), 1e-30))


def _blocks(read: ReadVectors, ids: np.ndarray, dim: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows = max(1, BLOCK_BYTES // (4 * dim))
    for first in range(0, len(ids), rows):
        block_ids = ids[first : first + rows]
        yield block_ids, read(block_ids)


def plane(points: np.ndarray, method: str, seed: int) -> np.ndarray:
    """Coordinates: float32 (n, 2).

    Args:
        points: of `Reduced`.
        method: "pca" for the first two axes, "umap" for UMAP of all.
    """
    if points.shape[1] < 2:
        points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    if method == "pca" or len(points) <= 3:
        return np.ascontiguousarray(points[:, :2])
    return neighbour_layout(points, seed)


def clusters(points: np.ndarray, seed: int) -> np.ndarray:
    """The cluster of each row: int32 (n,), by k-means; 0 is the largest.

    The number of clusters is the cube root of that of rows, at most MOST_CLUSTERS.
    """
    n = len(points)
    count = max(1, min(MOST_CLUSTERS, round(n ** (1 / 3)), len(np.unique(points[:CLUSTER_POINTS], axis=0))))
    if count == 1:
        return np.zeros(n, np.int32)
    set_threads(cores())
    kmeans = faiss().Kmeans(
        points.shape[1],
        count,
        niter=20,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=CLUSTER_POINTS,
    )
    kmeans.train(points)
    nearest = kmeans.index.search(points, 1)[1].ravel()
    rank = np.empty(count, np.int32)
    rank[np.argsort(-np.bincount(nearest, minlength=count), kind="stable")] = np.arange(count, dtype=np.int32)
    numbers: np.ndarray = rank[nearest]
    return numbers
