"""Metrics of the server, in Prometheus's format and as a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from embq.core.service.metrics import Metric

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


METRICS = (
    Metric(
        name="embq_http_requests_total",
        kind="counter",
        labels=("route", "status"),
        meaning="answers; `route` is `other` for paths that are not served",
    ),
    Metric(
        name="embq_http_request_seconds",
        kind="histogram",
        labels=("route",),
        meaning="from the first byte of a request to the whole answer, waiting included",
    ),
    Metric(name="embq_http_in_flight", kind="gauge", labels=(), meaning="requests that are being answered"),
    Metric(
        name="embq_search_seconds",
        kind="histogram",
        labels=("step",),
        meaning="a step of `/knn-service` or `/search`: `fetch` an image by its URL, `embed` the query, `filter`, "
        "`knn`, `duplicates`, `rows`",
    ),
    Metric(name="embq_index_rows", kind="gauge", labels=("index", "modality"), meaning="rows that can be found"),
    Metric(
        name="embq_index_info",
        kind="gauge",
        labels=("index", "modality", "version"),
        meaning="1 for the version that is searched",
    ),
    Metric(
        name="embq_index_reloads_total",
        kind="counter",
        labels=("index", "modality", "result"),
        meaning="new versions that were taken up (`done`) or could not be opened (`failed`)",
    ),
    Metric(name="embq_model_ready", kind="gauge", labels=("model",), meaning="1 once the model can embed queries"),
    Metric(name="embq_embeddings_texts_total", kind="counter", labels=("model",), meaning="texts that were embedded"),
    Metric(name="embq_embeddings_tokens_total", kind="counter", labels=("model",), meaning="tokens of these texts"),
    Metric(
        name="embq_embeddings_truncated_total",
        kind="counter",
        labels=("model",),
        meaning="texts longer than the model reads, of which only the beginning was embedded",
    ),
    Metric(
        name="embq_embeddings_waiting_tokens",
        kind="gauge",
        labels=("model",),
        meaning="tokens of requests that are not answered yet",
    ),
    Metric(name="embq_embeddings_pass_rows", kind="histogram", labels=("model",), meaning="texts of one forward pass"),
)
"""Every metric; docs/how-to/index/serve.md has the same list."""

SEARCH_ROUTES = ("/knn-service", "/search")

STEPS = ("fetch", "filter", "embed", "knn", "duplicates", "rows")


class Steps:
    """Seconds by step of one request, in order."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure a step; one that fails is not counted."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self._metrics.histogram("embq_search_seconds").labels(name).observe(self.seconds[name])

    def server_timing(self) -> str:
        """The header `Server-Timing`: https://www.w3.org/TR/server-timing/"""
        return ", ".join(f"{name};dur={seconds * 1000:.2f}" for name, seconds in self.seconds.items())


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            given = (metric.name, metric.meaning, metric.labels)
            if metric.kind == "counter":
                self._counters[metric.name] = Counter(*given, registry=self._registry)
            elif metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(*given, registry=self._registry)
            else:
                buckets = _ROWS if metric.name.endswith("_rows") else _SECONDS
                self._histograms[metric.name] = Histogram(*given, registry=self._registry, buckets=buckets)

    def counter(self, name: str) -> Counter:
        """A counter of METRICS."""
        return self._counters[name]

    def gauge(self, name: str) -> Gauge:
        """A gauge of METRICS."""
        return self._gauges[name]

    def histogram(self, name: str) -> Histogram:
        """A histogram of METRICS."""
        return self._histograms[name]

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def summary(self) -> str:
        """Time of searches by step, as a table."""
        both = [self._of("embq_http_request_seconds", {"route": route}) for route in SEARCH_ROUTES]
        calls, seconds = sum(calls for calls, _ in both), sum(seconds for _, seconds in both)
        if not calls:
            return f"No request to {SEARCH_ROUTES[0]} yet.\n"
        routes, average_ms = " and ".join(SEARCH_ROUTES), 1000 * seconds / calls
        lines = [
            f"{calls:,} requests to {routes} took {average_ms:.2f} ms on average. Their steps:",
            "",
            f"{'step':<12}{'calls':>10}{'average ms':>12}{'share':>8}",
        ]
        steps = [(name, *self._of("embq_search_seconds", {"step": name})) for name in STEPS]
        for name, count, total in sorted(steps, key=lambda step: -step[2]):
            if count:
                lines.append(f"{name:<12}{count:>10,}{1000 * total / count:>12.2f}{total / seconds:>8.1%}")
        return "\n".join(lines) + "\n"

    def _of(self, name: str, labels: dict[str, str]) -> tuple[int, float]:
        count, total = (self._registry.get_sample_value(f"{name}_{part}", labels) for part in ("count", "sum"))
        return int(count or 0), float(total or 0.0)
