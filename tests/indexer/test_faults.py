"""Vectors that no index can hold are refused."""

from __future__ import annotations

import numpy as np
import pytest

from embq.index.collection.collection import faults


def test_vectors_that_are_not_finite_or_all_zero_are_found() -> None:
    vectors = np.ones((6, 4), np.float32)
    vectors[1, 2], vectors[2, 0], vectors[3], vectors[4, 3] = np.nan, np.inf, 0.0, -np.inf
    assert faults(vectors).tolist() == [False, True, True, True, True, False]
    assert faults(vectors[:0]).tolist() == []


@pytest.mark.parametrize("number", [1e-38, 3e38])
def test_neither_very_small_nor_very_large_numbers_are_faults(number: float) -> None:
    assert faults(np.full((1, 3), number, np.float32)).tolist() == [False]
