"""Split of query sets into a tuned and a reported half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embq.indexer.tune.points import Searches, Setting
from embq.indexer.tune.queries import QuerySet
from embq.indexer.tune.recall import Truth

TUNED_QUERIES = 300
"""Limit for each set: more make tuning slower and hardly surer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One half of a query set.

    Attributes:
        vectors: float32 (q, d).
        own: int64 (q,), see `embq.indexer.tune.queries.QuerySet`.
    """

    vectors: np.ndarray
    own: np.ndarray
    truth: Truth

    def __len__(self) -> int:
        return len(self.vectors)

    def first(self, count: int) -> Half:
        """The half's first queries."""
        some = slice(0, count)
        return Half(vectors=self.vectors[some], own=self.own[some], truth=self.truth.of(some))

    def search(self, searcher: Searches, k: int, setting: Setting) -> np.ndarray:
        """int64 (q, k): the answers without each query's own row."""
        wanted = self._with_own(k)
        found = searcher.search(self.vectors, wanted, nprobe=setting.nprobe, k_factor=setting.k_factor)
        return self._without_own(found.ids, k)

    def candidates(self, searcher: Searches, k: int, nprobe: int) -> np.ndarray:
        """int64 (q, k): the best by their codes alone, without each query's own row."""
        return self._without_own(searcher.search(self.vectors, self._with_own(k), nprobe=nprobe, refine=False).ids, k)

    def _with_own(self, k: int) -> int:
        return k + bool((self.own >= 0).any())

    def _without_own(self, ids: np.ndarray, k: int) -> np.ndarray:
        others = ids != np.where(self.own < 0, -2, self.own)[:, None]
        order = np.argsort(~others, axis=1, kind="stable")
        sorted_ids = np.take_along_axis(ids, order, axis=1)
        kept: np.ndarray = np.where(np.take_along_axis(others, order, axis=1), sorted_ids, -1)
        return kept[:, :k]


def halves(sets: Sequence[QuerySet], truth: Mapping[str, Truth]) -> tuple[dict[str, Half], dict[str, Half]]:
    """Every other query is tuned on; the rest is reported. Queries without any neighbour are left out."""
    tuned, reported = {}, {}
    for one in sets:
        known = np.flatnonzero((truth[one.name].ids >= 0).any(axis=1))
        if not len(known):
            continue
        first, second = (known[::2], known[1::2]) if len(known) > 1 else (known, known)
        tuned[one.name] = _half(one, truth, first[:TUNED_QUERIES])
        reported[one.name] = _half(one, truth, second)
    return tuned, reported


def mixed(some: Mapping[str, Half]) -> np.ndarray:
    """Queries of all sets in turn, as many of each: float32 (q, d)."""
    each = min(len(one) for one in some.values())
    stacked = np.stack([one.vectors[:each] for one in some.values()], axis=1)
    return np.ascontiguousarray(stacked.reshape(-1, stacked.shape[-1]))


def _half(one: QuerySet, truth: Mapping[str, Truth], some: np.ndarray) -> Half:
    return Half(vectors=one.vectors[some], own=one.own[some], truth=truth[one.name].of(some))
