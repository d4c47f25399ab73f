"""Records of tuning: goals, settings, measured points and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

MARGIN_ERRORS = 2.0
MOST_MARGIN = 0.01
"""A setting is chosen whose recall is above the target by this many standard errors, at most by so much: the difference
between two halves of the queries has an error of 1.4 times that of one."""
ENOUGH_FOUND = 0.99


class Searches(Protocol):
    """Interface of the searcher that is tuned: `embq.index.searcher.Searcher` or a fake."""

    @property
    def nlist(self) -> int:
        """Lists of the index; 1 of one without lists."""

    @property
    def refines(self) -> bool:
        """Whether candidates can be re-ranked."""

    @property
    def n(self) -> int:
        """Rows that can be answers."""

    def search(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        nprobe: int | None = None,
        k_factor: int | None = None,
        refine: bool | None = None,
    ) -> Any:
        """Answers with `ids`, int64 (q, k)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Target of tuning.

    Attributes:
        recall: recall@k that the worst query set is to reach; None if only the time counts.
        k: answers to a search.
        milliseconds: mean time of a search that is not to be exceeded; None if only the recall counts.
        least_found: answers that 99 % of the searches are to give where the index has as many rows.
    """

    recall: float | None = 0.95
    k: int = 10
    milliseconds: float | None = None
    least_found: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Search parameters.

    Attributes:
        nprobe: lists that are looked at.
        k_factor: how many times k candidates are re-ranked by their vectors; 1 re-ranks nothing.
    """

    nprobe: int
    k_factor: int

    @property
    def parameters(self) -> str:
        """The setting as in infos.json: "nprobe=16,k_factor=4"."""
        return f"nprobe={self.nprobe}" + (f",k_factor={self.k_factor}" if self.k_factor > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setting and what it is worth on the queries that are tuned on.

    Attributes:
        recall: recall@k of each query set.
        errors: standard error of each.
        found: share of the queries that get `least_found` answers.
        queries: that it was measured with.
        mean_ms, p50_ms: of a single search; None if it was not timed.
        expected_ms: by the model of cost, from the settings that were timed.
    """

    setting: Setting
    recall: Mapping[str, float]
    errors: Mapping[str, float]
    found: float = 1.0
    queries: int = 0
    mean_ms: float | None = None
    p50_ms: float | None = None
    expected_ms: float = 0.0

    @property
    def worst(self) -> float:
        """Recall of the worst set."""
        return min(self.recall.values())

    @property
    def finds_enough(self) -> bool:
        """True if nearly all queries get as many answers as are wanted at least."""
        return self.found >= ENOUGH_FOUND

    @property
    def cost(self) -> float:
        """Median time of a search in milliseconds, the expected one if it was not timed."""
        return self.expected_ms if self.p50_ms is None else self.p50_ms

    def reaches(self, target: float, *, margin: bool) -> bool:
        """True if all sets reach a recall, with the margin for queries that were not tuned on."""
        if not margin:
            return self.worst >= target
        return all(
            value >= min(1.0, target + min(MOST_MARGIN, MARGIN_ERRORS * self.errors[name], (1.0 - target) / 4))
            for name, value in self.recall.items()
        )

    def describe(self) -> dict[str, Any]:
        """The point as JSON-ready values."""
        return {
            "nprobe": self.setting.nprobe,
            "k_factor": self.setting.k_factor,
            "recall": {name: round(value, 5) for name, value in self.recall.items()},
            "errors": {name: round(value, 5) for name, value in self.errors.items()},
            "found": round(self.found, 5),
            "queries": self.queries,
            "p50_ms": self.p50_ms,
            "mean_ms": self.mean_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Recall and latency of the chosen setting on the reported half of one query set.

    Attributes:
        queries: reported ones; the truth of as many more was tuned on.
        recall: recall@1, @10 and @100, and @k of the goal.
        p50_ms, p95_ms, p99_ms, mean_ms: of a single search of the goal's k.
        mean_40_ms, p99_40_ms: of a single search of 40, as autofaiss measures.
        autofaiss: its four keys: the query's own row is among the answers, and ties are misses.
    """

    queries: int
    recall: Mapping[int, float]
    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    mean_40_ms: float
    p99_40_ms: float
    autofaiss: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Result of tuning.

    Attributes:
        setting: how the index is to be searched.
        met: whether recall and time are as asked for; None if there was nothing to measure by.
        scores: query set -> what a searcher gets.
        points: settings that were timed, fastest first.
        front: those of them that none beats in both time and recall.
        raised: how often the reported half missed the target, and the next setting was taken.
        swept_all: False if the time for tuning ended before the sweep did.
        seconds: that tuning took.
        load: other work that waited for a core meanwhile, as a multiple of the cores; above 1 the times say little.
    """

    goal: Goal
    setting: Setting
    met: bool | None
    scores: Mapping[str, Scores] = field(default_factory=dict)
    points: Sequence[Point] = ()
    front: Sequence[Point] = ()
    raised: int = 0
    swept_all: bool = True
    seconds: float = 0.0
    load: float = 0.0

    @property
    def best(self) -> float | None:
        """Recall@k of the worst query set, as reported; None if there are no queries."""
        return min((score.recall[self.goal.k] for score in self.scores.values()), default=None)
