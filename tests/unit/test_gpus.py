"""GPUs and their metrics without CUDA, named as CUDA would show them; a machine that shows none says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from embq.app.services.worker_metrics import GpuMetrics
from embq.core.errors import Exit, NoDeviceError, UsageError
from embq.core.service.metrics import MetricSamples
from embq.worker.supervisor import devices
from embq.worker.supervisor.devices import (
    Gpu,
    find_devices,
    find_gpus,
    isolated_device,
    no_gpu,
    why_no_gpu,
)
from tests.support.fakes.nvml import GIB, Card, NVMLError, fake_nvml

H100 = Card(name="NVIDIA H100 80GB HBM3", uuid="GPU-aaaa-1")
L4 = Card(name="NVIDIA L4", uuid="GPU-bbbb-2", capability=(8, 9), bytes=24 * GIB)
K80 = Card(name="Tesla K80", uuid="GPU-bcbc-3", capability=(3, 7), bytes=12 * GIB)
SMALL, LARGE = (
    Card(name=f"NVIDIA A100 MIG {kind}", uuid=uuid, bytes=size * GIB)
    for kind, uuid, size in (("1g.10gb", "MIG-1111", 10), ("3g.40gb", "MIG-2222", 40))
)
DIVIDED = Card(name="NVIDIA A100", uuid="GPU-cccc-4", capability=(8, 0), instances=(SMALL, None, LARGE))


def show(monkeypatch: pytest.MonkeyPatch, *cards: Card) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*cards))


def visible(cuda_visible: str | None) -> list[str]:
    return [gpu.visible for gpu in find_gpus(cuda_visible)]


def test_each_gpu_has_a_number_and_what_shows_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, H100, L4)
    assert find_gpus(None) == (
        Gpu(number=0, visible="GPU-aaaa-1", name=H100.name, capability=(9, 0), memory_bytes=80 * GIB),
        Gpu(number=1, visible="GPU-bbbb-2", name="NVIDIA L4", capability=(8, 9), memory_bytes=24 * GIB),
    )
    assert [(gpu.number, gpu.name) for gpu in find_gpus("1,0")] == [(0, "NVIDIA L4"), (1, H100.name)]


@pytest.mark.parametrize(
    ("cuda_visible", "shown"),
    [
        ("2,0", [K80, H100]),
        ("0,-1,1", [H100]),  # what stands behind an invalid token is ignored
        ("0,7,1", [H100]),
        ("0,,1", [H100]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,0", []),  # CUDA refuses a device that is named twice
        ("1,GPU-bbbb-2", []),
        ("1gpu, 2", [L4, K80]),  # CUDA reads the digits in front
        ("GPU-bb", [L4]),
        ("GPU-bbbb-2,GPU-aaaa-1", [L4, H100]),
        ("GPU-b", []),  # two begin so
        ("GPU-b,0", []),
        ("GPU-aaaa,GPU-zzzz,GPU-bb", [H100]),
        ("bbbb", []),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, cuda_visible: str, shown: list[Card]
) -> None:
    show(monkeypatch, H100, L4, K80)
    assert visible(cuda_visible) == [card.uuid for card in shown]


def test_each_instance_of_a_divided_gpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, L4, DIVIDED)
    assert visible(None) == ["GPU-bbbb-2", "MIG-1111", "MIG-2222"]
    assert visible("1") == visible("GPU-cccc") == visible("MIG-1111,MIG-2222") == ["MIG-1111", "MIG-2222"]
    assert visible("MIG-2") == ["MIG-2222"]
    assert visible("MIG-2,1") == []  # once by itself, once with its card
    assert find_gpus("MIG-2222") == (
        Gpu(number=0, visible="MIG-2222", name="NVIDIA A100 MIG 3g.40gb", capability=(8, 0), memory_bytes=40 * GIB),
    )


def test_a_gpu_that_this_process_may_not_use_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, Card(refused=True), L4)
    assert visible(None) == visible("0") == ["GPU-bbbb-2"]


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_does_not_answer_shows_no_gpu(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail() -> Any:
        raise NVMLError

    show(monkeypatch, H100)
    monkeypatch.setattr(sys.modules["pynvml"], failing, fail)
    monkeypatch.setattr(devices, "DRIVER", Path("/nowhere"))
    assert find_gpus(None) == ()


def test_what_nvml_does_not_tell_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise NVMLError

    show(monkeypatch, H100)
    for name in ("Name", "CudaComputeCapability", "MemoryInfo", "MigMode"):
        monkeypatch.setattr(sys.modules["pynvml"], f"nvmlDeviceGet{name}", refuse)
    assert find_gpus(None) == (Gpu(number=0, visible="GPU-aaaa-1", name="", capability=None, memory_bytes=0),)


@pytest.mark.parametrize("cuda_visible", [None, "2,0"])
def test_where_nvml_is_not_torch_is_asked_with_the_same_visible_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda_visible: str | None
) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(devices, "WITHOUT_NVML", {tmp_path / "kfd": "an AMD GPU"})
    # A torch that shows two devices, as that of ROCm: the program that asks it is the real one.
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as N\n"
        "version = N(hip='6.2')\n"
        "cuda = N(device_count=lambda: 2, get_device_properties=lambda i: of(i))\n"
        "def of(i): return N(name=f'MI{i}', total_memory=7, gcnArchName='gfx942:xnack-')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    devices._asked_of_torch.cache_clear()
    first, second = find_gpus(cuda_visible)
    names = ("0", "1") if cuda_visible is None else ("2", "0")
    assert (first.number, first.visible, first.name, first.memory_bytes) == (0, names[0], "MI0", 7)
    assert (first.capability, first.architecture) == (None, "gfx942:xnack-")
    assert (second.number, second.visible, second.name) == (1, names[1], "MI1")


def test_a_torch_that_cannot_be_asked_shows_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    devices._asked_of_torch.cache_clear()
    assert devices._asked_of_torch(None) == ()
    devices._asked_of_torch.cache_clear()


def test_without_a_gpu_each_cause_has_its_own_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver, root = tmp_path / "version", tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(devices, "find_gpus", lambda _: ())

    def why(cuda_visible: str | None = None) -> str:
        return " | ".join(why_no_gpu(cuda_visible, driver=driver, root=root))

    assert "hides them all | unset CUDA_VISIBLE_DEVICES" in why("")
    assert "no NVIDIA driver is loaded" in why("0,1")  # which hides nothing
    assert "install the driver until nvidia-smi" in why()
    (root / ".dockerenv").touch()
    assert "outside of the container" in why()
    driver.touch()
    assert "nvidia-container-toolkit" in why()
    (root / ".dockerenv").unlink()
    assert "run nvidia-smi" in why()
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(devices, "WITHOUT_NVML", {tmp_path / "kfd": "an AMD GPU"})
    assert "an AMD GPU" in why()
    show(monkeypatch, H100, L4)
    monkeypatch.setattr(devices, "find_gpus", find_gpus)
    assert "'7' hides them all" in why("7")
    assert "there are 2" in why("0,0")


@pytest.mark.parametrize("in_container", [True, False])
def test_the_error_names_the_way_to_the_cpu(in_container: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_in_container", lambda root=None: in_container)
    error = no_gpu("")
    assert (error.exit_code, error.code) == (Exit.UNAVAILABLE, "no_device")
    assert ("deploy/docker-compose.cpu.yml" in error.next_step) == in_container
    assert "--devices cpu" in error.next_step


def test_cuda_is_every_visible_device_also_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, H100, L4)
    assert find_devices("cuda", None) == ("cuda:0", "cuda:1")
    assert find_devices("cuda,cpu", "0,1") == ("cuda:0", "cuda:1", "cpu")
    assert find_devices("cuda:1,cuda:1", None) == ("cuda:1", "cuda:1")
    assert find_devices("auto", "1") == ("cuda:0",)
    assert find_devices("auto", "") == ("cpu",)
    assert find_devices("sim:2,cpu", None) == ("sim:2", "cpu")
    with pytest.raises(NoDeviceError, match="hides them all"):
        find_devices("cpu,cuda", "")
    for wanted in ("", ",", "gpu", "cuda:x"):
        with pytest.raises(UsageError):
            find_devices(wanted, "0")


def test_a_gpu_that_is_not_here_is_told_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, H100, L4)
    there = r"no cuda:5 here, only cuda:0 \(NVIDIA H100 80GB HBM3\), cuda:1 \(NVIDIA L4\)"
    with pytest.raises(NoDeviceError, match=there):
        find_devices("cuda:0,cuda:5", None)
    with pytest.raises(NoDeviceError, match="no cuda:1 here, only cuda:0"):
        find_devices("cuda:1", "1")
    with pytest.raises(NoDeviceError, match="hides them all"):
        find_devices("cuda:0", "-1")


def test_a_process_of_ours_that_computes_on_a_gpu_sees_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, H100, L4)
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert isolated_device("cuda:1", None) == isolated_device("cuda:0", "1") == ("cuda:0", environment)
    assert isolated_device("cpu", None) == ("cpu", {})
    assert isolated_device("cuda:7", None) == ("cuda:7", {})  # which is an error when it is used


def test_finding_gpus_imports_no_torch() -> None:
    asked = (
        "import json, sys; from embq.worker.supervisor.devices import find_gpus; "
        "find_gpus(None); print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert "torch" not in json.loads(done.stdout)


# --- metrics ---


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
        'embq_gpu_busy_ratio{gpu="0",device_name="NVIDIA H100"} 0.93',
        'embq_gpu_memory_used_bytes{gpu="0",device_name="NVIDIA H100"} 1073741824.0',
        'embq_gpu_memory_total_bytes{gpu="0",device_name="NVIDIA H100"} 68719476736.0',
        'embq_gpu_celsius{gpu="0",device_name="NVIDIA H100"} 61.0',
    ]
    assert len(read(meter)) == 4


def test_without_the_library_or_the_driver_nothing_is_told(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    assert read(GpuMetrics()) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read(GpuMetrics()) == []
