"""Axes, coordinates and clusters of rows: exact PCA by blocks, UMAP, k-means; and labels of clusters.

The label of a cluster is the words that set its captions apart from all others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from embq.core.process.limits import cores
from embq.indexer.atlas.layout import neighbour_layout
from embq.indexer.collection.collection import faults
from embq.indexer.faiss_module import faiss, set_threads

METHODS = ("umap", "pca")

REDUCED = 50
"""Dimensions that UMAP and k-means see: the leading ones hold the structure, and distances of the rest are noise."""

BLOCK_BYTES = 64 * 2**20
"""Of vectors that are read at once, as float32."""

MOST_CLUSTERS = 64
CLUSTER_POINTS = 1_000
"""Rows for each centroid that k-means is trained with."""

CAPTIONS = 2_000
"""Captions of each cluster that are looked at: more change no label."""

WORDS = 3
"""Words of a label."""

COMMON, SPREAD = 0.05, 0.5
"""A word in more than COMMON of the captions of SPREAD of the clusters is a word of the language."""

_RUN = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
"""Scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""

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


def words(text: str) -> set[str]:
    """The different words of a text, in lower case; of scripts without spaces, pairs of characters."""
    tokens: set[str] = set()
    for run in _RUN.findall(text.casefold()):
        if _UNSPACED.search(run):
            for piece in _UNSPACED.findall(run):
                tokens.update(piece[at : at + 2] for at in range(len(piece) - 1))
        elif len(run) > 2:
            tokens.add(run)
    return tokens


def labels(texts: Sequence[Sequence[str]]) -> list[str]:
    """A label for each cluster, "" for one of whose texts no word is typical.

    Class-based tf-idf: a word counts once for each text. Its weight in a cluster is p log(p / q), where p and q are its
    shares of the cluster's texts and of all; of a single cluster it is p.

    Args:
        texts: of each cluster, or of a sample of it.
    """
    counts = [Counter(word for text in cluster_texts for word in words(text)) for cluster_texts in texts]
    sizes = np.array([max(1, len(cluster_texts)) for cluster_texts in texts], np.float64)
    overall: Counter[str] = Counter()
    spread: Counter[str] = Counter()
    for count, size in zip(counts, sizes, strict=True):
        overall.update(count)
        spread.update(word for word, times in count.items() if times > COMMON * size)
    # With few clusters, half of them may be about one thing.
    most = max(2.0, SPREAD * len(texts))
    cluster_labels = []
    for count, size in zip(counts, sizes, strict=True):
        weights = {
            word: times / size * (np.log(times / size / (overall[word] / sizes.sum())) if len(texts) > 1 else 1.0)
            for word, times in count.items()
            if times > 1 or size < 5
            if spread[word] <= most
        }
        best = sorted(weights, key=lambda word: (-weights[word], word))
        cluster_labels.append(", ".join(_different(best)))
    return cluster_labels


def _different(best: Sequence[str]) -> list[str]:
    """The first WORDS words of which none begins with another: "test, tests" says one thing twice."""
    chosen: list[str] = []
    for word in best:
        if not any(word.startswith(other) or other.startswith(word) for other in chosen):
            chosen.append(word)
        if len(chosen) == WORDS:
            break
    return chosen
