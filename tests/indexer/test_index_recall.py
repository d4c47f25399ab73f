"""The scorer of searches, and exact truth by blocks."""

from __future__ import annotations

import numpy as np
import pytest

from bench.index_scoring import mean_recall_with_ties
from embq.index.tune.recall import Truth, hits, mean_recall, recall
from embq.index.tune.truth import merged, nearest


def truth(ids: list[list[int]], scores: list[list[float]]) -> Truth:
    return Truth(ids=np.array(ids), scores=np.array(scores, np.float32))


def test_what_was_found_among_the_k_nearest_counts_in_any_order() -> None:
    one = truth([[4, 7, 1, 9]], [[0.9, 0.8, 0.7, 0.6]])

    assert recall(np.array([[1, 4, 8]]), one, 3).tolist() == [pytest.approx(2 / 3)]
    assert recall(np.array([[9, 4]]), one, 2).tolist() == [0.5]  # 9 is the fourth
    assert recall(np.array([[9, 8, 4]]), one, 2).tolist() == [0.0]  # 4 was found too late


def test_a_row_as_near_as_the_last_counts_and_never_more_than_all() -> None:
    tied = truth([[4, 7, 1, 9]], [[0.9, 0.8, 0.8, 0.8]])

    assert recall(np.array([[4, 9]]), tied, 2).tolist() == [1.0]
    assert recall(np.array([[9, 1]]), tied, 2).tolist() == [1.0]
    assert recall(np.array([[9, 1, 7, 4]]), tied, 3).tolist() == [1.0]
    assert hits(np.array([[9, 9, 9, -1]]), tied, 2).tolist() == [1]


def test_ties_beyond_the_truth_are_asked_for() -> None:
    copies = truth([[0, 1, 2]], [[1.0, 1.0, 1.0]])
    asked: list[tuple[int, list[int]]] = []

    def exact(query: int, ids: np.ndarray) -> np.ndarray:
        asked.append((query, ids.tolist()))
        return np.where(ids == 50, 1.0, 0.2)

    assert recall(np.array([[50, 60]]), copies, 2).tolist() == [0.0]
    assert mean_recall_with_ties(np.array([[50, 60]]), copies, 2, exact) == 0.5
    assert asked == [(0, [50, 60])]


def test_fewer_rows_than_k_are_all_to_be_found_and_none_gives_no_recall() -> None:
    few = truth([[3, 5, -1], [-1, -1, -1]], [[0.5, 0.4, -np.inf], [-np.inf] * 3])

    each = recall(np.array([[5, 3, -1], [-1, -1, -1]]), few, 10)

    assert each[0] == 1.0
    assert np.isnan(each[1])
    assert mean_recall(np.array([[5, -1, -1], [-1, -1, -1]]), few, 10) == 0.5


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_the_truth_of_blocks_is_that_of_the_whole(metric: str) -> None:
    random = np.random.default_rng(3)
    rows = random.normal(size=(700, 16)).astype(np.float32)
    if metric == "cosine":
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    own = np.array([5, 500, -1])
    queries = np.concatenate([rows[own[:2]], rows[7:8] * 1.0])

    whole = nearest(queries, own, [(0, rows)], metric=metric, depth=20)
    blocks = [nearest(queries, own, [(a, rows[a : a + 90])], metric=metric, depth=20) for a in range(0, 700, 90)]
    joined = merged(blocks, depth=20)

    difference = rows[None].astype(np.float64) - queries[:, None]
    scores = {
        "cosine": rows.astype(np.float64) @ queries.T,
        "ip": rows.astype(np.float64) @ queries.T,
        "l2": -np.square(difference).sum(axis=2).T,
    }[metric].T
    scores[0, 5] = scores[1, 500] = -np.inf
    assert (joined.ids == np.argsort(-scores, axis=1)[:, :20]).all()
    assert (whole.ids == joined.ids).all()
    assert joined.scores == pytest.approx(-np.sort(-scores, axis=1)[:, :20], abs=1e-4)


def test_rows_that_are_no_vectors_are_no_answers() -> None:
    rows = np.eye(4, dtype=np.float32)
    rows[1], rows[2] = np.nan, 0.0

    found = nearest(rows[:1], np.array([-1]), [(10, rows)], metric="cosine", depth=3)

    assert found.ids.tolist() == [[10, 13, -1]]
