"""The GPU of a process of a training, and how samples get there. What torch says of the machine is made up."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from embq.core.errors import ConfigError, UnwellError
from embq.training.classify.config import Config
from embq.training.classify.inputs import InputPlan
from embq.training.classify.process_group import GroupMember, membership
from embq.training.data.batch import Batch, View
from embq.training.data.epochs import exact_epoch
from embq.training.launch.member import attempt
from embq.training.shards.shard_set import Shards
from tests.training.small_shards import CLASSES, write_shards

VIEW = View(batch_size=4, image_size=16, shuffle_buffer=0, classes=CLASSES, pin_memory=True)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """torch sees two GPUs; the list gets each that is made the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return current


@pytest.mark.parametrize(("seen", "local", "number"), [(2, 0, 0), (2, 1, 1), (1, 3, 0)])
def test_a_process_has_the_gpu_of_its_number_or_the_only_one_that_it_is_shown(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, seen: int, local: int, number: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    with membership("cuda") as member:
        assert member.device == torch.device("cuda", number)
    assert gpus == [member.device]


def test_a_process_for_which_there_is_no_gpu_does_not_share_that_of_another(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="process 2 of this host has no GPU of its own: torch sees 2") as refused:
        membership("cuda").__enter__()
    assert "start 2 processes" in refused.value.next_step
    assert gpus == []


def test_gpus_have_the_numbers_by_which_embq_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads its variables when it is first used, so a process has them before its training is imported."""
    module = ModuleType("trains")
    module.main = lambda arguments: 0 if os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" else 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trains.__main__", module)
    monkeypatch.setitem(sys.modules, "trains", module)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert attempt("trains", (), 0).status == 0


@pytest.mark.parametrize(("device", "pinned"), [("cuda:1", True), ("cpu", False)])
def test_only_for_a_gpu_samples_come_in_pinned_memory(device: str, pinned: bool) -> None:
    plan = InputPlan(
        shards=Shards(urls=("s",), counts=None, digest=""), validation=None, classes=["a", "b"], epoch_samples=1
    )
    member = GroupMember(rank=0, world=1, device=torch.device(device))
    assert plan.view(Config(shards="s", out="o"), member).pin_memory is pinned


class Pinning:
    """The pinning of a machine with a GPU, done by torch's own loader; memory is copied instead of pinned.

    Attributes:
        threads: name of the thread of each tensor that was pinned.
        devices: that became the current one of a thread.
        workers: process ids of loader workers, by `sent`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.devices: list[int] = []
        self.workers: set[int] = set()
        accelerator = torch.accelerator
        monkeypatch.setattr(accelerator, "is_available", lambda: True)
        monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(accelerator, "current_device_index", lambda: 1)
        monkeypatch.setattr(accelerator, "set_device_index", self.devices.append)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

        def pin(tensor: torch.Tensor, _device: object = None) -> torch.Tensor:
            self.threads.append(threading.current_thread().name)
            return tensor.clone()

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Pinning:
    return Pinning(monkeypatch)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_batch_is_pinned_for_the_current_gpu_while_the_one_before_is_computed(
    pinning: Pinning, tmp_path: Path, workers: int
) -> None:
    shards = write_shards(tmp_path, [12])
    made = list(exact_epoch(shards, replace(VIEW, loader_workers=workers), epoch=0))
    assert len(pinning.threads) == len(made) == 3
    assert workers == 0 or threading.main_thread().name not in pinning.threads
    assert pinning.devices == [1] * workers
    plain = exact_epoch(shards, replace(VIEW, loader_workers=workers, pin_memory=False), epoch=0)
    assert all(torch.equal(one.images, other.images) for one, other in zip(made, plain, strict=True))
    assert len(pinning.threads) == 3


@pytest.fixture
def sent(pinning: Pinning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    """An epoch by two loader workers, of which the first batch has come; torch looks after them all the time."""
    waiting = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(waiting, "__defaults__", (0.1,))
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.MP_STATUS_CHECK_INTERVAL", 0.1)
    others = {child.pid for child in psutil.Process().children()}
    batches = exact_epoch(write_shards(tmp_path, [40] * 4), replace(VIEW, loader_workers=2, batch_size=1), epoch=0)
    next(batches)
    pinning.workers = {child.pid for child in psutil.Process().children()} - others
    return batches


def test_a_loader_worker_that_is_killed_ends_an_epoch_in_pinned_memory_with_the_same_message(
    sent: Iterator[Batch], pinning: Pinning, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's pinning thread ends by an error of its own where it was just fetching pixels from the worker.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for worker in pinning.workers:
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(UnwellError, match="a loader worker has died"):
        list(sent)


def test_the_last_message_of_a_dead_loader_worker_ends_the_thread_that_pins_and_the_epoch(
    sent: Iterator[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given pixels that are fetched from a loader worker, when that is gone, then the error says so."""

    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_storage_fd", refuse)
    with pytest.raises(UnwellError, match="a loader worker has died: Pin memory thread exited"):
        list(sent)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_batch_goes_to_the_gpu_without_waiting_for_it(tmp_path: Path) -> None:
    """Given the second batch, when it is sent and normalised, then nothing waits for the GPU."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(device):
        first, second = exact_epoch(write_shards(tmp_path, [8]), replace(VIEW, loader_workers=1), epoch=0)
        assert second.pixels.is_pinned()
        first.images_on(device)
        try:
            with warnings.catch_warnings(action="ignore"):  # it is called a prototype
                torch.cuda.set_sync_debug_mode("error")
            images = second.images_on(device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(images.cpu(), second.images, atol=1e-6, rtol=1e-6, check_stride=False)
