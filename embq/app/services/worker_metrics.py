"""Prometheus metrics of one worker supervisor: processes, models, stages and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import redis

from embq.core.queue.heartbeats import STATES, WORKER_REPORTS, WorkerReport
from embq.core.service.health import single_try_client
from embq.core.service.metrics import MetricSamples
from embq.worker.supervisor.devices import handles, nvml, text_of
from embq.worker.supervisor.supervisor import Supervisor

GPU_QUERIES: dict[str, Callable[[Any, Any], float]] = {
    "embq_gpu_busy_ratio": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "embq_gpu_memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "embq_gpu_memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "embq_gpu_power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "embq_gpu_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
}
"""Metric -> its NVML query."""


class GpuMetrics:
    """Metrics of every GPU of the driver, used by workers or not; see `embq.core.service.metrics.WORKER`.

    NVML creates no CUDA context, so it takes no memory of a GPU.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[tuple[str, str, Any]] | None = None

    def __call__(self, samples: MetricSamples) -> None:
        """Put all; metrics that a GPU does not support are left out."""
        if self._gpus is None:
            self._nvml, self._gpus = nvml(), []
            if self._nvml is not None:
                with suppress(self._nvml.NVMLError):
                    self._gpus = [
                        (str(number), text_of(self._nvml.nvmlDeviceGetName(gpu)), gpu)
                        for number, gpu in handles(self._nvml)
                    ]
        for number, name, gpu in self._gpus:
            for metric, query in GPU_QUERIES.items():
                with suppress(self._nvml.NVMLError):
                    samples.put(metric, query(self._nvml, gpu), number, name)


ANSWER_S = 2.0
Series = tuple[str, ...]
"""Name of a counter, then its labels."""


class CounterTotals:
    """Totals of counters of processes that come and go, and that restart at 0 with each model."""

    def __init__(self) -> None:
        self._total: Counter[Series] = Counter()
        self._last: dict[tuple[str, Series], float] = {}

    def read(self, process: str, series: Series, value: float) -> None:
        """Record the present value of a process's counter."""
        previous = self._last.get((process, series), 0.0)
        self._last[process, series] = value
        self._total[series] += cast("int", value - previous if value >= previous else value)

    def keep(self, processes: set[str]) -> None:
        """Drop the last values of processes that are gone; totals stay."""
        self._last = {key: value for key, value in self._last.items() if key[0] in processes}

    def put(self, samples: MetricSamples) -> None:
        """Put all totals."""
        for (name, *labels), total in self._total.items():
            samples.put(name, total, *labels)


class WorkerMetrics:
    """Reads a supervisor and what its processes report to the broker; see `embq.core.service.metrics.WORKER`.

    Args:
        client: leads to the broker. A client of its own is made of it, which does not wait while it is unreachable.
    """

    def __init__(self, supervisor: Supervisor, client: redis.Redis) -> None:
        self._supervisor = supervisor
        self._client = single_try_client(client, answer_s=ANSWER_S)
        self._totals = CounterTotals()

    def __call__(self, samples: MetricSamples) -> None:
        """Put all; raises redis.exceptions.RedisError if the broker is unreachable, after metrics that need none."""
        slots = list(self._supervisor.slots)
        counts = Counter((slot.device, slot.doing) for slot in slots)
        for device in {slot.device for slot in slots}:
            for state in STATES:
                samples.put("embq_slots", counts[device, state], device, state)
        for (device, status), deaths in dict(self._supervisor.deaths).items():
            samples.put("embq_slot_deaths_total", deaths, device, status)
        try:
            self._put_reports(samples, {slot.name: slot.device for slot in slots if slot.process and slot.name})
        finally:
            self._totals.put(samples)

    def _put_reports(self, samples: MetricSamples, devices: dict[str, str]) -> None:
        models: Counter[tuple[str, str]] = Counter()
        load_s: dict[str, float] = {}
        for name, report in WORKER_REPORTS.reports(self._client, devices).items():
            device = devices[name]
            for series, value in _counters(device, report):
                self._totals.read(name, series, value)
            if model := str(report.get("model") or ""):
                models[device, model] += 1
            load_s[device] = max(load_s.get(device, 0.0), float(report.get("load_s") or 0.0))
        for labels, count in models.items():
            samples.put("embq_slot_model_info", count, *labels)
        for device, seconds in load_s.items():
            samples.put("embq_slot_model_load_seconds", seconds, device)
        self._totals.keep(set(devices))


def _counters(device: str, report: WorkerReport) -> Iterator[tuple[Series, float]]:
    yield ("embq_slot_rows_total", device), report.get("rows", 0)
    yield ("embq_slot_units_total", device), report.get("units", 0)
    for stage, states in report["attribution"].get("spent", {}).items() if "attribution" in report else ():
        for state, seconds in states.items():
            yield ("embq_slot_stage_seconds_total", device, stage, state), seconds
