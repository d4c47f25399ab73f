"""Tuning: chooses the number of probes and of re-ranked candidates for a recall or latency target.

One thread and single queries, as a searcher asks. Half of each query set is tuned on and the other half is reported,
because a setting that is chosen for some queries does a little worse on others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from embq.index.tune.measure import Clock, score, with_expected, with_times
from embq.index.tune.points import Goal, Point, Scores, Searches, Setting, Tuning
from embq.index.tune.queries import QuerySet
from embq.index.tune.recall import Truth, mean_recall
from embq.index.tune.sweep import sweep
from embq.index.tune.tuning_split import Half, halves, mixed

FEWEST_PROBES = 2
"""Least number of lists that a search looks at: neighbours of a query near an edge of its list lie beyond."""
UNTUNED = Setting(nprobe=64, k_factor=8)
"""Setting if there are no queries to tune by."""
TIMED_POINTS, TIMED_CHOICES = 16, 4
AS_GOOD = 0.002
"""Recall below the best at which the fastest setting is taken, where the target is missed."""
MOST_RAISED = 3


def tune_search(
    searcher: Searches,
    sets: Sequence[QuerySet],
    truth: Mapping[str, Truth],
    goal: Goal,
    *,
    seconds: float = 8.0,
    clock: Clock = time.perf_counter_ns,
) -> Tuning:
    """The setting for a goal, with what it is worth.

    With a recall: the fastest at which the worst set reaches it. With a time alone: the highest recall within it. With
    both, the recall is to be reached within the time.

    Args:
        searcher: on one thread.
        truth: of each set.
        seconds: of the processor for the sweep; timing and the scores take some seconds more.
        clock: by which single searches are timed.
    """
    began = time.monotonic()
    tuned, reported = halves(sets, truth)
    if not tuned:
        setting = Setting(
            nprobe=min(UNTUNED.nprobe, searcher.nlist), k_factor=UNTUNED.k_factor if searcher.refines else 1
        )
        return Tuning(goal=goal, setting=setting, met=None, seconds=time.monotonic() - began)
    points, swept_all = sweep(searcher, tuned, goal, seconds=seconds)
    queries = mixed(tuned)

    def measure(batch: Sequence[Point]) -> dict[Setting, Point]:
        return {point.setting: point for point in with_times(searcher, queries, goal.k, batch, clock)}

    allowed, by_setting = _measured(points, goal, searcher.nlist, measure)
    chosen, *_ = _choices([by_setting[point.setting] for point in allowed if point.setting in by_setting], goal)
    raised = 0
    while raised < MOST_RAISED and (better := _better(searcher, reported, allowed, chosen, goal)) is not None:
        by_setting |= measure([better])
        chosen, raised = by_setting[better.setting], raised + 1
    scores = {name: score(searcher, half, goal, chosen.setting, clock) for name, half in reported.items()}
    return Tuning(
        goal=goal,
        setting=chosen.setting,
        met=_met(goal, scores, chosen),
        scores=scores,
        points=sorted(by_setting.values(), key=lambda point: point.cost),
        front=front(list(by_setting.values())),
        raised=raised,
        swept_all=swept_all,
        seconds=round(time.monotonic() - began, 3),
        load=load(),
    )


def _measured(
    points: Sequence[Point],
    goal: Goal,
    nlist: int,
    measure: Callable[[Sequence[Point]], dict[Setting, Point]],
) -> tuple[list[Point], dict[Setting, Point]]:
    """The points that may be chosen, with the times expected of them, and those that were timed.

    The first that are timed are a few to fit the expected times of all others, then those that are likely to be chosen.
    """
    by_setting = measure(_spread(points))
    points = with_expected(points, list(by_setting.values()), goal.k)
    allowed = [point for point in points if point.setting.nprobe >= min(FEWEST_PROBES, nlist)] or points
    near = [*_choices(allowed, goal)[:TIMED_CHOICES], *_telling(front(points))]
    different = {point.setting: point for point in near if point.setting not in by_setting}
    by_setting |= measure(list(different.values())[: TIMED_POINTS - len(by_setting)])
    return allowed, by_setting


def load() -> float:
    """Processes that were ready to run over the last minute, without this one, for each core of the machine."""
    return round(max(0.0, os.getloadavg()[0] - 1.0) / (os.cpu_count() or 1), 2)


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both time and recall of the worst set, fastest first."""
    frontier: list[Point] = []
    for point in sorted(points, key=lambda candidate: (candidate.cost, -candidate.worst)):
        if not frontier or point.worst > frontier[-1].worst:
            frontier.append(point)
    return frontier


def _telling(points: Sequence[Point]) -> list[Point]:
    """Points of a front in an order in which the first ones already show its course: those of high recall first."""
    near = [point for point in points if point.worst >= 0.7 * points[-1].worst]
    return [*near[::-1][::2], *near[::-1][1::2]]


def _spread(points: Sequence[Point]) -> list[Point]:
    """The corners and the middle of what was looked at, to fit the expected time to."""
    probes = sorted({point.setting.nprobe for point in points})
    factors = sorted({point.setting.k_factor for point in points})
    at = {point.setting: point for point in points}
    corners = [*product((probes[0], probes[-1]), (factors[0], factors[-1]))]
    middle = probes[len(probes) // 2], factors[len(factors) // 2]
    settings = [Setting(nprobe=nprobe, k_factor=factor) for nprobe, factor in dict.fromkeys([*corners, middle])]
    # Not every factor was looked at with all probes.
    return [at[setting] for setting in settings if setting in at]


def _choices(points: Sequence[Point], goal: Goal) -> list[Point]:
    """Settings that may be chosen, by their expected times, the likeliest first."""
    points = [point for point in points if point.finds_enough] or list(points)
    if goal.milliseconds is not None:
        points = [point for point in points if (point.mean_ms or point.expected_ms) <= goal.milliseconds] or [
            min(points, key=lambda point: point.cost)  # nothing is as fast as that
        ]
    if goal.recall is not None:
        # What was looked at with all queries is surer.
        surest = max(point.queries for point in points)
        fully_measured = [point for point in points if point.queries == surest]
        for subset, margin in ((fully_measured, True), (points, True), (points, False)):
            if enough := [point for point in subset if point.reaches(goal.recall, margin=margin)]:
                return sorted(enough, key=lambda point: point.cost)
    if goal.milliseconds is not None:
        return sorted(points, key=lambda point: (-point.worst, point.cost))
    best = max(point.worst for point in points)
    return sorted((point for point in points if point.worst >= best - AS_GOOD), key=lambda point: point.cost)


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
    reached = goal.recall is None or min(entry.recall[goal.k] for entry in scores.values()) >= goal.recall
    return reached and (goal.milliseconds is None or (chosen.mean_ms or 0.0) <= goal.milliseconds)
