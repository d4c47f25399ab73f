"""Each process of a supervisor sees one GPU; why it ended is known, and a device is given up alone."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import redis

from embq.app.status.fleet import FleetStatus as Machines
from embq.core import wire
from embq.core.errors import EmbqError, Exit
from embq.core.queue.heartbeats import Device, Heard, Service
from embq.worker.meter.progress_board import ProgressBoard, Span
from embq.worker.supervisor.devices import Gpu
from embq.worker.supervisor.protocol import ReportPipe, WorkerOptions
from embq.worker.supervisor.slot import Slot, _child_env
from embq.worker.supervisor.supervisor import Supervisor
from tests.support.fleet import fleet

H100, L4 = (
    Gpu(number=number, visible=f"GPU-{number}", name=name, capability=(9, 0), memory_bytes=1)
    for number, name in enumerate(("NVIDIA H100", "NVIDIA L4"))
)


def test_a_process_sees_the_gpu_of_its_slot_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    supervisor = Supervisor(redis.Redis(), fleet("cuda:1", "cuda:0", "cpu", gpus=(H100, L4)))
    environments = [_child_env(supervisor.fleet, slot.device, slot.gpu) for slot in supervisor.slots]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["GPU-1", "GPU-0", "0,1"]
    assert [each.get("CUDA_DEVICE_ORDER") for each in environments] == ["PCI_BUS_ID", "PCI_BUS_ID", None]
    assert "HIP_VISIBLE_DEVICES" not in environments[0]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1")  # ROCm looks at it first
    assert _child_env(fleet(), "cuda:1", L4)["HIP_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize(
    ("device", "in_torch"), [("cuda:0", "cuda:0"), ("cuda:3", "cuda:0"), ("cpu", "cpu"), ("sim:2", "sim:2")]
)
def test_in_its_process_each_gpu_is_the_first(device: str, in_torch: str) -> None:
    rest: dict[str, Any] = {"name": "w", "run": "", "prefetch": 1, "threads": 1, "batch_size": 0, "transport": "auto"}
    options = WorkerOptions(device=device, drain_s=1.0, report_fd=-1, progress_fd=-1, version="", **rest)
    assert (options.device, options.torch_device) == (device, in_torch)


def test_a_process_gets_the_options_of_its_fleet_and_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("embq.worker.supervisor.slot.start_process", lambda command, **_: commands.append(command))
    slot = Slot("cuda:1", L4)
    slot.paths.without = frozenset({"flat", "graph"})
    together = fleet("cuda:1", "cpu", "sim:2", gpus=(H100, L4))
    slot.start(together)
    options = WorkerOptions(**json.loads(commands[0][-1]))
    slot.clear()
    assert (options.name, options.device, options.without) == (slot.name, "cuda:1", ["flat", "graph"])
    assert options.siblings == 2, "a simulated device computes nothing"
    assert min(options.report_fd, options.progress_fd) >= 0
    assert (options.threads, options.drain_s, options.version) == (1, 1.0, "test")


@pytest.fixture
def slot() -> Any:
    """A slot with a pipe, and what writes into it."""
    slot = Slot("cuda:1", L4)
    slot.report, write = os.pipe()
    os.set_blocking(slot.report, False)
    yield slot, ReportPipe(write)
    os.close(slot.report)
    os.close(write)


def test_a_slot_hears_why_its_process_ends_and_what_it_cannot_load(slot: Any) -> None:
    slot, report = slot
    report.state("loading")
    report.refuse("minilm", "no room; make some")
    report.end("the device failed", "look at it")
    slot.read_report()
    assert slot.ended == ("the device failed", "look at it")
    assert slot.refused == {"minilm": "cuda:1 (NVIDIA L4): no room; make some"}
    report.end("é" * 4000, "ü" * 4000)  # the pipe takes it in one piece all the same
    slot.read_report()
    assert slot.ended == ("é" * 300, "ü" * 300)
    slot.give_up("it died", "look into its log")
    assert slot.why == f"{'é' * 300}; {'ü' * 300}"
    assert (slot.doing, slot.over) == ("given_up", True)


@pytest.mark.parametrize(
    ("reports", "holds_unit", "status", "counted"),
    [
        ("idle loading", False, Exit.UNAVAILABLE, 1),
        ("idle loading serving", False, Exit.EXHAUSTED, 1),
        ("idle loading serving", False, -9, 1),
        ("idle loading serving", True, Exit.EXHAUSTED, 0),  # charged to the unit, which is tried three times
        ("idle loading serving finished", False, Exit.EXHAUSTED, 0),
        ("idle loading serving", False, Exit.OUTPUT, 0),  # it waits for room on a disk
    ],
)
def test_a_death_without_progress_counts_whatever_its_moment(
    slot: Any, reports: str, holds_unit: bool, status: int, counted: int
) -> None:
    slot, report = slot
    for state in reports.split():
        report.finished() if state == "finished" else report.state(state)
    slot.read_report()
    slot.board = ProgressBoard()
    with slot.board.step("read", [Span("token", 7)] if holds_unit else []):
        slot.count_death(status)
    assert slot.idle_deaths == counted


def test_a_supervisor_ends_when_its_last_device_is_given_up_and_not_before() -> None:
    supervisor = Supervisor(redis.Redis(), fleet("cuda:0", "cuda:1", gpus=(H100, L4)))
    first, second = supervisor.slots
    first.ended = ("there is no code for it", "install another torch")
    supervisor._give_up(first, Exit.CONFIG, "its process ended")
    assert first.why == "there is no code for it; install another torch"
    with pytest.raises(EmbqError) as caught:
        supervisor._give_up(second, Exit.UNAVAILABLE, "it failed", "look at it")
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert caught.value.message == (
        "no device is left: cuda:0 (NVIDIA H100): there is no code for it; install another torch; "
        "cuda:1 (NVIDIA L4): it failed; look at it"
    )


def test_a_device_that_was_given_up_shows_in_the_status_of_the_fleet() -> None:
    device = Device(device="cuda:1", name="NVIDIA L4", state="given_up", worker="", why="it is full; make room")
    service = Service(name="s", role="worker", host="box", pid=1, version="1", devices=(device,))
    assert wire.read(Service, wire.write(service), what="report") == service
    machines = Machines(reports=[Heard(service=service, last_ms=0, silent_s=0.0)])
    assert machines.given_up() == [
        "box has given up cuda:1 (NVIDIA L4), until the worker there is started again: it is full; make room"
    ]
    (told,) = machines.to_json()[0]["devices"]
    assert told["why"] == "it is full; make room"


def test_a_report_of_a_version_without_reasons_is_understood() -> None:
    text = wire.write(Service(name="s", role="worker", host="box", pid=1, version="1"))
    old = text.replace('"devices": []', '"devices": [{"device": "cpu", "name": "x", "state": "idle", "worker": "w"}]')
    service = wire.read(Service, old, what="report")
    assert service is not None
    assert service.devices == (Device(device="cpu", name="x", state="idle", worker="w"),)
