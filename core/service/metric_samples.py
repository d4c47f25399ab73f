"""What was read of a service when somebody asked, as Prometheus wants it.

Nothing is counted here. A service keeps plain numbers, and they are read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.service.metrics import METRICS, Role

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass(slots=True)
class Spread:
    """How seconds are spread: what a histogram is made of. For one thread that counts.

    Attributes:
        bounds: upper bounds of its buckets, rising.
    """

    bounds: tuple[float, ...]
    sum: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one."""
        at = next((i for i, bound in enumerate(self.bounds) if seconds <= bound), len(self.bounds))
        self._counts[at] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many are not above it), as Prometheus wants it; the last one holds all."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return [(name, float(sum(self._counts[: i + 1]))) for i, name in enumerate(names)]


class Readings:
    """What one look at a service has read. A metric that nobody put is not told.

    Args:
        role: only its metrics can be put.
    """

    def __init__(self, role: Role) -> None:
        self._metrics = {metric.name: metric for metric in METRICS[role]}
        self._read: dict[str, dict[tuple[str, ...], float | Spread]] = {}

    def put(self, name: str, value: float | Spread, *labels: str) -> None:
        """The value of a metric of this role under `labels`, one for each of its own; a later one replaces it."""
        metric = self._metrics[name]
        if len(labels) != len(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, not {labels}")
        self._read.setdefault(name, {})[labels] = value

    def add(self, name: str, value: float, *labels: str) -> None:
        """As `put`, on top of what is there."""
        before = self._read.get(name, {}).get(labels, 0.0)
        assert not isinstance(before, Spread)
        self.put(name, before + value, *labels)

    def families(self) -> Iterator[Family]:
        """As Prometheus's client has them, in the order of the list."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, metric in self._metrics.items():
            if name not in self._read:
                continue
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.meaning, labels=metric.labels)
                for labels, spread in self._read[name].items():
                    assert isinstance(spread, Spread)
                    histogram.add_metric(labels, spread.buckets(), spread.sum)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.meaning, labels=metric.labels)
            for labels, value in self._read[name].items():
                assert not isinstance(value, Spread)
                family.add_metric(labels, value)
            yield family

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(self))
        return generate_latest(registry)


class _Once:
    """What a registry collects from."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Family]:
        yield from self._readings.families()

    def describe(self) -> Sequence[Family]:
        return ()


Meter = Callable[[Readings], None]
"""Reads something of a service. It may raise redis.exceptions.RedisError where the broker is away: then what it has
put until then is told."""
