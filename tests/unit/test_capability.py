"""A build of torch has code for some GPUs; for others a sentence names the build that has."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from embq.core.errors import ConfigError, DeviceError
from embq.worker.embedders.device.capability import check_device, serves

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CUDA_126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


@pytest.mark.parametrize(
    ("archs", "runs", "runs_not"),
    [
        (CUDA_13, [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 1)], [(3, 7), (6, 1), (7, 0), (7, 2), (11, 0)]),
        (CUDA_126, [(5, 2), (6, 1), (7, 0), (8, 9)], [(3, 7), (10, 0), (12, 0)]),
        (("sm_86",), [(8, 6), (8, 9)], [(8, 0)]),
        (("sm_90", "compute_90"), [(9, 0), (12, 0)], [(8, 9)]),
        (("sm_90a", "sm_120f"), [(9, 0), (12, 1)], [(10, 0)]),
        (("sm_100a",), [(10, 0)], [(10, 3)]),
    ],
)
def test_code_runs_on_what_it_is_made_for_and_on_later_ones_of_the_same_kind(
    archs: tuple[str, ...], runs: list[tuple[int, int]], runs_not: list[tuple[int, int]]
) -> None:
    assert [serves(archs, capability) for capability in runs] == [True] * len(runs)
    assert [serves(archs, capability) for capability in runs_not] == [False] * len(runs_not)


def torch_with(
    monkeypatch: pytest.MonkeyPatch, *, archs: tuple[str, ...] = CUDA_13, hip: Any = None, **card: Any
) -> Any:
    """A torch with this code, and one device."""
    properties = SimpleNamespace(**{"name": "NVIDIA X", "major": 9, "minor": 0, **card})
    torch = SimpleNamespace(
        __version__="2.15.0",
        version=SimpleNamespace(cuda=None if hip else "13.2", hip=hip),
        cuda=SimpleNamespace(
            device_count=lambda: 1, get_arch_list=lambda: [*archs], get_device_properties=lambda _: properties
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def refused(device: str = "cuda:0") -> str:
    with pytest.raises(ConfigError) as caught:
        check_device(device)
    return f"{caught.value.message} | {caught.value.next_step}"


def test_a_device_that_torch_serves_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch)
    check_device("cuda:0")
    torch_with(monkeypatch, archs=())  # where it says nothing, trying tells
    check_device("cuda:0")
    monkeypatch.setitem(sys.modules, "torch", None)
    check_device("cuda:0")  # a model that needs torch tells so
    check_device("cpu")


@pytest.mark.parametrize(
    ("name", "capability", "archs", "helps"),
    [
        ("NVIDIA GeForce GTX 1070", (6, 1), CUDA_13, "whl/cu126 'torch>=2.6,<2.15'"),
        ("Tesla V100", (7, 0), CUDA_13, "whl/cu126"),
        ("Tesla K80", (3, 7), CUDA_13, "whl/cu118 torch==2.6.0"),
        ("Tesla K40", (3, 5), CUDA_13, "no torch that embq works with"),
        ("NVIDIA GeForce RTX 5090", (12, 0), CUDA_126, "install a newer torch"),
    ],
)
def test_a_card_that_torch_has_no_code_for_is_told_with_the_build_that_has(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], archs: tuple[str, ...], helps: str
) -> None:
    torch_with(monkeypatch, archs=archs, name=name, major=capability[0], minor=capability[1])
    said = refused()
    assert f"{name} has compute capability {capability[0]}.{capability[1]}, and torch 2.15.0 has code for sm_" in said
    assert helps in said
    assert all(len(part) <= 300 for part in said.split(" | "))  # as much as the supervisor hears


def test_amd_gpus_go_by_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    archs = ("gfx90a", "gfx942")
    torch_with(monkeypatch, hip="6.2", archs=archs, gcnArchName="gfx942:sramecc+:xnack-")
    check_device("cuda:0")
    torch_with(monkeypatch, hip="6.2", archs=archs, gcnArchName="gfx803")
    assert "architecture gfx803, and torch 2.15.0 has code for gfx90a, gfx942 only" in refused()
    torch_with(monkeypatch, hip="6.2", archs=("gfx11-generic",), gcnArchName="gfx1100")
    check_device("cuda:0")


def test_torch_has_to_see_one_device_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_with(monkeypatch)
    torch.cuda.device_count = lambda: 2
    assert "sees 2 devices" in refused()
    torch.cuda.device_count = lambda: 0
    with pytest.raises(DeviceError, match="does not see the device") as caught:
        check_device("cuda:0")
    assert "nvidia-smi" in caught.value.next_step
    torch.version.cuda = None
    assert "a build for CPUs" in refused()


def test_a_device_that_cannot_be_asked_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> Any:
        raise RuntimeError("CUDA unknown error\nmore")

    torch_with(monkeypatch).cuda.get_device_properties = fail
    with pytest.raises(DeviceError, match=r"(?m)the device failed: CUDA unknown error$"):
        check_device("cuda:0")
