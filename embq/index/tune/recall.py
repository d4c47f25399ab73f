"""Recall: the share of the true nearest rows that a search has found. Used by tuning and by all benchmarks.

Ties count: a row that was found is right where its exact score is as good as that of the k-th nearest row. Copies of a
row (a boilerplate sentence, a default picture) would otherwise count as misses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-6
"""Margin within which a score below the k-th best is still a tie: float32 sums of some hundred products are off by some
1e-7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The nearest rows of some queries by exact search.

    Attributes:
        ids: int64 (queries, deep), best first; -1 if there are fewer rows. Deeper than the k that is scored, so that
            ties of the k-th can be seen.
        scores: float32 (queries, deep), higher is better: cosines, inner products, or squared distances with a minus.
        tolerance: by which scores of ties may differ.
    """

    ids: np.ndarray
    scores: np.ndarray
    tolerance: float = TOLERANCE

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, queries: slice | np.ndarray) -> Truth:
        """The truth of some of the queries."""
        return Truth(ids=self.ids[queries], scores=self.scores[queries], tolerance=self.tolerance)

    def right(self, k: int) -> np.ndarray:
        """bool (queries, deep): which rows are right answers for a search of k, the ties of the k-th among them."""
        available = (self.ids >= 0).sum(axis=1)
        last = np.minimum(available, k) - 1
        bound = self.scores[np.arange(len(self)), np.maximum(last, 0)]
        margin = self.tolerance * np.maximum(1.0, np.abs(bound))
        right: np.ndarray = (self.ids >= 0) & (self.scores >= (bound - margin)[:, None])
        return right


def recall(answers: np.ndarray, truth: Truth, k: int) -> np.ndarray:
    """recall@k of each query: float64 (queries,), NaN for a query without any true neighbour.

    The best k of what was found are looked at; of fewer than k rows in all, all must be found.

    Args:
        answers: int64 (queries, at least k unless there are fewer rows), best first; -1 if nothing was found. A row
            that the truth does not hold is wrong.
    """
    counts = hits(answers[:, :k], truth, k)
    possible = np.minimum((truth.ids >= 0).sum(axis=1), k)
    with np.errstate(invalid="ignore"):
        return np.where(possible > 0, np.minimum(counts, possible) / np.maximum(possible, 1), np.nan)


def hits(answers: np.ndarray, truth: Truth, k: int) -> np.ndarray:
    """int64 (queries,): how many different rows in `answers`, of any width, are right answers for a search of k."""
    good = which_right(answers, truth, k)
    for query in np.flatnonzero(good.sum(axis=1) > 1):
        ids = answers[query][good[query]]
        if len(np.unique(ids)) < len(ids):
            good[query] &= np.isin(np.arange(answers.shape[1]), np.unique(answers[query], return_index=True)[1])
    count: np.ndarray = good.sum(axis=1)
    return count


def which_right(answers: np.ndarray, truth: Truth, k: int) -> np.ndarray:
    """bool, the shape of `answers`: which of the rows are right answers for a search of k."""
    step = int(max(truth.ids.max(initial=0), answers.max(initial=0))) + 1
    base = np.arange(len(truth), dtype=np.int64)[:, None] * step
    right_ids = (truth.ids + base)[truth.right(k)]
    good: np.ndarray = np.isin(answers + base, right_ids) & (answers >= 0)
    return good


def mean_recall(answers: np.ndarray, truth: Truth, k: int) -> float:
    """Mean recall@k of all queries that have a neighbour; NaN if none has."""
    each = recall(answers, truth, k)
    defined = each[~np.isnan(each)]
    return float(defined.mean()) if len(defined) else float("nan")
