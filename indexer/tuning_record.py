"""A tuning as JSON, on its way from the unit that tunes to the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from indexer.points import Goal, Point, Scores, Setting, Tuning


def describe(tuning: Tuning) -> dict[str, Any]:
    """The tuning as JSON-ready values; `from_description` is its inverse."""
    return asdict(tuning)


def from_description(described: Mapping[str, Any]) -> Tuning:
    """The tuning that `describe` gave, also where JSON has made text of the numbers that recalls are found by."""
    return Tuning(
        **{
            **described,
            "goal": Goal(**described["goal"]),
            "setting": Setting(**described["setting"]),
            "scores": {name: _scores(one) for name, one in described["scores"].items()},
            "points": [_point(one) for one in described["points"]],
            "front": [_point(one) for one in described["front"]],
        }
    )


def _point(described: Mapping[str, Any]) -> Point:
    return Point(**{**described, "setting": Setting(**described["setting"])})


def _scores(described: Mapping[str, Any]) -> Scores:
    return Scores(**{**described, "recall": {int(k): value for k, value in described["recall"].items()}})
