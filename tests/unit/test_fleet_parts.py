"""Parts of the fleet page that need no broker: map of units, pace of commits, machines that go and come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from embq.app.doctor.fleet_checks import device_checks
from embq.app.status.bottleneck import Bottleneck, bottleneck_now
from embq.app.status.fleet import FleetStatus
from embq.app.status.run_monitor import WINDOW_S, CommitPace
from embq.core.queue.heartbeats import Device, Heard, Service
from embq.core.run.commits import CommittedUnit
from embq.retrieval.ui.fleet.machines import CARDS, MachineMemory
from embq.retrieval.ui.fleet.unit_map import MOST_CELLS, STATES, UnitMap, paths
from embq.worker.supervisor.devices import Gpu


def unit(u: int, *, rows: int = 3, failures: int = 0, **more: object) -> CommittedUnit:
    return CommittedUnit(u=u, unit_id="a" * 32, token="t", first_row=0, rows=rows, failures=failures, **more)  # type: ignore[arg-type]


def states(found: UnitMap, **units: list[int]) -> list[str]:
    return [STATES[state] for state in found.cells(units.get("received", []), units.get("in_flight", []))]


# --- the map of units ---


def test_each_unit_of_a_small_run_is_a_cell_with_its_state() -> None:
    found = UnitMap(6)
    whole = unit(2, rows=0, failures=1, quarantined="crash")
    found.commit([unit(0), unit(1, failures=2), whole], lambda _: None)
    assert states(found, received=[3], in_flight=[4]) == [
        "done",
        "failures",
        "quarantined",
        "received",
        "flight",
        "queued",
    ]


def test_a_retry_takes_the_failures_off_the_unit_that_it_repeats() -> None:
    found = UnitMap(2)
    found.commit([unit(0, failures=2), unit(1, rows=0, failures=1, quarantined="crash")], lambda _: None)
    found.grow(5)
    found.commit([unit(2, rows=1, failures=1, supersedes=2)], lambda _: 0)
    assert states(found)[:3] == ["done", "quarantined", "failures"], "what failed again stands with the retry"
    found.commit([unit(3, rows=3, supersedes=1, lifts=1), unit(4, rows=1, supersedes=1)], {3: 1, 4: 2}.get)
    assert states(found) == ["done"] * 5


def test_a_large_run_has_cells_of_several_units_also_when_it_grows() -> None:
    found = UnitMap(MOST_CELLS)
    found.commit([unit(u) for u in range(3)], lambda _: None)
    found.commit([unit(3, failures=1)], lambda _: None)
    found.grow(3 * MOST_CELLS)
    assert found.bin == 4
    cells = found.cells()
    assert len(cells) <= MOST_CELLS
    assert STATES[cells[0]] == "failures"
    found.commit([unit(9, supersedes=1)], lambda _: 3)
    assert [STATES[cell] for cell in found.cells()[:4]] == ["done", "queued", "some", "queued"]


def test_a_bitmap_of_the_broker_is_the_map_of_a_run_elsewhere() -> None:
    found = UnitMap(10)
    found.done_bits(bytes([0b10100000, 0b01000000, 0xFF]))
    assert [u for u, state in enumerate(states(found)) if state == "done"] == [0, 2, 9]


def test_neighbours_of_one_state_are_one_rectangle_where_cells_are_many() -> None:
    cells = np.array([STATES.index(one) for one in ("done", "done", "queued", "flight")], np.uint8)
    assert paths(cells, 4, apart=False) == {"done": "M0 0h2v.88h-2z", "flight": "M3 0h1v.88h-1z"}
    assert paths(cells, 2, apart=True)["done"].count("M") == 2


# --- the pace of commits ---


def test_the_pace_is_that_of_ten_minutes_and_of_the_session() -> None:
    pace = CommitPace()
    assert pace.recent(0.0) is None
    for at, rows in ((0.0, 0), (100.0, 1000), (200.0, 3000)):
        pace.note(at, rows)
    assert pace.recent(2.0) is None
    assert pace.recent(200.0) == (3000, 200.0)
    pace.note(400.0, 9000)
    assert pace.recent(WINDOW_S + 100.0) == (9000 - 1000, WINDOW_S)
    assert pace.recent(5 * WINDOW_S) == (0, WINDOW_S)


# --- machines ---


def heard(*devices: str, host: str = "box", silent_s: float = 0.5, began_ms: int = 0, last_ms: int = 1) -> Heard:
    service = Service(
        name=f"{host}.worker.{began_ms}",
        role="worker",
        host=host,
        pid=1,
        version="0",
        began_ms=began_ms,
        devices=tuple(Device(device=name, name="H100", state="serving", worker=f"w.{name}") for name in devices),
    )
    return Heard(service=service, last_ms=last_ms, silent_s=silent_s)


def devices_of(memory: MachineMemory, now_s: float, *told: Heard) -> dict[str, str]:
    machines = memory.update([FleetStatus(reports=list(told))], now_s)
    return {f"{one.device}/{one.number}": one.state for machine in machines for one in machine.devices}


def test_a_machine_that_is_started_again_takes_the_place_of_its_predecessor() -> None:
    memory = MachineMemory()
    devices_of(memory, 0.0, heard("cuda:0", "cuda:0"))
    old, new = (
        heard("cuda:0", "cuda:0", silent_s=8.0, last_ms=100),
        heard("cuda:0", "cuda:0", began_ms=200, last_ms=300),
    )
    assert devices_of(memory, 8.0, old, new) == {"cuda:0/0": "serving", "cuda:0/1": "serving"}
    assert devices_of(memory, 60.0, new) == {"cuda:0/0": "serving", "cuda:0/1": "serving"}


def test_rates_are_kept_for_ten_minutes_where_each_device_has_a_card() -> None:
    memory, fleet = MachineMemory(), FleetStatus(reports=[heard("cpu")], workers={"w.cpu": {"rows_per_s": 30.0}})
    memory.update([fleet], 0.0)
    ((device,),) = (machine.devices for machine in memory.update([fleet], 25.0))
    assert device.rates[-3:] == (30.0, None, 30.0)
    many = FleetStatus(reports=[heard(*(f"cuda:{number}" for number in range(CARDS + 1)))])
    (machine,) = memory.update([many], 30.0)
    assert {one.rates for one in machine.devices if not one.grey} == {()}


def test_two_workers_share_a_gpu_of_one_uuid_and_a_cpu_of_one_machine() -> None:
    def worker(
        host: str, device: str, visible: str = "", began_ms: int = 0, last_ms: int = 10, **changes: str
    ) -> Heard:
        gpu = Gpu(number=0, visible=visible, name="H100", capability=(9, 0), memory_bytes=1)
        report = heard(device, host=host, began_ms=began_ms, last_ms=last_ms)
        (alone,) = report.service.devices
        devices = (replace(alone, uuid=gpu.uuid, **changes),)
        return replace(
            report, service=replace(report.service, name=f"{host}{device}{visible}{began_ms}", devices=devices)
        )

    def shared(*reports: Heard, fleet: str = "") -> int:
        return len(device_checks(reports, fleet=fleet))

    assert shared(worker("a", "cuda:0", "GPU-1"), worker("a", "cuda:0", "GPU-2")) == 0, "two jobs on one node"
    assert shared(worker("a", "cuda:0", "GPU-1"), worker("10.0.0.5", "cuda:1", "GPU-1")) == 1
    assert shared(worker("a", "cuda:0", "0"), worker("a", "cuda:0", "0", began_ms=1)) == 1, "by number, as ROCm does"
    assert shared(worker("a", "cuda:0", "0"), worker("b", "cuda:0", "0")) == 0
    assert shared(worker("a", "cpu"), worker("a", "cpu", began_ms=1)) == 1
    assert shared(worker("a", "cpu"), worker("a", "cpu", began_ms=1), fleet="another") == 0
    assert shared(worker("a", "cpu"), worker("a", "cpu", began_ms=20, last_ms=30)) == 0, "a killed one, and the next"
    assert shared(worker("a", "cpu"), worker("a", "cpu", began_ms=1, state="given_up")) == 0
    assert shared(worker("a", "sim:5"), worker("a", "sim:5", began_ms=1)) == 0


# --- the bottleneck ---


def test_a_bottleneck_comes_with_the_number_that_would_end_it() -> None:
    device = {"read": {"busy": 0.1}, "prepare": {"busy": 0.25}, "embed": {"busy": 1.0}}
    assert Bottleneck(name="device", stages=device, workers=2).remedy() == (
        "with more than 8 such devices, preparing samples would be the limit"
    )
    slow = {"embed": {"busy": 0.4}}
    assert Bottleneck(name="reading", stages=slow, workers=1).remedy() == (
        "reading 2.5 times as fast would keep the device busy"
    )
    assert Bottleneck(name="writer", causes={"writer": 0.5}, workers=2).remedy().startswith("writing 2.0 times")
    assert Bottleneck(name="work").remedy() == Bottleneck().remedy() == ""


def test_the_shares_of_a_thousand_workers_are_means_and_not_zero() -> None:
    late = {"limit": "device", "causes": {"device": 0.4}, "stages": {"embed": {"busy": 0.4}}}
    told = {"threads": 1, "cores": 2, "decode": "", "late": late, "whole": late}
    many = [{"held": 1, "limit": "device", "rows_per_s": 1.0, "attribution": told} for _ in range(1_000)]
    assert bottleneck_now(many).stages == {"embed": {"busy": 0.4}}
