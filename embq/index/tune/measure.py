"""Latency and recall of a setting: timed single searches, expected times, and scores for the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from embq.index.tune.points import Goal, Point, Scores, Searches, Setting
from embq.index.tune.recall import mean_recall
from embq.index.tune.tuning_split import Half

Clock = Callable[[], int]
"""Nanoseconds since some moment."""

WARM = 3

ROUNDS = 4

MOST_QUERIES, FEWEST_QUERIES = 40, 8

SECONDS = 0.03
"""Time for one round of one setting, unless the fewest queries take longer."""

REPORTED_SECONDS = 1.0
"""Time for single searches of the reported half of one set."""

REPORTED_WIDE = 200
"""Queries of the reported half that are searched for 40 and for 100 rows, which takes longer."""

AUTOFAISS_K = 40


def timed(
    searcher: Searches,
    queries: np.ndarray,
    k: int,
    setting: Setting,
    *,
    seconds: float,
    clock: Clock = time.perf_counter_ns,
) -> np.ndarray:
    """Milliseconds of single searches, float64 (m,): of as many queries as the time allows."""
    for query in queries[:WARM]:
        searcher.search(query[None], k, nprobe=setting.nprobe, k_factor=setting.k_factor)
    took, until = [], clock() + seconds * 1e9
    for query in queries:
        started = clock()
        searcher.search(query[None], k, nprobe=setting.nprobe, k_factor=setting.k_factor)
        took.append((clock() - started) / 1e6)
        if len(took) >= FEWEST_QUERIES and clock() > until:
            break
    return np.asarray(took)


def with_times(
    searcher: Searches, queries: np.ndarray, k: int, points: Sequence[Point], clock: Clock = time.perf_counter_ns
) -> list[Point]:
    """The points with their time: of each query the best of all rounds; a round goes over all points."""
    best: list[np.ndarray | None] = [None] * len(points)
    for _ in range(ROUNDS):
        for at, point in enumerate(points):
            took = timed(searcher, queries[:MOST_QUERIES], k, point.setting, seconds=SECONDS, clock=clock)
            previous = best[at]
            if previous is not None:
                shared = min(len(previous), len(took))
                took = np.minimum(previous[:shared], took[:shared])
            best[at] = took
    return [
        replace(point, mean_ms=round(float(took.mean()), 4), p50_ms=round(float(np.median(took)), 4))
        for point, took in zip(points, best, strict=True)
        if took is not None
    ]


def with_expected(points: Sequence[Point], measured: Sequence[Point], k: int) -> list[Point]:
    """The points with their expected time: a + b * probes + c * candidates, fitted to those that were measured.

    Relative errors count, so that the fast settings fit as well as the slow ones.
    """
    table = np.array([_terms(point.setting, k) for point in measured])
    took = np.array([point.mean_ms or 0.0 for point in measured])
    weights = 1.0 / np.maximum(took, 1e-3)
    parts = np.linalg.lstsq(table * weights[:, None], took * weights, rcond=None)[0]
    parts = np.maximum(parts, 0.0)
    return [replace(point, expected_ms=float(np.dot(_terms(point.setting, k), parts))) for point in points]


def _terms(setting: Setting, k: int) -> list[float]:
    return [1.0, float(setting.nprobe), float(k * setting.k_factor if setting.k_factor > 1 else 0)]


def score(searcher: Searches, half: Half, goal: Goal, setting: Setting, clock: Clock) -> Scores:
    """Recall and latency of a setting on the reported half of one set."""
    wide = half.first(REPORTED_WIDE)
    ids = half.search(searcher, max(10, goal.k), setting)
    recalls = {k: mean_recall(ids, half.truth, k) for k in (1, 10, goal.k)}
    if 100 not in recalls:
        recalls[100] = mean_recall(wide.search(searcher, 100, setting), wide.truth, 100)
    took = timed(searcher, half.vectors, goal.k, setting, seconds=REPORTED_SECONDS, clock=clock)
    took_40 = timed(searcher, wide.vectors, AUTOFAISS_K, setting, seconds=REPORTED_SECONDS / 3, clock=clock)
    return Scores(
        queries=len(half),
        recall=dict(sorted(recalls.items())),
        p50_ms=float(np.percentile(took, 50)),
        p95_ms=float(np.percentile(took, 95)),
        p99_ms=float(np.percentile(took, 99)),
        mean_ms=float(took.mean()),
        mean_40_ms=float(took_40.mean()),
        p99_40_ms=float(np.percentile(took_40, 99)),
        autofaiss=_as_autofaiss(searcher, wide, setting),
    )


def _as_autofaiss(searcher: Searches, half: Half, setting: Setting) -> dict[str, float]:
    """Its four scores. The query's own row is the first true answer, and a tie that is another row is a miss."""
    ids = searcher.search(half.vectors, AUTOFAISS_K, nprobe=setting.nprobe, k_factor=setting.k_factor).ids
    true = half.truth.ids
    if (half.own >= 0).all():
        true = np.concatenate([half.own[:, None], true], axis=1)
    scores = {}
    for k in (20, 40):
        first = (true[:, :k] == ids[:, :1]).any(axis=1) & (ids[:, 0] >= 0)
        scores[f"1-recall@{k}"] = float(first.mean())
    for k in (20, 40):
        possible = np.maximum((true[:, :k] >= 0).sum(axis=1), 1)
        both = (ids[:, :k, None] == true[:, None, :k]) & (ids[:, :k, None] >= 0)
        scores[f"{k}-recall@{k}"] = float((both.any(axis=2).sum(axis=1) / possible).mean())
    return scores
