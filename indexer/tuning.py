"""Tuning: how many lists a search looks at and how many candidates it re-ranks, for the recall or the time asked for.

One thread, single queries, as a searcher will ask. Of each query set one half is tuned on, and the other half is
reported: a setting that is chosen because it does well on some queries does a little worse on others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import numpy as np

from indexer.halves import Half, halves, mixed
from indexer.latency import Clock, timed, with_expected, with_times
from indexer.points import Goal, Point, Scores, Searches, Setting, Tuning
from indexer.queries import QuerySet
from indexer.recall import Truth, mean_recall
from indexer.sweep import sweep

FEWEST_PROBES = 2
"""Of an index with lists, one is never all that is looked at: neighbours of a query near an edge lie beyond."""
UNTUNED = Setting(nprobe=64, k_factor=8)
"""Where there are no queries to tune by."""
TIMED_POINTS, TIMED_CHOICES = 16, 4
AS_GOOD = 0.002
"""Where the target is missed: the fastest setting within this of the best is taken."""
MOST_RAISED = 3
REPORTED_SECONDS = 1.0
"""For single searches of the reported half of one set."""
REPORTED_WIDE = 200
"""Queries of the reported half that are searched for 40 and for 100 rows, which takes longer."""
AUTOFAISS_K = 40


def tune(
    searcher: Searches,
    sets: Sequence[QuerySet],
    truth: Mapping[str, Truth],
    goal: Goal,
    *,
    nlist: int,
    refines: bool,
    rows: int,
    seconds: float = 8.0,
    clock: Clock = time.perf_counter_ns,
) -> Tuning:
    """The setting for a goal, with what it is worth.

    With a recall: the fastest at which the worst set reaches it. With a time alone: the highest recall within it. With
    both, the recall is to be reached within the time.

    Args:
        searcher: on one thread.
        truth: of each set.
        nlist: lists of the index; 1 of one without lists.
        refines: whether candidates can be re-ranked.
        rows: that can be answers.
        seconds: of the processor for the sweep; timing and the scores take some seconds more.
        clock: by which single searches are timed.
    """
    began = time.monotonic()
    tuned, reported = halves(sets, truth)
    if not tuned:
        untuned = Setting(nprobe=min(UNTUNED.nprobe, nlist), k_factor=UNTUNED.k_factor if refines else 1)
        return Tuning(goal=goal, setting=untuned, met=None, seconds=time.monotonic() - began)
    points, swept_all = sweep(searcher, tuned, goal, nlist=nlist, refines=refines, rows=rows, seconds=seconds)
    queries = mixed(tuned)

    def measure(some: Sequence[Point]) -> dict[Setting, Point]:
        return {point.setting: point for point in with_times(searcher, queries, goal.k, some, clock)}

    known = measure(_spread(points))
    points = with_expected(points, list(known.values()), goal.k)
    allowed = [point for point in points if point.setting.nprobe >= min(FEWEST_PROBES, nlist)] or points
    near = [*_choices(allowed, goal)[:TIMED_CHOICES], *_telling(front(points))]
    known |= measure([one for one in _different(near) if one.setting not in known][: TIMED_POINTS - len(known)])
    chosen = _choose([known[point.setting] for point in allowed if point.setting in known], goal)
    raised = 0
    while raised < MOST_RAISED and (better := _better(searcher, reported, allowed, chosen, goal)) is not None:
        known |= measure([better])
        chosen, raised = known[better.setting], raised + 1
    scores = {name: _score(searcher, half, goal, chosen.setting, clock) for name, half in reported.items()}
    return Tuning(
        goal=goal,
        setting=chosen.setting,
        met=_met(goal, scores, chosen),
        scores=scores,
        points=sorted(known.values(), key=lambda point: point.cost),
        front=front(list(known.values())),
        raised=raised,
        swept_all=swept_all,
        seconds=round(time.monotonic() - began, 3),
        load=load(),
    )


def load() -> float:
    """Processes that were ready to run over the last minute, without this one, for each core of the machine."""
    return round(max(0.0, os.getloadavg()[0] - 1.0) / (os.cpu_count() or 1), 2)


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats in both time and recall of the worst set, fastest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one.cost, -one.worst)):
        if not kept or point.worst > kept[-1].worst:
            kept.append(point)
    return kept


def _telling(points: Sequence[Point]) -> list[Point]:
    """Points of a front in an order in which the first ones already show its course: those of high recall first."""
    near = [point for point in points if point.worst >= 0.7 * points[-1].worst]
    return [*near[::-1][::2], *near[::-1][1::2]]


def _spread(points: Sequence[Point]) -> list[Point]:
    """The corners and the middle of what was looked at, to fit the expected time to."""
    probes = sorted({point.setting.nprobe for point in points})
    factors = sorted({point.setting.k_factor for point in points})
    at = {point.setting: point for point in points}
    corners = [
        (probes[0], factors[0]),
        (probes[-1], factors[0]),
        (probes[0], factors[-1]),
        (probes[-1], factors[-1]),
        (probes[len(probes) // 2], factors[len(factors) // 2]),
    ]
    wanted = [Setting(nprobe=nprobe, k_factor=factor) for nprobe, factor in dict.fromkeys(corners)]
    # Not every factor was looked at with all probes.
    return [at[one] for one in wanted if one in at]


def _different(points: Sequence[Point]) -> list[Point]:
    return list({point.setting: point for point in points}.values())


def _choices(points: Sequence[Point], goal: Goal) -> list[Point]:
    """What may be chosen, by what is expected: the likeliest first."""
    points = [point for point in points if point.finds_enough] or list(points)
    if goal.milliseconds is not None:
        points = [point for point in points if (point.mean_ms or point.expected_ms) <= goal.milliseconds] or [
            min(points, key=lambda one: one.cost)  # nothing is as fast as that
        ]
    if goal.recall is not None:
        # What was looked at with all queries is surer.
        surest = max(point.queries for point in points)
        for some, margin in (([one for one in points if one.queries == surest], True), (points, True), (points, False)):
            if enough := [point for point in some if point.reaches(goal.recall, margin=margin)]:
                return sorted(enough, key=lambda point: point.cost)
    if goal.milliseconds is not None:
        return sorted(points, key=lambda point: (-point.worst, point.cost))
    best = max(point.worst for point in points)
    return sorted((point for point in points if point.worst >= best - AS_GOOD), key=lambda point: point.cost)


def _choose(measured: Sequence[Point], goal: Goal) -> Point:
    return _choices(measured, goal)[0]


def _better(
    searcher: Searches, reported: Mapping[str, Half], points: Sequence[Point], chosen: Point, goal: Goal
) -> Point | None:
    """The next setting, where the chosen one reaches the target on one half of the queries and not on the other."""
    if goal.recall is None or not chosen.reaches(goal.recall, margin=False):
        return None
    short = goal.recall - min(
        mean_recall(half.search(searcher, goal.k, chosen.setting), half.truth, goal.k) for half in reported.values()
    )
    if short <= 0.0:
        return None
    higher = [
        point
        for point in points
        if point.worst >= chosen.worst + short / 2
        and (goal.milliseconds is None or point.expected_ms <= goal.milliseconds)
    ]
    return min(higher, key=lambda point: point.expected_ms, default=None)


def _met(goal: Goal, scores: Mapping[str, Scores], chosen: Point) -> bool:
    reached = goal.recall is None or min(one.recall[goal.k] for one in scores.values()) >= goal.recall
    return reached and (goal.milliseconds is None or (chosen.mean_ms or 0.0) <= goal.milliseconds)


def _score(searcher: Searches, half: Half, goal: Goal, setting: Setting, clock: Clock) -> Scores:
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
