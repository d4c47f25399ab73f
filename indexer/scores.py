"""What a setting is worth on queries that it was not chosen by: recall, the time of a search, autofaiss's scores."""

from __future__ import annotations

import numpy as np

from indexer.halves import Half
from indexer.latency import Clock, timed
from indexer.points import Goal, Scores, Searches, Setting
from indexer.recall import mean_recall

REPORTED_SECONDS = 1.0
"""For single searches of the reported half of one set."""
REPORTED_WIDE = 200
"""Queries of the reported half that are searched for 40 and for 100 rows, which takes longer."""
AUTOFAISS_K = 40


def score(searcher: Searches, half: Half, goal: Goal, setting: Setting, clock: Clock) -> Scores:
    """Of the reported half of one set."""
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
    found = searcher.search(half.vectors, AUTOFAISS_K, nprobe=setting.nprobe, k_factor=setting.k_factor).ids
    true = half.truth.ids
    if (half.own >= 0).all():
        true = np.concatenate([half.own[:, None], true], axis=1)
    scores = {}
    for k in (20, 40):
        first = (true[:, :k] == found[:, :1]).any(axis=1) & (found[:, 0] >= 0)
        scores[f"1-recall@{k}"] = float(first.mean())
    for k in (20, 40):
        possible = np.maximum((true[:, :k] >= 0).sum(axis=1), 1)
        both = (found[:, :k, None] == true[:, None, :k]) & (found[:, :k, None] >= 0)
        scores[f"{k}-recall@{k}"] = float((both.any(axis=2).sum(axis=1) / possible).mean())
    return scores
