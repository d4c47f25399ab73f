"""Prometheus metrics of one worker supervisor: processes, models, stages and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import redis

from embq.core.queue.heartbeats import STATES, WORKER_REPORTS, WorkerReport
from embq.core.service.health import single_try_client
from embq.core.service.metrics import MetricSamples
from embq.worker.supervisor.devices import handles, nvml, text_of
from embq.worker.supervisor.slot import Slot
from embq.worker.supervisor.supervisor import Supervisor

FIGURES: tuple[tuple[str, Callable[[Any, Any], float]], ...] = (
    ("embq_gpu_busy_ratio", lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
    ("embq_gpu_memory_used_bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ("embq_gpu_memory_total_bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ("embq_gpu_power_watts", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    ("embq_gpu_celsius", lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
)
"""Metric -> its NVML query."""


class GpuMetrics:
    """Metrics of every GPU of the driver, used by workers or not; see `embq.core.service.metrics.WORKER`.

    NVML creates no CUDA context, so it takes no memory of a GPU.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[tuple[str, str, Any]] | None = None

    def __call__(self, readings: MetricSamples) -> None:
        """Read all; metrics that a GPU does not support are left out."""
        if self._gpus is None:
            self._gpus = self._find()
        for number, name, gpu in self._gpus:
            for metric, read in FIGURES:
                with suppress(self._nvml.NVMLError):
                    readings.put(metric, read(self._nvml, gpu), number, name)

    def _find(self) -> list[tuple[str, str, Any]]:
        """(number, name, handle) of each GPU; none without the binding or the driver."""
        self._nvml = library = nvml()
        if library is None:
            return []
        with suppress(library.NVMLError):
            return [
                (str(number), text_of(library.nvmlDeviceGetName(handle)), handle) for number, handle in handles(library)
            ]
        return []


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
        before = self._last.get((process, series), 0.0)
        self._last[process, series] = value
        self._total[series] += cast("int", value - before if value >= before else value)

    def keep(self, processes: set[str]) -> None:
        """Drop the last values of processes that are gone; totals stay."""
        self._last = {key: value for key, value in self._last.items() if key[0] in processes}

    def put(self, readings: MetricSamples) -> None:
        """Put all totals."""
        for (name, *labels), total in self._total.items():
            readings.put(name, total, *labels)


class WorkerMetrics:
    """Reads a supervisor and what its processes report to the broker; see `embq.core.service.metrics.WORKER`.

    Args:
        client: leads to the broker. A client of its own is made of it, which does not wait for one that is away.
    """

    def __init__(self, supervisor: Supervisor, client: redis.Redis) -> None:
        self._supervisor = supervisor
        self._client = single_try_client(client, answer_s=ANSWER_S)
        self._odometer = CounterTotals()

    def __call__(self, readings: MetricSamples) -> None:
        """Read all; raises redis.exceptions.RedisError where the broker is away, after metrics that need none."""
        slots = list(self._supervisor.slots)
        put_slots(readings, slots)
        for (device, status), deaths in dict(self._supervisor.deaths).items():
            readings.put("embq_slot_deaths_total", deaths, device, status)
        try:
            self._read_reports(readings, {slot.name: slot.device for slot in slots if slot.process is not None})
        finally:
            self._odometer.put(readings)

    def _read_reports(self, readings: MetricSamples, devices: Mapping[str, str]) -> None:
        names = [name for name in devices if name]
        load_s: dict[str, float] = {}
        for name, report in WORKER_REPORTS.reports(self._client, names).items():
            device = devices[name]
            self._count(name, device, report)
            if model := str(report.get("model") or ""):
                readings.add("embq_slot_model_info", 1, device, model)
            load_s[device] = max(load_s.get(device, 0.0), float(report.get("load_s") or 0.0))
        for device, seconds in load_s.items():
            readings.put("embq_slot_model_load_seconds", seconds, device)
        self._odometer.keep(set(names))

    def _count(self, name: str, device: str, report: WorkerReport) -> None:
        for what, count in (("rows", report.get("rows", 0)), ("units", report.get("units", 0))):
            self._odometer.read(name, (f"embq_slot_{what}_total", device), float(count))
        for stage, states in report["attribution"].get("spent", {}).items() if "attribution" in report else ():
            for state, seconds in states.items():
                self._odometer.read(name, ("embq_slot_stage_seconds_total", device, stage, state), float(seconds))


def put_slots(readings: MetricSamples, slots: Sequence[Slot]) -> None:
    """Numbers of processes by device and state."""
    for device in {slot.device for slot in slots}:
        for state in STATES:
            readings.put("embq_slots", sum(s.device == device and s.doing == state for s in slots), device, state)
