"""Split of query sets into a tuned and a reported half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embq.index.tune.points import Searches, Setting
from embq.index.tune.queries import QuerySet
from embq.index.tune.recall import Truth

TUNED_QUERIES = 300
"""Limit for each set: more make tuning slower and hardly surer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One half of a query set.

    Attributes:
        vectors: float32 (q, d).
        own: int64 (q,), see `embq.index.tune.queries.QuerySet`.
    """

    vectors: np.ndarray
    own: np.ndarray
    truth: Truth

    def __len__(self) -> int:
        return len(self.vectors)

    def first(self, count: int) -> Half:
        """The half's first queries."""
        head = slice(0, count)
        return Half(vectors=self.vectors[head], own=self.own[head], truth=self.truth.of(head))

    def search(self, searcher: Searches, k: int, setting: Setting) -> np.ndarray:
        """int64 (q, k): the answers without each query's own row."""
        depth = self._with_own(k)
        hits = searcher.search(self.vectors, depth, nprobe=setting.nprobe, k_factor=setting.k_factor)
        return self._without_own(hits.ids, k)

    def candidates(self, searcher: Searches, k: int, nprobe: int) -> np.ndarray:
        """int64 (q, k): the best by their codes alone, without each query's own row."""
        return self._without_own(searcher.search(self.vectors, self._with_own(k), nprobe=nprobe, refine=False).ids, k)

    def _with_own(self, k: int) -> int:
        return k + bool((self.own >= 0).any())

    def _without_own(self, ids: np.ndarray, k: int) -> np.ndarray:
        not_own = ids != np.where(self.own < 0, -2, self.own)[:, None]
        order = np.argsort(~not_own, axis=1, kind="stable")
        sorted_ids = np.take_along_axis(ids, order, axis=1)
        answers: np.ndarray = np.where(np.take_along_axis(not_own, order, axis=1), sorted_ids, -1)
        return answers[:, :k]


def halves(sets: Sequence[QuerySet], truth: Mapping[str, Truth]) -> tuple[dict[str, Half], dict[str, Half]]:
    """Every other query is tuned on; the rest is reported. Queries without any neighbour are left out."""
    tuned, reported = {}, {}
    for query_set in sets:
        answerable = np.flatnonzero((truth[query_set.name].ids >= 0).any(axis=1))
        if not len(answerable):
            continue
        first, second = (answerable[::2], answerable[1::2]) if len(answerable) > 1 else (answerable, answerable)
        tuned[query_set.name] = _half(query_set, truth, first[:TUNED_QUERIES])
        reported[query_set.name] = _half(query_set, truth, second)
    return tuned, reported


def mixed(by_set: Mapping[str, Half]) -> np.ndarray:
    """Queries of all sets in turn, as many of each: float32 (q, d)."""
    each = min(len(half) for half in by_set.values())
    stacked = np.stack([half.vectors[:each] for half in by_set.values()], axis=1)
    return np.ascontiguousarray(stacked.reshape(-1, stacked.shape[-1]))


def _half(query_set: QuerySet, truth: Mapping[str, Truth], numbers: np.ndarray) -> Half:
    return Half(vectors=query_set.vectors[numbers], own=query_set.own[numbers], truth=truth[query_set.name].of(numbers))
