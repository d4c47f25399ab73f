"""What the text benchmark says of vectors that differ, and of seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.text import Measured
from bench.text_profile import flop

TEXTS = 64


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """Two measurements of `encode` and of fp32, which gave the same vectors but for rounding."""
    found = Measured(tmp_path, tmp_path / "texts.jsonl", [str(number) for number in range(TEXTS)])
    vectors = np.random.default_rng(0).standard_normal((TEXTS, 8)).astype(np.float32)
    found.vectors = {"encode": vectors, "fp32": vectors + np.float32(1e-6), "pool-8": vectors[::5]}
    found.seconds = {"encode": [6.0, 8.0], "fp32": [3.0, 4.0]}
    return found


def test_equal_vectors_are_told_from_others(measured: Measured) -> None:
    rows, same = measured.equal()
    assert same
    assert {row["who"]: row["held"] for row in rows} == {"fp32": True, "pool-8": True}
    measured.vectors["fp32"][3, 5] += 1e-3
    assert not measured.equal()[1]


def test_a_ratio_is_that_of_the_medians(measured: Measured) -> None:
    (ratio,) = measured.ratios()
    assert (ratio["ratio"], ratio["lowest"], ratio["highest"], ratio["held"]) == (2.0, 1.5, 2.667, "yes")


def test_the_arithmetic_of_a_text_is_that_of_its_tokens() -> None:
    # 6 layers of 384 with an inner width of 1,536: 2.87 GFLOP for 128 tokens.
    assert flop([128]) == pytest.approx(2.87e9, rel=0.01)
    assert flop([128, 128]) == 2 * flop([128])
