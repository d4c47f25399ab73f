"""Every metric of the services, in one table by role, and the samples of one scrape.

A service keeps plain numbers; collectors put them into `MetricSamples` for each scrape. `embq serve`, whose requests
count in many threads, keeps its own in prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Literal

Role = Literal["producer", "writer", "worker", "serve"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Labels never hold keys, texts, URLs or ids of units.

    Attributes:
        name: with its unit; of a counter with `_total`.
        labels: their names, in the order in which values are given.
        meaning: for Prometheus and docs/reference/metrics.md.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str


# A line of the table: name, meaning, and the names of the labels.


def _counter(name: str, meaning: str, labels: str = "") -> Metric:
    return Metric(name, "counter", tuple(labels.split()), meaning)


def _gauge(name: str, meaning: str, labels: str = "") -> Metric:
    return Metric(name, "gauge", tuple(labels.split()), meaning)


def _histogram(name: str, meaning: str, labels: str = "") -> Metric:
    return Metric(name, "histogram", tuple(labels.split()), meaning)


EVERY_SERVICE = (
    _gauge("embq_build_info", "1", "role version"),
    _counter("embq_malformed_total", "malformed broker or folder entries skipped", "what"),
)

PRODUCER = (
    _gauge("embq_broker_up", "1 if the broker answered; else 0, without the metrics below"),
    _gauge("embq_broker_memory_bytes", "memory of the broker"),
    _gauge("embq_broker_memory_limit_bytes", "its `maxmemory`; absent without one"),
    _gauge("embq_services", "reporting producers, writers and worker supervisors", "role"),
    _gauge("embq_machines", "reporting machines with workers"),
    _gauge("embq_devices", "process slots, by the states of `embq_slots`", "state"),
    _gauge("embq_workers", "worker processes by model; 0 with an empty model if none", "model"),
    _gauge("embq_worker_rows_per_second", "speed of one process over its last 20 s", "worker host device device_name"),
    _gauge("embq_worker_stage_share", "share of the last 10 s: `busy`, `starved` or `blocked`", "worker stage state"),
    _gauge("embq_worker_limit", "1 for the bottleneck", "worker limit"),
    _gauge("embq_worker_units_held", "leased units", "worker"),
    _gauge("embq_uploads", "runs being uploaded"),
    _gauge("embq_queue_hints", "queued hints: a few seconds of work, not the whole run", "model"),
    _gauge("embq_work_left_seconds", "time of one worker process for the rest of all runs; 1 per unit until measured"),
    _gauge("embq_runs", "`running`, `paused`, `cancelled`, `done`, or `waiting` for a writer", "state"),
    _gauge(
        "embq_run_info",
        "1; `name` is the end of the output path. Run metrics stay for 10 minutes after its end",
        "run name model state",
    ),
    _gauge("embq_run_units", "`done`, `received` (not committed), `in_flight`, `queued`, `quarantined`", "run state"),
    _counter("embq_run_rows_total", "committed rows, unaffected by restarts", "run"),
    _counter("embq_run_tokens_total", "committed tokens", "run"),
    _gauge("embq_run_rows_expected", "samples, estimated until the end; absent before the first unit is done", "run"),
    _gauge("embq_run_failures", "committed failures; fewer after a retry", "run"),
    _gauge("embq_run_truncated", "texts cut to the model's length", "run"),
    _gauge("embq_run_rows_per_second", "rate from first unit to last commit", "run"),
    _gauge("embq_run_eta_seconds", "time to the last commit; absent until predictable", "run"),
    _gauge("embq_run_limit", "1 for the bottleneck", "run limit"),
    _gauge("embq_run_results", "results waiting for the writer", "run"),
    _gauge("embq_run_results_limit", "their limit, at which workers wait", "run"),
    _gauge("embq_run_result_bytes", "their size, in broker and staging files", "run"),
    _gauge("embq_run_result_limit_bytes", "limit of their size", "run"),
    _gauge("embq_run_oldest_unit_seconds", "age of the oldest unit in flight; 0 if none", "run"),
    _gauge("embq_run_commit_age_seconds", "time since the last commit or the opening", "run"),
)

WRITER = (
    _gauge("embq_writer_runs", "open runs"),
    _gauge("embq_writer_runs_refused", "runs with an unusable folder, or outside `EMBQ_OUTPUTS`"),
    _gauge("embq_writer_epoch", "number of this writer in the run, from 1", "run"),
    _counter("embq_writer_commits_total", "commit records with rows or failures; totals count from the writer's start"),
    _counter("embq_writer_parts_total", "files in them"),
    _counter("embq_writer_rows_total", "rows in them"),
    _counter("embq_writer_failures_total", "failures in them"),
    _counter("embq_writer_bytes_total", "bytes of the files"),
    _histogram("embq_writer_commit_seconds", "duration of a commit: files, sync, record"),
    _counter("embq_writer_rejected_total", "refused results; their units run again", "code"),
    _gauge("embq_writer_buffered_rows", "rows buffered for the next part", "run"),
    _gauge("embq_writer_buffered_bytes", "their size", "run"),
    _gauge("embq_writer_output_free_bytes", "free space of the output; absent for object stores", "run"),
)

WORKER = (
    _gauge("embq_slots", "process slots: `starting`, `idle`, `loading`, `serving`, `given_up`, `over`", "device state"),
    _counter(
        "embq_slot_deaths_total", "processes that died: exit status, minus the signal, or `stuck`", "device status"
    ),
    _counter("embq_slot_rows_total", "embedded samples as last reported; the producer's count is exact", "device"),
    _counter("embq_slot_units_total", "units published", "device"),
    _counter("embq_slot_stage_seconds_total", "time `busy`, `starved` or `blocked`", "device stage state"),
    _gauge("embq_slot_model_info", "processes with this model loaded", "device model"),
    _gauge("embq_slot_model_load_seconds", "slowest load on the device", "device"),
    _gauge("embq_gpu_busy_ratio", "busy share, by NVML; GPU metrics need `nvidia-ml-py`", "gpu device_name"),
    _gauge("embq_gpu_memory_used_bytes", "used by all programs", "gpu device_name"),
    _gauge("embq_gpu_memory_total_bytes", "total", "gpu device_name"),
    _gauge("embq_gpu_power_watts", "power", "gpu device_name"),
    _gauge("embq_gpu_celsius", "temperature", "gpu device_name"),
)

SERVE = (
    _counter("embq_http_requests_total", "answers; `route` is `other` for paths that are not served", "route status"),
    _histogram(
        "embq_http_request_seconds", "from the first byte of a request to the whole answer, waiting included", "route"
    ),
    _gauge("embq_http_in_flight", "requests that are being answered"),
    _histogram(
        "embq_search_seconds",
        "a step of `/knn-service` or `/search`: `fetch` an image by its URL, `embed` the query, `filter`, `knn`, "
        "`duplicates`, `rows`",
        "step",
    ),
    _gauge("embq_index_rows", "rows that can be found", "index modality"),
    _gauge("embq_index_info", "1 for the version that is searched", "index modality version"),
    _counter(
        "embq_index_reloads_total",
        "new versions that were taken up (`done`) or could not be opened (`failed`)",
        "index modality result",
    ),
    _gauge("embq_model_ready", "1 once the model can embed queries", "model"),
    _counter("embq_embeddings_texts_total", "texts that were embedded", "model"),
    _counter("embq_embeddings_tokens_total", "tokens of these texts", "model"),
    _counter(
        "embq_embeddings_truncated_total",
        "texts longer than the model reads, of which only the beginning was embedded",
        "model",
    ),
    _gauge("embq_embeddings_waiting_tokens", "tokens of requests that are not answered yet", "model"),
    _histogram("embq_embeddings_pass_rows", "texts of one forward pass", "model"),
)


METRICS: dict[Role, tuple[Metric, ...]] = {
    "producer": (*EVERY_SERVICE, *PRODUCER),
    "writer": (*EVERY_SERVICE, *WRITER),
    "worker": (*EVERY_SERVICE, *WORKER),
    "serve": SERVE,
}
"""Every metric by role, in the order of docs/reference/metrics.md."""


@dataclass(slots=True)
class Histogram:
    """Distribution of durations in seconds. For one counting thread.

    That of prometheus_client takes 30 ms to import, in every `embq run`.

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
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        """Its samples in Prometheus' text format: of each bound the count of values up to it, the last one all."""
        counts = [*map(float, accumulate(self._counts))]
        bounds = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        buckets = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
        return [*buckets, f"{name}_count {counts[-1]}", f"{name}_sum {float(self.sum)}"]


class MetricSamples:
    """Samples of one scrape. A metric without a sample is left out.

    Args:
        role: the role whose metrics may be put.
    """

    def __init__(self, role: Role) -> None:
        self._metrics = {metric.name: metric for metric in METRICS[role]}
        self._samples: dict[str, dict[tuple[str, ...], float | Histogram]] = defaultdict(dict)

    def put(self, name: str, value: float | Histogram, *labels: str) -> None:
        """Set the value of a metric of this role for the values of its labels."""
        metric = self._metrics[name]
        if len(labels) != len(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, not {labels}")
        self._samples[name][labels] = value

    def text(self) -> bytes:
        """The samples in Prometheus' text format, in the order of the table.

        prometheus_client takes ten times as long, which counts for the samples of a thousand workers.
        """
        lines, escaped = [], cache(_escaped)
        for name, metric in self._metrics.items():
            if name not in self._samples:
                continue
            lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {metric.kind}"]
            labels_format = ",".join(f'{label}="%s"' for label in metric.labels)
            line_format = f"{name}{{{labels_format}}} %r" if labels_format else f"{name} %r"
            for labels, value in self._samples[name].items():
                if isinstance(value, Histogram):
                    lines += value.lines(name)
                else:
                    lines.append(line_format % (*map(escaped, labels), float(value)))
        return "\n".join([*lines, ""]).encode(errors="replace")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


Collector = Callable[[MetricSamples], None]
"""Puts samples of a service. It may raise redis.exceptions.RedisError if the broker is unreachable; the samples put
before are kept."""
