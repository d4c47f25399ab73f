"""True nearest rows of queries by exact search, one block of the collection at a time, then merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embq.core.errors import OutputError
from embq.index.collection.collection import faults
from embq.index.faiss_module import faiss, matrix_products
from embq.index.index_files.files import read_arrays
from embq.index.plan.costs import TRUTH_DEPTH
from embq.index.tune.recall import TOLERANCE, Truth

if TYPE_CHECKING:
    from embq.index.collection.opening import Block, Collection
    from embq.index.tune.queries import QuerySet

TILE_BYTES = 1 << 26
"""Vectors compared at a time. faiss itself looks at 1,024 of them at once."""


def nearest(
    queries: np.ndarray,
    own: np.ndarray,
    batches: Iterable[tuple[int, np.ndarray]],
    *,
    metric: str,
    largest: float = math.inf,
    depth: int = TRUTH_DEPTH,
) -> Truth:
    """The nearest of the given rows for each query. Vectors without a direction are no answers.

    Args:
        queries: float32 (q, d); of length 1 for "cosine".
        own: int64 (q,): the row that a query is itself, which is no answer to it; -1 if it is none.
        batches: (first id, float32 (m, d)).
        metric: "cosine", "l2" or "ip".
        largest: as of `faults`; vectors that the index leaves out are no answers.

    `set_threads` bounds the threads of faiss. Memory beyond the batches: two tables of (q, depth + 1).
    """
    module = faiss()
    queries = np.ascontiguousarray(queries, np.float32)
    kind = module.METRIC_INNER_PRODUCT if metric == "ip" else module.METRIC_L2
    best = _nothing(len(queries), depth, metric, queries)
    for first_id, vectors in batches:
        ids = np.arange(first_id, first_id + len(vectors))
        if (bad := faults(vectors, metric, largest)).any():
            ids, vectors = ids[~bad], vectors[~bad]
        if not len(ids):
            continue
        # One more than is kept, because the query itself may be among them.
        with matrix_products(queries.shape[1]):
            values, at = module.knn(queries, np.ascontiguousarray(vectors), min(depth + 1, len(ids)), metric=kind)
        hits = np.where(at >= 0, ids[at], -1)
        hits[hits == own[:, None]] = -1
        best = merged([best, Truth(ids=hits, scores=_scores(values, metric), tolerance=best.tolerance)], depth=depth)
    return best


def merged(truths: Sequence[Truth], *, depth: int = TRUTH_DEPTH) -> Truth:
    """The nearest rows of all blocks, from those of each. Of equal ones the lower id comes first."""
    ids = np.concatenate([truth.ids for truth in truths], axis=1)
    scores = np.concatenate([truth.scores for truth in truths], axis=1)
    scores = np.where(ids < 0, -np.inf, scores).astype(np.float32)
    order = np.lexsort((ids, -scores), axis=1)[:, :depth]
    return Truth(
        ids=np.take_along_axis(ids, order, axis=1),
        scores=np.take_along_axis(scores, order, axis=1),
        tolerance=max(truth.tolerance for truth in truths),
    )


def block_truth(
    collection: Collection,
    block: Block,
    sets: Sequence[QuerySet],
    *,
    metric: str,
    path: Path,
    largest: float = math.inf,
    depth: int = TRUTH_DEPTH,
) -> None:
    """Write the truth of one block for all query sets, in their order, to `path`."""
    rows = max(1024, TILE_BYTES // (4 * collection.dim))
    batches = collection.read_vectors(block.first_id, block.first_id + block.rows, batch_rows=rows)
    queries = np.concatenate([np.empty((0, collection.dim), np.float32), *(drawn.vectors for drawn in sets)])
    own = np.concatenate([np.empty(0, np.int64), *(drawn.own for drawn in sets)])
    truth = nearest(queries, own, batches if len(queries) else (), metric=metric, largest=largest, depth=depth)
    with open(path, "wb") as file:
        np.savez(file, ids=truth.ids, scores=truth.scores, tolerance=np.float64(truth.tolerance))


def read_truth(paths: Sequence[Path], sets: Sequence[QuerySet], *, depth: int = TRUTH_DEPTH) -> dict[str, Truth]:
    """Query set -> its truth over all blocks, from what `block_truth` wrote of each.

    Blocks are read one after the other. Raises OutputError if a file is not what was written.
    """
    combined: Truth | None = None
    for path in paths:
        block = _read(path)
        combined = block if combined is None else merged([combined, block], depth=depth)
    if combined is None or len(combined) != sum(len(drawn.vectors) for drawn in sets):
        raise OutputError("the truth of this build is not that of its queries", code="index_damaged")
    by_set, start = {}, 0
    for query_set in sets:
        by_set[query_set.name] = combined.of(slice(start, start + len(query_set.vectors)))
        start += len(query_set.vectors)
    return by_set


def _read(path: Path) -> Truth:
    try:
        stored = read_arrays(path)
        return Truth(ids=stored["ids"], scores=stored["scores"], tolerance=float(stored["tolerance"]))
    except (OSError, ValueError, KeyError) as error:
        raise OutputError(f"{path} cannot be read: {error}", code="index_damaged") from error


def _nothing(count: int, depth: int, metric: str, queries: np.ndarray) -> Truth:
    # Squared distances are differences of squared lengths, and as exact as those are.
    scale = float(np.mean(np.square(queries).sum(axis=1))) if metric == "l2" and count else 1.0
    return Truth(
        ids=np.full((count, depth), -1, np.int64),
        scores=np.full((count, depth), -np.inf, np.float32),
        tolerance=TOLERANCE * max(1.0, scale),
    )


def _scores(values: np.ndarray, metric: str) -> np.ndarray:
    if metric == "cosine":
        return 1.0 - values / 2.0
    return values if metric == "ip" else -values
