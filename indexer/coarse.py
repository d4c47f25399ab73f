"""Where lists are told apart: in all dimensions, or in the leading ones, which takes a fraction of the time."""

from __future__ import annotations

from typing import Any

import numpy as np

from indexer.faiss_module import faiss

PCA_ROWS = 65_536
"""Rows that the leading directions are found from; more do not move them."""


def list_space(ivf: Any, seen: np.ndarray) -> tuple[np.ndarray, Any]:
    """The rows as the centroids see them, float32 (n, their dimensions), and the index that is to hold the centroids.

    Trains what stands between, as in "IVF4096(PCA96,Flat)".

    Args:
        ivf: a `faiss.IndexIVF` without centroids.
        seen: float32 (n, d), rows of the sample as the index sees them.
    """
    module = faiss()
    quantizer = module.downcast_index(ivf.quantizer)
    if not hasattr(quantizer, "chain"):
        return seen, quantizer
    points = seen
    for at in range(quantizer.chain.size()):
        transform = module.downcast_VectorTransform(quantizer.chain.at(at))
        if not transform.is_trained:
            learn(transform, points[:: max(1, len(points) // PCA_ROWS)])
        points = transform.apply(points)
    return np.ascontiguousarray(points, np.float32), module.downcast_index(quantizer.index)


def learn(transform: Any, points: np.ndarray) -> None:
    """Train a transform, and drop what only training needs: of a PCA the directions that are not kept, 4 d^2 bytes.

    Args:
        points: float32 (n, d).
    """
    transform.train(points)
    if hasattr(transform, "PCAMat"):
        transform.PCAMat.resize(0)


def settle(ivf: Any, holder: Any, centroids: np.ndarray) -> None:
    """Give the index its centroids.

    Args:
        holder: what `list_space` gave.
        centroids: float32 (lists, dimensions of the centroids).
    """
    if not holder.is_trained:
        holder.train(centroids)
    holder.add(centroids)
    ivf.quantizer.is_trained = True
    ivf.quantizer.ntotal = holder.ntotal
