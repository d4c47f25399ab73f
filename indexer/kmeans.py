"""k-means one iteration at a time, so that what is done survives the process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from indexer.faiss_module import faiss, gpus
from indexer.template import on_gpus


def kmeans(
    points: np.ndarray,
    count: int,
    *,
    iterations: int,
    seed: int,
    spherical: bool,
    start: tuple[int, np.ndarray] | None,
    checkpoint: Callable[[int, np.ndarray], None],
) -> np.ndarray:
    """Centroids of shape (count, d), float32.

    One call of faiss per iteration, each with the centroids of the one before: the same numbers as without a stop.

    Args:
        points: float32 (n, d), n >= count.
        spherical: bring centroids to length 1 after each iteration.
        start: iterations done, and the centroids after them, where an earlier attempt has left any.
        checkpoint: gets both after each iteration but the last.
    """
    module = faiss()
    done, centroids = start or (0, _first(points, count, seed))
    index = module.IndexFlatL2(points.shape[1])
    if gpus():
        index = on_gpus(index)
    while done < iterations:
        parameters = module.ClusteringParameters()
        parameters.niter = 1
        parameters.nredo = 1
        parameters.seed = seed + done
        parameters.spherical = spherical
        parameters.min_points_per_centroid = 1
        parameters.max_points_per_centroid = len(points) // count + 1
        clustering = module.Clustering(points.shape[1], count, parameters)
        module.copy_array_to_vector(np.ascontiguousarray(centroids).ravel(), clustering.centroids)
        index.reset()
        clustering.train(points, index)
        centroids = module.vector_float_to_array(clustering.centroids).reshape(count, -1).copy()
        done += 1
        if done < iterations:
            checkpoint(done, centroids)
    return centroids


def _first(points: np.ndarray, count: int, seed: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).permutation(len(points))[:count]
    return points[np.sort(chosen)].copy()
