"""The metrics of `embq serve` are those that are documented, and all of them are exported."""

from __future__ import annotations

import re
from pathlib import Path

from embq.serving.metrics import METRICS, STEPS, Metrics, Steps

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_the_documents_have_every_metric_with_its_labels() -> None:
    rows = re.findall(
        r"^\| `(embq_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", OPERATIONS.read_text("utf-8"), re.MULTILINE
    )
    told = [(name, kind, labels.strip(), meaning) for name, kind, labels, meaning in rows]
    assert told == [(one.name, one.kind, ", ".join(one.labels), one.meaning) for one in METRICS]


def test_every_metric_can_be_scraped() -> None:
    scraped = Metrics().exposition().decode()
    for metric in METRICS:
        name = metric.name.removesuffix("_total") + "_total" if metric.kind == "counter" else metric.name
        assert f"# TYPE {name} {metric.kind}" in scraped


def test_the_summary_says_where_the_time_goes() -> None:
    metrics = Metrics()
    assert metrics.summary() == "No request to /knn-service yet.\n"
    steps = Steps(metrics)
    for name in STEPS:
        with steps.step(name):
            pass
    metrics.histogram("embq_http_request_seconds").labels("/knn-service").observe(1.0)
    summary = metrics.summary()
    assert summary.startswith("1 requests to /knn-service and /search took 1000.00 ms on average.")
    assert all(re.search(rf"^{name} +1 +\d", summary, re.MULTILINE) for name in STEPS)
    assert list(steps.seconds) == list(STEPS)
    assert steps.server_timing().startswith("fetch;dur=")
