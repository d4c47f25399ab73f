"""One scorer for both sides: exact search for the truth, recall of the answers, and the Pareto front of settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.index_cases import K
from embq.index.tune.recall import Truth, hits

DEEP = 100
"""Rows of the truth for each query, so that ties of the tenth are seen."""
BLOCK_ROWS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting of a search: recall@10, and the milliseconds of a query on one thread."""

    setting: str
    tuned: bool
    recall: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


def truth_of(vectors: np.ndarray, queries: np.ndarray) -> Truth:
    """The nearest `DEEP` rows by inner product of float32: exact search.

    Args:
        vectors: (rows, d), any float, may be mapped.
        queries: (q, d).
    """
    asked = np.asarray(queries, dtype=np.float32)
    scores = np.full((len(asked), 0), -np.inf, dtype=np.float32)
    ids = np.zeros((len(asked), 0), dtype=np.int64)
    for first in range(0, len(vectors), BLOCK_ROWS):
        block = asked @ np.asarray(vectors[first : first + BLOCK_ROWS], dtype=np.float32).T
        found = np.argpartition(-block, min(DEEP, block.shape[1]) - 1, axis=1)[:, :DEEP]
        scores = np.hstack([scores, np.take_along_axis(block, found, axis=1)])
        ids = np.hstack([ids, found + first])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :DEEP]
        scores, ids = np.take_along_axis(scores, best, axis=1), np.take_along_axis(ids, best, axis=1)
    return Truth(ids=ids, scores=scores)


ExactScores = Callable[[int, np.ndarray], np.ndarray]
"""(query, int64 ids (m,)) -> float (m,): exact scores in the truth's own units, higher is better."""


def mean_recall_with_ties(found: np.ndarray, truth: Truth, k: int, exact: ExactScores) -> float:
    """As `embq.index.tune.recall.mean_recall`; ties of the k-th that the truth is too short for are right as well."""
    counts = hits(found[:, :k], truth, k)
    endless = truth.right(k).all(axis=1) & (truth.ids.shape[1] > k)
    for query in np.flatnonzero(endless):
        others = np.setdiff1d(found[query, :k][found[query, :k] >= 0], truth.ids[query])
        if len(others):
            bound = float(truth.scores[query, k - 1])
            counts[query] += int((exact(int(query), others) >= bound - truth.tolerance * max(1.0, abs(bound))).sum())
    possible = np.minimum((truth.ids >= 0).sum(axis=1), k)
    some = possible > 0
    return float((np.minimum(counts, possible)[some] / possible[some]).mean()) if some.any() else float("nan")


def points(answers: list[Path], truth: Truth, vectors: np.ndarray, queries: np.ndarray) -> list[Point]:
    """Recall and latency of each setting; of each query the least seconds of all measurements count.

    Args:
        answers: folders with the answers of the same index to the same queries, one for each measurement.
    """

    def exact(query: int, ids: np.ndarray) -> np.ndarray:
        scores: np.ndarray = np.asarray(vectors[ids], dtype=np.float32) @ np.asarray(queries[query], dtype=np.float32)
        return scores

    found = []
    for number, one in enumerate(json.loads((answers[0] / "answers.json").read_text())["settings"]):
        ids = np.load(answers[0] / f"{number}.ids.npy", allow_pickle=False)
        each = [np.load(folder / f"{number}.seconds.npy", allow_pickle=False) for folder in answers]
        ms = 1000 * np.min(each, axis=0)
        found.append(
            Point(
                setting=one["setting"],
                tuned=one["tuned"],
                recall=round(mean_recall_with_ties(ids, truth, K, exact), 4),
                mean_ms=round(float(ms.mean()), 4),
                **{f"p{part}_ms": round(float(np.percentile(ms, part)), 4) for part in (50, 95, 99)},
            )
        )
    return found


def front(found: list[Point]) -> list[Point]:
    """The settings than which no other is both faster and at least as exact, from the fastest to the most exact."""
    kept: list[Point] = []
    for one in sorted(found, key=lambda point: (point.p50_ms, -point.recall)):
        if not kept or one.recall > kept[-1].recall:
            kept.append(one)
    return kept


def ms_at(recall: float, kept: list[Point]) -> float | None:
    """Median milliseconds at a recall, between the points of a front on a logarithmic scale; None beyond its end."""
    if not kept or recall > kept[-1].recall:
        return None
    if recall <= kept[0].recall:
        return kept[0].p50_ms
    return float(math.exp(np.interp(recall, [p.recall for p in kept], [math.log(p.p50_ms) for p in kept])))


def compared(theirs: list[Point], ours: list[Point]) -> dict[str, Any]:
    """Their tuned setting beside our tuned one, and the times at equal recall."""
    fronts = front(theirs), front(ours)
    tuned = [next(point for point in side if point.tuned) for side in (theirs, ours)]
    shared = min(kept[-1].recall for kept in fronts)
    at_equal = []
    for recall in sorted({0.8, 0.85, 0.9, 0.95, tuned[0].recall, shared}):
        ms = [ms_at(recall, kept) for kept in fronts]
        if ms[0] is not None and ms[1] is not None:
            at_equal.append(
                {
                    "recall": recall,
                    "theirs_ms": round(ms[0], 4),
                    "ours_ms": round(ms[1], 4),
                    "times": round(ms[0] / ms[1], 2),
                }
            )
    return {
        "recall_theirs": tuned[0].recall,
        "recall_ours": tuned[1].recall,
        "difference": round(tuned[1].recall - tuned[0].recall, 4),
        "best_recall_theirs": fronts[0][-1].recall,
        "best_recall_ours": fronts[1][-1].recall,
        "at_equal_recall": at_equal,
    }
