"""Speeds of all workers of a model, summed up by the producer once a second: what a worker reads before it claims.

If each worker read the reports of all others, a fleet's cost would grow with the square of its size. So the producer
reads them, and keeps `MOST_GROUPS` groups of workers of about one speed, each worker in one of its own where they are
no more.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import redis
from msgspec import Meta

from embq.core import wire
from embq.core.errors import MalformedError
from embq.core.queue.heartbeats import BriefReport, UnitSeconds
from embq.core.queue.keys import speeds_key
from embq.core.wire import Count, Seconds

SUM_S = 1.0
"""Most seconds between two sums."""
SILENT_S = 3.0
"""A worker that has not reported for so long is not counted upon, and neither is a sum of that age."""
MOST_GROUPS = 48
ROUNDING = 1e-6
"""A unit that ends exactly then counts, whatever rounding says."""

Group = tuple[Annotated[int, Meta(ge=1, le=2**31)], Seconds, UnitSeconds, Count]
"""Workers, seconds of work in hand, seconds for a unit, and `mark` of the name if it is one worker, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """What the broker keeps. `at_ms` is its own time of the sum."""

    at_ms: Count
    groups: Annotated[list[Group], Meta(max_length=MOST_GROUPS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpeed:
    """Work in hand and speed of one worker, or of some that are alike.

    Attributes:
        ahead_s: seconds until it is through with what it holds.
        unit_s: seconds that it needs for one more unit; above 0.
        workers: how many they are.
        mark: of its name; 0 if they are several.
    """

    ahead_s: float
    unit_s: float
    workers: int = 1
    mark: int = 0

    def units_by(self, end_s: float) -> int:
        """Further units that one of them gets done until `end_s` seconds from now."""
        return max(0, math.floor((end_s - self.ahead_s) / self.unit_s + ROUNDING))


def mark(name: str) -> int:
    """A number for a worker's name; not 0."""
    return zlib.crc32(name.encode()) or 1


def keep_sum(client: redis.Redis, queue_key: str, reports: Iterable[tuple[BriefReport, float]], at_ms: int) -> None:
    """Sum up the reports of the workers of one model, each with its age in seconds, at a time of the broker."""
    speeds = sorted(
        (report.unit_s, max(0.0, report.ahead_s - age_s), mark(report.name))
        for report, age_s in reports
        if report.unit_s is not None and report.ahead_s is not None and age_s <= SILENT_S
    )
    groups: list[Group] = []
    count = min(MOST_GROUPS, len(speeds))
    for at in range(count):
        group = speeds[at * len(speeds) // count : (at + 1) * len(speeds) // count]
        # As fast together as they are.
        unit_s = len(group) / sum(1 / speed[0] for speed in group)
        ahead_s = sum(speed[1] for speed in group) / len(group)
        groups.append((len(group), round(ahead_s, 3), float(f"{unit_s:.5g}"), group[0][2] if len(group) == 1 else 0))
    client.set(speeds_key(queue_key), wire.write(_Sum(at_ms=at_ms, groups=groups)), px=int(SILENT_S * 1000))


def other_speeds(text: bytes | None, now_ms: int, name: str) -> list[WorkerSpeed]:
    """The other workers, as a sum has them, at a time of the broker; none if it is missing, malformed or old."""
    if text is None:
        return []
    try:
        summary = wire.read_part(_Sum, text, what="sum of workers' speeds")
    except MalformedError as error:
        wire.skipped("sum of workers' speeds", "", error)
        return []
    age_s = max(0.0, (now_ms - summary.at_ms) / 1000)
    if age_s > SILENT_S:
        return []
    own = mark(name)
    return [
        WorkerSpeed(ahead_s=max(0.0, ahead_s - age_s), unit_s=unit_s, workers=workers, mark=whose)
        for workers, ahead_s, unit_s, whose in summary.groups
        if whose != own
    ]
