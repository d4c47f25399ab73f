"""Metrics of the resident services for Prometheus, by role, and the samples of one scrape.

A service keeps plain numbers; `MetricSamples` reads them for each scrape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

Role = Literal["producer", "writer", "worker"]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. Labels never hold keys, texts, URLs or ids of units.

    Attributes:
        name: with its unit; of a counter with `_total`.
        labels: their names, in the order in which values are given; a histogram has none.
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
        meaning="1",
    ),
    Metric(
        name="embq_malformed_total",
        kind="counter",
        labels=("what",),
        meaning="malformed broker or folder entries skipped",
    ),
)

PRODUCER = (
    Metric(
        name="embq_broker_up",
        kind="gauge",
        meaning="1 if the broker answered; else 0, without the metrics below",
    ),
    Metric(name="embq_broker_memory_bytes", kind="gauge", meaning="memory of the broker"),
    Metric(name="embq_broker_memory_limit_bytes", kind="gauge", meaning="its `maxmemory`; absent without one"),
    Metric(
        name="embq_services",
        kind="gauge",
        labels=("role",),
        meaning="reporting producers, writers and worker supervisors",
    ),
    Metric(name="embq_machines", kind="gauge", meaning="reporting machines with workers"),
    Metric(
        name="embq_devices",
        kind="gauge",
        labels=("state",),
        meaning="process slots, by the states of `embq_slots`",
    ),
    Metric(
        name="embq_workers",
        kind="gauge",
        labels=("model",),
        meaning="worker processes by model; 0 with an empty model if none",
    ),
    Metric(
        name="embq_worker_rows_per_second",
        kind="gauge",
        labels=("worker", "host", "device", "device_name"),
        meaning="speed of one process over its last 20 s",
    ),
    Metric(
        name="embq_worker_stage_share",
        kind="gauge",
        labels=("worker", "stage", "state"),
        meaning="share of the last 10 s: `busy`, `starved` or `blocked`",
    ),
    Metric(
        name="embq_worker_limit",
        kind="gauge",
        labels=("worker", "limit"),
        meaning="1 for the bottleneck",
    ),
    Metric(name="embq_worker_units_held", kind="gauge", labels=("worker",), meaning="leased units"),
    Metric(name="embq_uploads", kind="gauge", meaning="runs being uploaded"),
    Metric(
        name="embq_queue_hints",
        kind="gauge",
        labels=("model",),
        meaning="queued hints: a few seconds of work, not the whole run",
    ),
    Metric(
        name="embq_runs",
        kind="gauge",
        labels=("state",),
        meaning="`running`, `paused`, `cancelled`, `done`, or `waiting` for a writer",
    ),
    Metric(
        name="embq_run_info",
        kind="gauge",
        labels=("run", "name", "model", "state"),
        meaning="1; `name` is the end of the output path. Run metrics stay for 10 minutes after its end",
    ),
    Metric(
        name="embq_run_units",
        kind="gauge",
        labels=("run", "state"),
        meaning="`done`, `received` (not committed), `in_flight`, `queued`, `quarantined`",
    ),
    Metric(
        name="embq_run_rows_total",
        kind="counter",
        labels=("run",),
        meaning="committed rows, unaffected by restarts",
    ),
    Metric(name="embq_run_tokens_total", kind="counter", labels=("run",), meaning="committed tokens"),
    Metric(
        name="embq_run_rows_expected",
        kind="gauge",
        labels=("run",),
        meaning="samples, estimated until the end; absent before the first unit is done",
    ),
    Metric(name="embq_run_failures", kind="gauge", labels=("run",), meaning="committed failures; fewer after a retry"),
    Metric(
        name="embq_run_truncated",
        kind="gauge",
        labels=("run",),
        meaning="texts cut to the model's length",
    ),
    Metric(
        name="embq_run_rows_per_second",
        kind="gauge",
        labels=("run",),
        meaning="rate from first unit to last commit",
    ),
    Metric(
        name="embq_run_eta_seconds",
        kind="gauge",
        labels=("run",),
        meaning="time to the last commit; absent until predictable",
    ),
    Metric(name="embq_run_limit", kind="gauge", labels=("run", "limit"), meaning="1 for the bottleneck"),
    Metric(name="embq_run_results", kind="gauge", labels=("run",), meaning="results waiting for the writer"),
    Metric(name="embq_run_results_limit", kind="gauge", labels=("run",), meaning="their limit, at which workers wait"),
    Metric(
        name="embq_run_result_bytes",
        kind="gauge",
        labels=("run",),
        meaning="their size, in broker and staging files",
    ),
    Metric(name="embq_run_result_limit_bytes", kind="gauge", labels=("run",), meaning="limit of their size"),
    Metric(
        name="embq_run_oldest_unit_seconds",
        kind="gauge",
        labels=("run",),
        meaning="age of the oldest unit in flight; 0 if none",
    ),
    Metric(
        name="embq_run_commit_age_seconds",
        kind="gauge",
        labels=("run",),
        meaning="time since the last commit or the opening",
    ),
)

WRITER = (
    Metric(name="embq_writer_runs", kind="gauge", meaning="open runs"),
    Metric(
        name="embq_writer_runs_refused",
        kind="gauge",
        meaning="runs with an unusable folder, or outside `EMBQ_OUTPUTS`",
    ),
    Metric(
        name="embq_writer_epoch",
        kind="gauge",
        labels=("run",),
        meaning="number of this writer in the run, from 1",
    ),
    Metric(
        name="embq_writer_commits_total",
        kind="counter",
        meaning="commit records with rows or failures; totals count from the writer's start",
    ),
    Metric(name="embq_writer_parts_total", kind="counter", meaning="files in them"),
    Metric(name="embq_writer_rows_total", kind="counter", meaning="rows in them"),
    Metric(name="embq_writer_failures_total", kind="counter", meaning="failures in them"),
    Metric(name="embq_writer_bytes_total", kind="counter", meaning="bytes of the files"),
    Metric(name="embq_writer_commit_seconds", kind="histogram", meaning="duration of a commit: files, sync, record"),
    Metric(
        name="embq_writer_rejected_total",
        kind="counter",
        labels=("code",),
        meaning="refused results; their units run again",
    ),
    Metric(
        name="embq_writer_buffered_rows",
        kind="gauge",
        labels=("run",),
        meaning="rows buffered for the next part",
    ),
    Metric(name="embq_writer_buffered_bytes", kind="gauge", labels=("run",), meaning="their size"),
    Metric(
        name="embq_writer_output_free_bytes",
        kind="gauge",
        labels=("run",),
        meaning="free space of the output; absent for object stores",
    ),
)

WORKER = (
    Metric(
        name="embq_slots",
        kind="gauge",
        labels=("device", "state"),
        meaning="process slots: `starting`, `idle`, `loading`, `serving`, `given_up`, `over`",
    ),
    Metric(
        name="embq_slot_deaths_total",
        kind="counter",
        labels=("device", "status"),
        meaning="processes that died: exit status, minus the signal, or `stuck`",
    ),
    Metric(
        name="embq_slot_rows_total",
        kind="counter",
        labels=("device",),
        meaning="embedded samples as last reported; the producer's count is exact",
    ),
    Metric(name="embq_slot_units_total", kind="counter", labels=("device",), meaning="units published"),
    Metric(
        name="embq_slot_stage_seconds_total",
        kind="counter",
        labels=("device", "stage", "state"),
        meaning="time `busy`, `starved` or `blocked`",
    ),
    Metric(
        name="embq_slot_model_info",
        kind="gauge",
        labels=("device", "model"),
        meaning="processes with this model loaded",
    ),
    Metric(
        name="embq_slot_model_load_seconds",
        kind="gauge",
        labels=("device",),
        meaning="slowest load on the device",
    ),
    Metric(
        name="embq_gpu_busy_ratio",
        kind="gauge",
        labels=("gpu", "device_name"),
        meaning="busy share, by NVML; GPU metrics need `nvidia-ml-py`",
    ),
    Metric(
        name="embq_gpu_memory_used_bytes", kind="gauge", labels=("gpu", "device_name"), meaning="used by all programs"
    ),
    Metric(name="embq_gpu_memory_total_bytes", kind="gauge", labels=("gpu", "device_name"), meaning="total"),
    Metric(name="embq_gpu_power_watts", kind="gauge", labels=("gpu", "device_name"), meaning="power"),
    Metric(name="embq_gpu_celsius", kind="gauge", labels=("gpu", "device_name"), meaning="temperature"),
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

    def lines(self, name: str) -> list[str]:
        """Its samples in Prometheus' text format: of each bound the count of values up to it, the last one all."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        counts = [float(sum(self._counts[: i + 1])) for i in range(len(names))]
        buckets = [f'{name}_bucket{{le="{up_to}"}} {count}' for up_to, count in zip(names, counts, strict=True)]
        return [*buckets, f"{name}_count {counts[-1]}", f"{name}_sum {float(self.sum)}"]


class MetricSamples:
    """Samples of one scrape. A metric without a sample is left out.

    Args:
        role: the role whose metrics may be put.
    """

    def __init__(self, role: Role) -> None:
        self._metrics = {metric.name: metric for metric in METRICS[role]}
        self._read: dict[str, dict[tuple[str, ...], float | Histogram]] = defaultdict(dict)

    def put(self, name: str, value: float | Histogram, *labels: str) -> None:
        """Set the value of a metric of this role for the values of its labels."""
        metric = self._metrics[name]
        if len(labels) != len(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, not {labels}")
        self._read[name][labels] = value

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to the value of a metric."""
        before = self._read[name].get(labels, 0.0)
        assert not isinstance(before, Histogram)
        self.put(name, before + value, *labels)

    def text(self) -> bytes:
        """The samples in Prometheus' text format, in the order of the list.

        By ourselves: prometheus_client takes ten times as long, which counts for the samples of a thousand workers.
        """
        lines, escaped = [], cache(_escaped)
        for name, metric in self._metrics.items():
            if name not in self._read:
                continue
            lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {metric.kind}"]
            form = ",".join(f'{label}="%s"' for label in metric.labels)
            form = f"{name}{{{form}}} %r" if form else f"{name} %r"
            for labels, value in self._read[name].items():
                if isinstance(value, Histogram):
                    lines += value.lines(name)
                else:
                    lines.append(form % (*map(escaped, labels), float(value)))
        return "\n".join([*lines, ""]).encode(errors="replace")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


Collector = Callable[[MetricSamples], None]
"""Puts samples of a service. It may raise redis.exceptions.RedisError where the broker is unreachable; the samples put
before are kept."""
