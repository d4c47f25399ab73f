"""What `bench.index` computes from answers: the truth, the front of settings, and times at equal recall."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.index_cases import CASES, chosen
from bench.index_scoring import BLOCK_ROWS, Point, compared, front, ms_at, points, truth_of


def point(recall: float, ms: float, *, tuned: bool = False) -> Point:
    return Point(setting="", tuned=tuned, recall=recall, mean_ms=ms, p50_ms=ms, p95_ms=ms, p99_ms=ms)


def test_the_truth_is_that_of_a_full_sort_across_blocks() -> None:
    random = np.random.default_rng(1)
    vectors = random.normal(size=(BLOCK_ROWS + 300, 8)).astype(np.float16)
    queries = random.normal(size=(5, 8)).astype(np.float32)
    truth = truth_of(vectors, queries)
    scores = queries @ vectors.astype(np.float32).T
    assert np.array_equal(truth.ids[:, :10], np.argsort(-scores, axis=1, kind="stable")[:, :10])


def test_right_answers_have_a_recall_of_one_and_copies_of_a_row_count_alike(tmp_path: Path) -> None:
    vectors = np.eye(12, dtype=np.float32)
    vectors[11] = vectors[9]
    queries = np.linspace(2, 1, 12, dtype=np.float32)[None]
    queries[0, 11] = 0
    found = np.arange(10)[None]
    found[0, 9] = 11
    np.save(tmp_path / "0.ids.npy", found)
    np.save(tmp_path / "0.seconds.npy", np.array([0.002]))
    (tmp_path / "answers.json").write_text(json.dumps({"settings": [{"setting": "nprobe=1", "tuned": True}]}))
    (told,) = points([tmp_path], truth_of(vectors, queries), vectors, queries)
    assert (told.recall, told.p50_ms) == (1.0, 2.0)


def test_a_front_holds_what_nothing_is_better_than() -> None:
    kept = front([point(0.8, 1.0), point(0.7, 2.0), point(0.9, 3.0), point(0.9, 2.5)])
    assert [(one.recall, one.p50_ms) for one in kept] == [(0.8, 1.0), (0.9, 2.5)]


def test_times_between_points_are_interpolated_and_those_beyond_are_unknown() -> None:
    kept = [point(0.8, 1.0), point(0.9, 4.0)]
    assert ms_at(0.85, kept) == pytest.approx(2.0)
    assert ms_at(0.5, kept) == 1.0
    assert ms_at(0.91, kept) is None


def test_sides_are_compared_at_recalls_that_both_reach() -> None:
    theirs, ours = [point(0.85, 5.0, tuned=True)], [point(0.8, 0.1), point(0.96, 1.0, tuned=True)]
    told = compared(theirs, ours)
    assert told["difference"] == pytest.approx(0.11)
    assert max(at["recall"] for at in told["at_equal_recall"]) == 0.85


def test_cases_are_named_or_written_out() -> None:
    assert chosen(CASES[0].name) == [CASES[0]]
    (other,) = chosen("minilm:1000:2M:300M")
    assert (other.rows, other.index_memory, other.memory) == (1000, "2M", "300M")
