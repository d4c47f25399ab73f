"""Codecs that a plan chooses from, the most exact first, and the number of lists for a number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from embq.index.plan.codecs import Codec, codec

SMALL_ROWS = 10_000
"""Number of rows below which a search that compares everything takes a millisecond or two: one list, full vectors."""

POINTS_PER_CENTROID = 39
"""Least number of rows per list; with fewer, k-means finds centroids that stand for nothing (faiss warns below 39)."""


def codec_choices(dim: int, *, metric: str = "cosine", refine: bool = True) -> Iterator[Codec]:
    """The codecs that a plan may choose by itself, the best first, each smaller than the one before.

    With rows for re-ranking at hand, a code has only to bring the true neighbours among the first few dozen: 4-bit
    product codes, 2 dimensions each, are scanned fastest. Without, codes must be exact themselves.

    Args:
        metric: "cosine", "l2", or "ip", with which dimensions cannot be left out.
        refine: whether answers are re-ranked by full rows.
    """
    smallest = math.inf
    refined = list(_refined(dim, metric)) if refine and dim >= 16 else []  # of some dimensions there are none
    for name in refined or _unrefined(dim, metric):
        choice = codec(name, dim, list_dim=list_dim(dim) if metric != "ip" else None)
        if choice.code_bytes < smallest:
            smallest = choice.code_bytes
            yield choice


def list_dim(dim: int) -> int:
    """Leading dimensions that tell lists apart: a quarter finds the same neighbours with a tenth more probes, at a
    quarter of the time for training, for assigning and for choosing the probes."""
    return max(32, dim // 4 // 8 * 8)


def _refined(dim: int, metric: str) -> Iterator[str]:
    widths = (2, 3, 4, 6, 8) if metric == "ip" else (2,)
    yield from (f"PQ{dim // width}x4" for width in widths if dim % width == 0)
    if metric == "ip":
        return
    # Of the dimensions that PCA keeps, each 4 bits stand for this many.
    for share, width in ((2 / 3, 2), (1 / 2, 2), (1 / 2, 3), (1 / 4, 2), (1 / 4, 3), (1 / 8, 2)):
        reduced = int(dim * share) // (8 * width) * (8 * width) or 8
        if reduced % width == 0:
            yield f"PCAR{reduced},PQ{reduced // width}x4"


def _unrefined(dim: int, metric: str) -> Iterator[str]:
    yield from ("SQ8", "RaBitQ6", "RaBitQ5", "RaBitQ4", "RaBitQ3", "RaBitQ2", "RaBitQ")
    if metric == "ip" or dim < 16:
        return
    for share in (2, 4, 8):
        yield f"PCAR{max(8, dim // share // 8 * 8)},RaBitQ"


def lists_for(rows: int, *, packed: bool = False) -> int:
    """Number of lists for `rows` vectors: a power of two, with at least 39 rows for each.

    Args:
        packed: whether they are packed for SIMD. A packed list of 100 rows is scanned in the time that it takes to turn
            to it, so fewer and longer ones are best: 1.5 sqrt(rows), growing to 6 sqrt(rows) at a billion; else
            4 sqrt(rows).
    """
    if rows < SMALL_ROWS:
        return 1
    factor = 1.5 * max(1.0, rows / 1e6) ** 0.2 if packed else 4.0
    return min(1 << round(math.log2(factor * math.sqrt(rows))), most_lists(rows))


def most_lists(rows: int) -> int:
    """The largest power of two that leaves each list enough rows to be trained."""
    return 1 << int(math.log2(max(1, rows / POINTS_PER_CENTROID)))
