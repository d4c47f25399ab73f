"""GPUs in the metrics, with a library that stands in for NVML: the machines of the tests have none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from core.readings import Readings
from embq.metering.gpus import GpuMeter


def read(meter: GpuMeter) -> list[str]:
    readings = Readings("worker")
    meter(readings)
    return [line for line in readings.text().decode().splitlines() if line.startswith("embq_gpu")]


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One GPU that does not tell its power, as those in virtual machines."""

    def refuse(_gpu: object) -> float:
        raise NVMLError

    library = ModuleType("pynvml")
    library.__dict__.update(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: f"gpu{number}",
        nvmlDeviceGetName=lambda _gpu: b"NVIDIA H100",
        nvmlDeviceGetUtilizationRates=lambda _gpu: SimpleNamespace(gpu=93),
        nvmlDeviceGetMemoryInfo=lambda _gpu: SimpleNamespace(used=2**30, total=2**36),
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetTemperature=lambda _gpu, _sensor: 61,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_what_a_gpu_tells_is_told(nvml: ModuleType) -> None:
    meter = GpuMeter()
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
    assert read(GpuMeter()) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read(GpuMeter()) == []
