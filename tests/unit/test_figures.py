"""Figures in the README and the docs are those of bench/results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.test_docs import ROOT


def result(name: str) -> Any:
    """The figures of a benchmark."""
    made = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return made.get("figures", made)


def faults() -> dict[str, int]:
    entries = result("faults")["faults"]
    return {
        "injected": sum(entry["injected"] for entry in entries),
        "kinds": len({entry["id"] for entry in entries}),
        "tests": sum(len(entry["tests"]) for entry in entries),
    }


def times_encode(precision: str) -> float:
    return next(
        float(pair["ratio"])
        for pair in result("text")["ratios"]
        if (pair["precision"], pair["beside"]) == (precision, "sentence-transformers encode")
    )


def pixels() -> tuple[float, float]:
    times = [each["paths"]["cpu-exact"]["times"] for each in result("images")["sets"]]
    return min(times), max(times)


def autofaiss_times() -> int:
    """How many times as long a search of autofaiss takes at the recall it chose, of 300,000 rows, rounded down."""
    (case,) = [case for case in result("index")["cases"] if case["rows"] == 300_000]
    (queries,) = case["query_sets"]
    return int(next(at["times"] for at in queries["at_equal_recall"] if at["recall"] == queries["recall_theirs"]))


def soak() -> dict[str, int]:
    made = result("soak")
    return {"seeds": made["seeds"], "faults": made["faults"]}


def scale() -> dict[str, Any]:
    built = result("index_scale")["built"]
    return {
        "seconds": built["seconds"],
        "cpu_s": built["cpu_s"],
        "recall": built["infos"]["recall@10"],
        "gb": built["peak_rss_bytes"] / 1e9,
    }


def of_card(model: str) -> float:
    return float(result("gpu")["models"][model]["run_of_alone"])


SENTENCES: list[tuple[str, Callable[[], str]]] = [
    ("README.md", lambda: "{injected:,} injected faults of {kinds} kinds".format(**faults())),
    ("README.md", lambda: f"{times_encode('fp32'):.2f} times sentence-transformers' `encode` in fp32"),
    ("README.md", lambda: f"{times_encode('int8'):.2f} times in int8"),
    ("README.md", lambda: "pixels {:.1f} to {:.1f} times as fast as by Pillow".format(*pixels())),
    ("README.md", lambda: "10 million rows within 4 GB in {seconds:.0f} s".format(**scale())),
    ("README.md", lambda: "recall@10 {recall:.3f}".format(**scale())),
    ("README.md", lambda: f"at autofaiss's recall in 1/{autofaiss_times()} of its time"),
    (
        "README.md",
        lambda: f"together reach {result('experiments/devices')['of_the_sum']['mean']:.3f} of the sum of their rates",
    ),
    ("docs/benchmarks.md", lambda: "injects {kinds} kinds {injected:,} times in {tests} tests".format(**faults())),
    ("docs/benchmarks.md", lambda: "In all {seconds:.0f} s, {cpu_s:.0f} s of CPU, {gb:.1f} GB".format(**scale())),
    (
        "docs/benchmarks.md",
        lambda: "{seeds} seeds of random faults (`make soak`, {faults} of".format(**soak()),
    ),
    ("docs/limits.md", lambda: f"feed an H100's ViT-B-32 at {of_card('ViT-B-32'):.0%} of its speed"),
    ("docs/reference/models.md", lambda: "{:.1f} to {:.1f} times as fast as the models' own".format(*pixels())),
]


@pytest.mark.parametrize("number", range(len(SENTENCES)))
def test_a_figure_is_that_of_the_benchmark(number: int) -> None:
    page, sentence = SENTENCES[number]
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert sentence() in text
