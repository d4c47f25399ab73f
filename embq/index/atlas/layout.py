"""Coordinates that keep neighbours: UMAP (McInnes, Healy and Melville, 2018), in numpy.

The fuzzy graph of nearest neighbours is drawn so that the cross entropy of graph and drawing falls: edges pull their
ends together, random pairs push each other apart. umap-learn moves one edge at a time in code that numba compiles; here
a quarter of the edges moves at once. Of more than `LANDMARKS` points, that many are drawn; each other one lies at the
weighted mean of the nearest of them.
"""

from __future__ import annotations

import numpy as np

from embq.core.process.limits import cores
from embq.index.faiss_module import faiss, set_threads

NEIGHBOURS = 15
LANDMARKS = 20_000
EPOCHS, BATCHES = 150, 4
PUSHES = 5
"""Random points that push each end of an edge."""

A, B = 1.577, 0.895
"""1 / (1 + A d^2B) is how near two points at distance d are: UMAP's curve for a least distance of 0.1."""

MOST_STEP = 4.0
EXTENT = 10.0
"""Of the drawing at the beginning, from its middle."""

PLACED_BY = 4
"""Landmarks that tell the place of another point."""

SEARCHED_EXACTLY = 200_000
"""Points up to which their nearest landmarks are found exactly; of more, in the nearest of some cells."""

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ends, int64, and weights, float64, at most 1, of each edge once."""


def neighbour_layout(points: np.ndarray, seed: int) -> np.ndarray:
    """Coordinates: float32 (n, 2).

    Args:
        points: float32 (n, dim), the axis of the largest variance first; n and dim at least 2.
    """
    set_threads(cores())
    generator, n = np.random.default_rng(seed), len(points)
    if n <= LANDMARKS:
        return _drawn(points, generator)
    marks = np.ascontiguousarray(points[np.sort(generator.choice(n, LANDMARKS, replace=False))])
    return _placed(points, marks, _drawn(marks, generator))


def _drawn(points: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    first, second, weights = _edges(points, min(NEIGHBOURS, len(points) - 1))
    places = points[:, :2] * (EXTENT / max(float(np.abs(points[:, :2]).max()), 1e-12))
    places = (places + generator.normal(0.0, 1e-3, places.shape)).astype(np.float32)  # equal points come apart
    for epoch in range(EPOCHS):
        drawn = np.flatnonzero(generator.random(len(weights)) < weights)
        generator.shuffle(drawn)
        for batch in np.array_split(drawn, BATCHES):
            places += (1.0 - epoch / EPOCHS) * _moves(places, first[batch], second[batch], generator)
    return places


def _moves(places: np.ndarray, first: np.ndarray, second: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """How far each point moves by some edges and by random pairs: float32 (n, 2)."""
    n = len(places)
    apart = places[first] - places[second]
    squares = np.maximum((apart**2).sum(axis=1), 1e-12)
    pull = np.clip((-2 * A * B * squares ** (B - 1) / (1 + A * squares**B))[:, None] * apart, -MOST_STEP, MOST_STEP)
    pushed = np.repeat(np.concatenate([first, second]), PUSHES)
    apart = places[pushed] - places[generator.integers(0, n, len(pushed))]
    squares = (apart**2).sum(axis=1)
    push = np.clip((2 * B / ((0.001 + squares) * (1 + A * squares**B)))[:, None] * apart, -MOST_STEP, MOST_STEP)
    ends, steps = np.concatenate([first, second, pushed]), np.concatenate([pull, -pull, push])
    return np.stack([np.bincount(ends, steps[:, axis], n) for axis in (0, 1)], axis=1).astype(np.float32)


def _edges(points: np.ndarray, count: int) -> Edges:
    """The fuzzy union of each point's `count` nearest neighbours."""
    n = len(points)
    index = faiss().IndexFlatL2(points.shape[1])
    index.add(points)
    squares, neighbours = index.search(points, count + 1)
    not_self = neighbours != np.arange(n)[:, None]
    not_self[not_self.all(axis=1), -1] = False  # beside as many equal points, a point may not find itself
    distances = np.sqrt(np.maximum(squares[not_self].reshape(n, count), 0.0))
    ends = np.stack([np.repeat(np.arange(n), count), neighbours[not_self]])
    weights = _nearness(distances).ravel()
    names = ends.min(axis=0) * n + ends.max(axis=0)
    order = np.argsort(names, kind="stable")
    names, weights = names[order], weights[order]
    begins = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
    twice = np.diff(np.append(begins, len(names))) > 1
    ahead, back = weights[begins], np.where(twice, weights[np.minimum(begins + 1, len(weights) - 1)], 0.0)
    united = ahead + back - ahead * back
    return names[begins] // n, names[begins] % n, united / united.max()


def _nearness(distances: np.ndarray) -> np.ndarray:
    """How near each neighbour is: the first 1, all of a point together log2(their number), by bisection."""
    beyond = distances - distances[:, :1]
    target = np.log2(max(2, distances.shape[1]))
    low, high, scale = (np.full((len(distances), 1), value) for value in (0.0, np.inf, 1.0))
    for _ in range(40):
        much = np.exp(-beyond / scale).sum(axis=1, keepdims=True) > target
        low, high = np.where(much, low, scale), np.where(much, scale, high)
        scale = np.where(np.isinf(high), 2 * scale, (low + high) / 2)
    nearness: np.ndarray = np.exp(-beyond / np.maximum(scale, 1e-3 * distances.mean() + 1e-12))
    return nearness


def _placed(points: np.ndarray, marks: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The place of each point among its nearest landmarks; a landmark's is its own, nearly."""
    index = faiss().IndexFlatL2(points.shape[1])
    if len(points) > SEARCHED_EXACTLY:
        index = faiss().IndexIVFFlat(index, points.shape[1], round(len(marks) ** 0.5))
        index.train(marks)
        index.nprobe = 8
    index.add(marks)
    squares, nearest = index.search(points, PLACED_BY)
    share = np.exp(-squares / np.maximum(0.25 * squares.mean(axis=1, keepdims=True), 1e-12))
    share /= share.sum(axis=1, keepdims=True)
    interpolated: np.ndarray = (share[:, :, None] * places[nearest]).sum(axis=1).astype(np.float32)
    return interpolated
