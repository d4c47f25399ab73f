"""Results that show the same thing: connected components at cosine 0.94, as clip-retrieval's back end has them."""

from __future__ import annotations

import numpy as np

THRESHOLD = 0.94
"""Cosine from which two vectors count as the same; clip-retrieval's number, so that answers have as many results."""

_BLOCK = 1024
"""Rows that are compared with all others at once: 10,000 results make 40 MB of cosines."""


def first_of_each(vectors: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    """Which rows stay when of each group of near-duplicates only the first one does.

    Args:
        vectors: (n, d), of any length; best result first.

    Returns:
        bool (n,). Two rows are in one group when a chain of rows leads from one to the other, each step of it with a
        cosine of `threshold` or more. A zero vector is alone.
    """
    n = len(vectors)
    vectors = vectors.astype(np.float32, copy=False)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(norms == 0, 1, norms)
    # The group of a row is named after its first row. Rows are compared with those before them only.
    group = np.arange(n)
    for start in range(0, n, _BLOCK):
        alike = units[start : start + _BLOCK] @ units[: start + _BLOCK].T >= threshold
        for row, those in enumerate(alike, start):
            near = group[: row + 1][those[: row + 1]]
            if len(near) and (near != (least := near.min())).any():
                group[np.isin(group, near)] = least
    stay: np.ndarray = group == np.arange(n)
    return stay
