"""Metrics of the resident services for Prometheus, by role, and the samples of one scrape.

A service keeps plain numbers; `MetricSamples` reads them for each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


Role = Literal["producer", "writer", "worker"]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. Labels never hold keys, texts, URLs or ids of units.

    Attributes:
        name: with its unit; of a counter with `_total`.
        labels: their names, in the order in which values are given.
        meaning: for the documents and for Prometheus.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...] = ()
    meaning: str


EVERY_ROLE = (
    Metric(
        name="embq_build_info",
        kind="gauge",
        labels=("role", "version"),
        meaning="1; which service this is, and of which version of embq",
    ),
    Metric(
        name="embq_malformed_total",
        kind="counter",
        labels=("what",),
        meaning="entries of the broker or of a folder that were skipped because they are not of their form",
    ),
)

PRODUCER = (
    Metric(
        name="embq_broker_up",
        kind="gauge",
        meaning="1 where the broker answered; else 0, and nothing more is told",
    ),
    Metric(name="embq_broker_memory_bytes", kind="gauge", meaning="memory that the broker uses"),
    Metric(name="embq_broker_memory_limit_bytes", kind="gauge", meaning="its `maxmemory`; absent where it has none"),
    Metric(
        name="embq_services",
        kind="gauge",
        labels=("role",),
        meaning="producers, writers and worker supervisors that are heard of",
    ),
    Metric(name="embq_machines", kind="gauge", meaning="machines with workers that are heard of"),
    Metric(
        name="embq_devices",
        kind="gauge",
        labels=("state",),
        meaning="their places for a process, with the states of `embq_slots`",
    ),
    Metric(
        name="embq_workers",
        kind="gauge",
        labels=("model",),
        meaning="worker processes that are heard of, by model; 0 and an empty one where there is none",
    ),
    Metric(
        name="embq_worker_rows_per_second",
        kind="gauge",
        labels=("worker", "host", "device", "device_name"),
        meaning="samples embedded by one process, over its last 20 s",
    ),
    Metric(
        name="embq_worker_stage_share",
        kind="gauge",
        labels=("worker", "stage", "state"),
        meaning="part of the last 10 s in which a stage was `busy`, `starved` or `blocked`",
    ),
    Metric(
        name="embq_worker_limit",
        kind="gauge",
        labels=("worker", "limit"),
        meaning="1 for the word that says what limits it",
    ),
    Metric(name="embq_worker_units_held", kind="gauge", labels=("worker",), meaning="units under its leases"),
    Metric(name="embq_uploads", kind="gauge", meaning="runs that are on their way from a laptop"),
    Metric(
        name="embq_queue_hints",
        kind="gauge",
        labels=("model",),
        meaning="hints that wait for a worker; a few seconds of work, not the whole run",
    ),
    Metric(
        name="embq_runs",
        kind="gauge",
        labels=("state",),
        meaning="runs that are `running`, `paused`, `cancelled`, `done`, or `waiting` for a writer to open them",
    ),
    Metric(
        name="embq_run_info",
        kind="gauge",
        labels=("run", "name", "model", "state"),
        meaning="1; `name` is the end of the output's path. Of a run that has ended all is told for 10 minutes",
    ),
    Metric(
        name="embq_run_units",
        kind="gauge",
        labels=("run", "state"),
        meaning="units: `done`, `received` by the broker and not committed, `in_flight`, `queued`, `quarantined`",
    ),
    Metric(
        name="embq_run_rows_total",
        kind="counter",
        labels=("run",),
        meaning="committed rows, from the run's commits, so a restart of a service changes nothing",
    ),
    Metric(name="embq_run_tokens_total", kind="counter", labels=("run",), meaning="tokens of the committed units"),
    Metric(
        name="embq_run_rows_expected",
        kind="gauge",
        labels=("run",),
        meaning="samples of the run, estimated until all are done; absent before the first unit is",
    ),
    Metric(name="embq_run_failures", kind="gauge", labels=("run",), meaning="committed failures; fewer after a retry"),
    Metric(
        name="embq_run_truncated",
        kind="gauge",
        labels=("run",),
        meaning="texts of which only the beginning was embedded",
    ),
    Metric(
        name="embq_run_rows_per_second",
        kind="gauge",
        labels=("run",),
        meaning="committed rows by the time from the first unit to the last commit",
    ),
    Metric(
        name="embq_run_eta_seconds",
        kind="gauge",
        labels=("run",),
        meaning="until the last commit; absent where that cannot be predicted yet",
    ),
    Metric(
        name="embq_run_limit", kind="gauge", labels=("run", "limit"), meaning="1 for the word that says what limits it"
    ),
    Metric(name="embq_run_results", kind="gauge", labels=("run",), meaning="results that wait for the writer"),
    Metric(
        name="embq_run_results_limit", kind="gauge", labels=("run",), meaning="at most so many may; then workers wait"
    ),
    Metric(
        name="embq_run_result_bytes",
        kind="gauge",
        labels=("run",),
        meaning="their size, in the broker and in staging files together",
    ),
    Metric(name="embq_run_result_limit_bytes", kind="gauge", labels=("run",), meaning="at most so much may wait"),
    Metric(
        name="embq_run_oldest_unit_seconds",
        kind="gauge",
        labels=("run",),
        meaning="since the unit was begun that has been in flight for longest; 0 where none is",
    ),
    Metric(
        name="embq_run_commit_age_seconds",
        kind="gauge",
        labels=("run",),
        meaning="since the last commit, or since the run was opened",
    ),
)

WRITER = (
    Metric(name="embq_writer_runs", kind="gauge", meaning="runs that are open"),
    Metric(
        name="embq_writer_runs_refused",
        kind="gauge",
        meaning="runs whose folder cannot be used now, or lies outside of `EMBQ_OUTPUTS`",
    ),
    Metric(
        name="embq_writer_epoch",
        kind="gauge",
        labels=("run",),
        meaning="which writer of the run this is, counted from 1",
    ),
    Metric(
        name="embq_writer_commits_total",
        kind="counter",
        meaning="commit records with rows or failures, since the writer was started, as all totals below",
    ),
    Metric(name="embq_writer_parts_total", kind="counter", meaning="files that they name"),
    Metric(name="embq_writer_rows_total", kind="counter", meaning="rows in them"),
    Metric(name="embq_writer_failures_total", kind="counter", meaning="failures in them"),
    Metric(name="embq_writer_bytes_total", kind="counter", meaning="bytes of these files"),
    Metric(name="embq_writer_commit_seconds", kind="histogram", meaning="one commit: files, sync, record"),
    Metric(
        name="embq_writer_rejected_total",
        kind="counter",
        labels=("code",),
        meaning="results that were refused; their units run again",
    ),
    Metric(
        name="embq_writer_buffered_rows",
        kind="gauge",
        labels=("run",),
        meaning="rows that are gathered for the next part",
    ),
    Metric(name="embq_writer_buffered_bytes", kind="gauge", labels=("run",), meaning="their size"),
    Metric(
        name="embq_writer_output_free_bytes",
        kind="gauge",
        labels=("run",),
        meaning="room on the file system of the output; absent for object stores",
    ),
)

WORKER = (
    Metric(
        name="embq_slots",
        kind="gauge",
        labels=("device", "state"),
        meaning="places for a process: `starting`, `idle`, `loading` a model, `serving` it, `given_up`, `over`",
    ),
    Metric(
        name="embq_slot_deaths_total",
        kind="counter",
        labels=("device", "status"),
        meaning="processes that ended by themselves: exit status, minus the signal, or `stuck`",
    ),
    Metric(
        name="embq_slot_rows_total",
        kind="counter",
        labels=("device",),
        meaning="samples that were embedded, by what the processes last reported; exact are those of the producer",
    ),
    Metric(name="embq_slot_units_total", kind="counter", labels=("device",), meaning="units that were handed over"),
    Metric(
        name="embq_slot_stage_seconds_total",
        kind="counter",
        labels=("device", "stage", "state"),
        meaning="seconds that a stage was `busy`, `starved` or `blocked`",
    ),
    Metric(
        name="embq_slot_model_info",
        kind="gauge",
        labels=("device", "model"),
        meaning="processes that have a model loaded",
    ),
    Metric(
        name="embq_slot_model_load_seconds",
        kind="gauge",
        labels=("device",),
        meaning="what loading it took, the slowest of the device",
    ),
    Metric(
        name="embq_gpu_busy_ratio",
        kind="gauge",
        labels=("gpu", "device_name"),
        meaning="part of the time in which it computed, by NVML; these five need `nvidia-ml-py`",
    ),
    Metric(name="embq_gpu_memory_used_bytes", kind="gauge", labels=("gpu", "device_name"), meaning="of all programs"),
    Metric(name="embq_gpu_memory_total_bytes", kind="gauge", labels=("gpu", "device_name"), meaning="that it has"),
    Metric(name="embq_gpu_power_watts", kind="gauge", labels=("gpu", "device_name"), meaning="that it draws"),
    Metric(name="embq_gpu_celsius", kind="gauge", labels=("gpu", "device_name"), meaning="its temperature"),
)

METRICS: dict[Role, tuple[Metric, ...]] = {
    "producer": (*EVERY_ROLE, *PRODUCER),
    "writer": (*EVERY_ROLE, *WRITER),
    "worker": (*EVERY_ROLE, *WORKER),
}
"""Every metric by role, in the order of docs/reference/metrics.md, which has the same list."""


@dataclass(slots=True)
class Histogram:
    """Distribution of durations in seconds. For one counting thread.

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
        """(upper bound, count of values up to it), in Prometheus' form; the last one counts all."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return [(name, float(sum(self._counts[: i + 1]))) for i, name in enumerate(names)]


class MetricSamples:
    """Samples of one scrape. A metric without a sample is left out.

    Args:
        role: the role whose metrics may be put.
    """

    def __init__(self, role: Role) -> None:
        self._metrics = {metric.name: metric for metric in METRICS[role]}
        self._read: dict[str, dict[tuple[str, ...], float | Histogram]] = {}

    def put(self, name: str, value: float | Histogram, *labels: str) -> None:
        """Set the value of a metric of this role for the values of its labels."""
        metric = self._metrics[name]
        if len(labels) != len(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, not {labels}")
        self._read.setdefault(name, {})[labels] = value

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to the value of a metric."""
        before = self._read.get(name, {}).get(labels, 0.0)
        assert not isinstance(before, Histogram)
        self.put(name, before + value, *labels)

    def families(self) -> Iterator[Family]:
        """The samples as families of prometheus_client, in the order of the list."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, metric in self._metrics.items():
            if name not in self._read:
                continue
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.meaning, labels=metric.labels)
                for labels, spread in self._read[name].items():
                    assert isinstance(spread, Histogram)
                    histogram.add_metric(labels, spread.buckets(), spread.sum)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.meaning, labels=metric.labels)
            for labels, value in self._read[name].items():
                assert not isinstance(value, Histogram)
                family.add_metric(labels, value)
            yield family

    def text(self) -> bytes:
        """The samples in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(self))
        return generate_latest(registry)


class _Once:
    """Collector for one exposition."""

    def __init__(self, readings: MetricSamples) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Family]:
        yield from self._readings.families()

    def describe(self) -> Sequence[Family]:
        return ()


Collector = Callable[[MetricSamples], None]
"""Puts samples of a service. It may raise redis.exceptions.RedisError where the broker is unreachable; the samples put
before are kept."""
