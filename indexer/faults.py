"""Vectors that no index can hold."""

from __future__ import annotations

import numpy as np


def faults(vectors: np.ndarray) -> np.ndarray:
    """Which of some vectors have no place in an index: bool (n,), True where one is not finite, or all zeros.

    Args:
        vectors: float32 (n, d).
    """
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)  # neither overflows nor vanishes there
    bad: np.ndarray = ~np.isfinite(squares) | (squares == 0.0)
    return bad
