"""The GPUs of this machine, for Prometheus, where NVIDIA's library and its binding are there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from core.service.metrics import Readings
from worker.supervisor.devices import handles, nvml, text_of

FIGURES: tuple[tuple[str, Callable[[Any, Any], float]], ...] = (
    ("embq_gpu_busy_ratio", lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
    ("embq_gpu_memory_used_bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ("embq_gpu_memory_total_bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ("embq_gpu_power_watts", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    ("embq_gpu_celsius", lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
)
"""Metric -> how NVML is asked for it."""


class GpuMeter:
    """Reads every GPU that the driver shows, whichever of them the workers use; see `core.service.metrics.WORKER`.

    `pynvml` comes with `nvidia-ml-py`. It makes no CUDA context, so it costs no memory of a GPU.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[tuple[str, str, Any]] | None = None

    def __call__(self, readings: Readings) -> None:
        """Read all; what a GPU does not tell is left out."""
        if self._gpus is None:
            self._gpus = self._find()
        for number, name, gpu in self._gpus:
            for metric, read in FIGURES:
                with suppress(self._nvml.NVMLError):
                    readings.put(metric, read(self._nvml, gpu), number, name)

    def _find(self) -> list[tuple[str, str, Any]]:
        """(number, name, handle) of each; none where the binding or the driver is missing."""
        self._nvml = library = nvml()
        if library is None:
            return []
        with suppress(library.NVMLError):
            return [
                (str(number), text_of(library.nvmlDeviceGetName(handle)), handle) for number, handle in handles(library)
            ]
        return []
