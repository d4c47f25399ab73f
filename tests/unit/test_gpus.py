"""GPUs are counted and named without CUDA, and a machine that shows none says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError, Exit, NoDeviceError
from worker import gpus
from worker.daemon import find_devices
from worker.gpus import gpu_count, gpu_names, no_gpu, why_no_gpu

LISTED = "0, GPU-aaaa, NVIDIA H100 80GB HBM3\n1, GPU-bbbb, NVIDIA L4\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name that lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '{LISTED}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def test_gpus_are_those_with_a_device_file_or_those_that_are_left_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_count(None, tmp_path) == 2
    assert gpu_count("1", tmp_path) == 1
    assert [gpu_count(visible, tmp_path) for visible in ("", "-1", " ")] == [0, 0, 0]


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_are_named_in_the_order_of_their_numbers() -> None:
    assert gpu_names(None) == ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]
    assert gpu_names("1,0") == ["NVIDIA L4", "NVIDIA H100 80GB HBM3"]
    assert gpu_names("GPU-bbbb,7") == ["NVIDIA L4", ""]


def test_a_driver_that_does_not_answer_leaves_gpus_without_names(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, because, it, could not'\nexit 9\n")
    assert gpu_names(None) == []


def test_without_a_gpu_each_cause_has_its_own_way_out(tmp_path: Path) -> None:
    driver, root = tmp_path / "nvidia", tmp_path / "root"
    root.mkdir()

    def why(visible: str | None = None) -> str:
        return " | ".join(why_no_gpu(visible, devices=tmp_path, driver=driver, root=root))

    assert "unset CUDA_VISIBLE_DEVICES" in why("")
    assert "install the driver until nvidia-smi" in why()
    (root / ".dockerenv").touch()
    assert "outside of the container" in why()
    driver.mkdir()
    (driver / "version").touch()
    assert "nvidia-container-toolkit" in why()
    (root / ".dockerenv").unlink()
    assert "run nvidia-smi" in why()


@pytest.mark.parametrize("in_container", [True, False])
def test_the_error_names_the_way_to_the_cpu(in_container: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_in_container", lambda root=None: in_container)
    error = no_gpu("")
    assert (error.exit_code, error.code) == (Exit.UNAVAILABLE, "no_device")
    assert ("docker-compose.cpu.yml" in error.next_step) == in_container
    assert ("--devices cpu" in error.next_step) != in_container


def test_cuda_is_every_visible_device_also_in_a_list() -> None:
    assert find_devices("cuda", "0,3") == ("cuda:0", "cuda:1")
    assert find_devices("cuda,cpu", "0,3") == ("cuda:0", "cuda:1", "cpu")
    assert find_devices("auto", "0,3") == ("cuda:0", "cuda:1")
    assert find_devices("auto", "") == ("cpu",)
    with pytest.raises(NoDeviceError, match="hides them all"):
        find_devices("cpu,cuda", "")
    for wanted in ("", ",", "gpu"):
        with pytest.raises(ConfigError):
            find_devices(wanted, "0")
