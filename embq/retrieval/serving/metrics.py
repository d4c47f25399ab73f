"""Metrics of the server, in Prometheus's format and as a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from embq.core.service.metrics import METRICS

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

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
        self._metrics.histograms["embq_search_seconds"].labels(name).observe(self.seconds[name])

    def server_timing(self) -> str:
        """The header `Server-Timing`: https://www.w3.org/TR/server-timing/"""
        return ", ".join(f"{name};dur={seconds * 1000:.2f}" for name, seconds in self.seconds.items())


class Metrics:
    """The metrics of one server, in a registry of their own.

    Attributes:
        counters, gauges, histograms: by name, see `embq.core.service.metrics.SERVE`.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = registry = CollectorRegistry()
        self.counters: dict[str, Counter] = {}
        self.gauges: dict[str, Gauge] = {}
        self.histograms: dict[str, Histogram] = {}
        for metric in METRICS["serve"]:
            arguments = (metric.name, metric.meaning, metric.labels)
            match metric.kind:
                case "counter":
                    self.counters[metric.name] = Counter(*arguments, registry=registry)
                case "gauge":
                    self.gauges[metric.name] = Gauge(*arguments, registry=registry)
                case "histogram":
                    buckets = _ROWS if metric.name.endswith("_rows") else _SECONDS
                    self.histograms[metric.name] = Histogram(*arguments, registry=registry, buckets=buckets)

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
