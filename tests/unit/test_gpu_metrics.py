"""GPUs in the metrics, with a library that stands in for NVML: the machines of the tests have none."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from core.service.metrics import MetricSamples
from embq.services.worker_metrics import GpuMetrics
from tests.support.fakes.nvml import Card, NVMLError, fake_nvml


def read(meter: GpuMetrics) -> list[str]:
    readings = MetricSamples("worker")
    meter(readings)
    return [line for line in readings.text().decode().splitlines() if line.startswith("embq_gpu")]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One GPU that does not tell its power."""
    library = fake_nvml(Card(bytes=2**36))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_what_a_gpu_tells_is_told(nvml: ModuleType) -> None:
    meter = GpuMetrics()
    assert read(meter) == [
        'embq_gpu_busy_ratio{device_name="NVIDIA H100",gpu="0"} 0.93',
        'embq_gpu_memory_used_bytes{device_name="NVIDIA H100",gpu="0"} 1.073741824e+09',
        'embq_gpu_memory_total_bytes{device_name="NVIDIA H100",gpu="0"} 6.8719476736e+10',
        'embq_gpu_celsius{device_name="NVIDIA H100",gpu="0"} 61.0',
    ]
    assert len(read(meter)) == 4


def test_without_the_library_or_the_driver_nothing_is_told(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    assert read(GpuMetrics()) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read(GpuMetrics()) == []
