"""What a code stands for, learned from the sample: in seconds where faiss would take most of a build for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from indexer.faiss_module import faiss

SAMPLE_ROWS = 4_096
"""256 rows for each of the 16 words of a 4-bit code: what faiss itself would look at."""

ITERATIONS = 12
PIECES_AT_ONCE = 64
"""So many pieces are learned together, which bounds the memory: 16 MB for each."""


def train_codes(ivf: Any, seen: np.ndarray, *, seed: int) -> None:
    """Train how an index keeps a row; its lists are known already.

    4-bit product codes are learned for all pieces at once (faiss takes them one by one: 18 s for 192 pieces, this 2 s).
    By squared distances they stand for the row itself, not for its difference to the centroid: one table of distances
    then serves all lists of a query, and a scan is three times as fast at the same recall after re-ranking.

    Args:
        ivf: a `faiss.IndexIVF` with its centroids.
        seen: float32 (n, d), rows of the sample as the lists see them.
    """
    module = faiss()
    if type(ivf).__name__ != "IndexIVFPQ" or ivf.pq.nbits != 4:
        ivf.train(seen)
        return
    ivf.by_residual = ivf.metric_type != module.METRIC_L2
    chosen = seen[np.sort(np.random.default_rng(seed).permutation(len(seen))[:SAMPLE_ROWS])]
    if ivf.by_residual:
        _, lists = ivf.quantizer.search(chosen, 1)
        chosen = chosen - ivf.quantizer.reconstruct_batch(np.ascontiguousarray(lists.ravel()))
    words = product_words(chosen, ivf.pq.M, 1 << ivf.pq.nbits, seed=seed)
    module.copy_array_to_vector(words.ravel(), ivf.pq.centroids)
    ivf.use_precomputed_table = -1
    ivf.is_trained = True


def product_words(rows: np.ndarray, pieces: int, words: int, *, seed: int) -> np.ndarray:
    """The words of a product quantizer: float32 (pieces, words, d / pieces), by k-means on each piece.

    Args:
        rows: float32 (n, d), at least one; d is a multiple of `pieces`.
    """
    parts = rows.reshape(len(rows), pieces, -1).transpose(1, 0, 2)
    first = np.random.default_rng(seed).permutation(max(len(rows), words))[:words] % len(rows)
    return np.concatenate(
        [_learned(parts[at : at + PIECES_AT_ONCE], first) for at in range(0, pieces, PIECES_AT_ONCE)]
    ).astype(np.float32)


def _learned(parts: np.ndarray, first: np.ndarray) -> np.ndarray:
    parts = np.ascontiguousarray(parts)
    found = parts[:, first]
    numbers = np.arange(len(first))
    for _ in range(ITERATIONS):
        far = np.square(found).sum(axis=2)[:, None, :] - 2 * parts @ found.transpose(0, 2, 1)
        belongs = (far.argmin(axis=2)[:, :, None] == numbers).astype(np.float32)
        count = belongs.sum(axis=1)[:, :, None]
        means = belongs.transpose(0, 2, 1) @ parts / np.maximum(count, 1)
        found = np.where(count > 0, means, found)
    return found
