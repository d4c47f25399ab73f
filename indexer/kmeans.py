"""k-means one iteration at a time, so that what is done survives the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from indexer.faiss_module import faiss
from indexer.gpu import CentroidSearch


def kmeans(
    points: np.ndarray,
    count: int,
    *,
    iterations: int,
    seed: int,
    spherical: bool,
    start: tuple[int, np.ndarray] | None,
    checkpoint: Callable[[int, np.ndarray], None],
    on_gpu: bool = False,
) -> np.ndarray:
    """Centroids of shape (count, d), float32.

    One call of faiss per iteration, each with the centroids of the one before: the same numbers as without a stop.
    An iteration that fails on the GPU is done again on the CPU, and so are those behind it.

    Args:
        points: float32 (n, d), n >= count.
        spherical: bring centroids to length 1 after each iteration.
        start: iterations done, and the centroids after them, where an earlier attempt has left any.
        checkpoint: gets both after each iteration but the last.
        on_gpu: whether the GPU may be used.
    """
    done, centroids = start or (0, _first(points, count, seed))
    search = CentroidSearch(faiss().IndexFlatL2(points.shape[1]), on_gpu=on_gpu)
    while done < iterations:
        centroids = search.run(partial(_iteration, points, centroids, seed=seed + done, spherical=spherical))
        done += 1
        if done < iterations:
            checkpoint(done, centroids)
    return centroids


def _iteration(points: np.ndarray, centroids: np.ndarray, index: Any, *, seed: int, spherical: bool) -> np.ndarray:
    """The centroids after one iteration; `index` is a flat one, whose content is replaced."""
    module = faiss()
    count, dim = centroids.shape
    parameters = module.ClusteringParameters()
    parameters.niter = 1
    parameters.nredo = 1
    parameters.seed = seed
    parameters.spherical = spherical
    parameters.min_points_per_centroid = 1
    parameters.max_points_per_centroid = len(points) // count + 1
    clustering = module.Clustering(dim, count, parameters)
    module.copy_array_to_vector(np.ascontiguousarray(centroids).ravel(), clustering.centroids)
    index.reset()
    clustering.train(points, index)
    found: np.ndarray = module.vector_float_to_array(clustering.centroids).reshape(count, -1).copy()
    return found


def _first(points: np.ndarray, count: int, seed: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).permutation(len(points))[:count]
    return points[np.sort(chosen)].copy()
