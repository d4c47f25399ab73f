"""Units whose input is not on a machine: left to the machines that may have it, for a while, and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from embq.core.queue import keys
from embq.core.queue.heartbeats import SERVICE_REPORTS, WORKER_REPORTS, Device, Service
from embq.core.queue.scripts import load_scripts
from embq.core.units import Unit
from embq.worker.claim.input_locality import InputLocality
from tests.support.fakes.clock import FakeClock

RUN, MODEL = "a" * 16, "stub:4"
CPU = Device(device="cpu", name="", state="idle", worker="w")
GPU2 = Service(name="gpu2.worker.1", role="worker", host="gpu2", pid=1, version="test", devices=(CPU,))


MISSING = Unit(kind="lines", source="/nowhere/a.txt")


def locality(client: redis.Redis, clock: FakeClock, *others: Service, run: str = "") -> InputLocality:
    """What the machine `box` knows besides other services."""
    for service in others:
        SERVICE_REPORTS.report(client, service, scripts=load_scripts(client))
    return InputLocality(client, host="box", roots=(), run=run, clock=clock)


@pytest.mark.parametrize(
    ("service", "is_left"),
    [
        (GPU2, True),
        (replace(GPU2, run=RUN), True),
        (replace(GPU2, run="b" * 16), False),
        (replace(GPU2, host="box"), False),
        (replace(GPU2, role="writer"), False),
        (replace(GPU2, state="draining"), False),
        (replace(GPU2, protocol=keys.VERSION + 1), False),
        (replace(GPU2, refused={MODEL: "no memory"}), False),
        (replace(GPU2, refused={"other": "no memory"}), True),
        (replace(GPU2, devices=()), False),
        (replace(GPU2, devices=(replace(CPU, state="given_up"), replace(CPU, state="over"))), False),
        (replace(GPU2, devices=(replace(CPU, state="given_up"), CPU)), True),
    ],
)
def test_a_unit_without_its_input_is_left_to_a_machine_that_may_serve_it(
    own_client: redis.Redis, clock: FakeClock, service: Service, is_left: bool
) -> None:
    here = locality(own_client, clock, service)
    assert here.leaves(RUN, MISSING, MODEL) is is_left
    assert (here.rests, here.is_aside(RUN)) == (is_left, is_left)
    assert here.unseen() == ({RUN: MISSING.source} if is_left else {})
    assert not locality(own_client, clock, run=RUN).leaves(RUN, MISSING, MODEL)


def test_a_machine_that_misses_the_input_as_well_is_not_waited_for(own_client: redis.Redis, clock: FakeClock) -> None:
    here = locality(own_client, clock, GPU2, replace(GPU2, name="gpu3.worker.1", host="gpu3"))
    for host, is_left in (("gpu2", True), ("gpu3", False)):
        blind = {"name": f"{host}.cpu", "host": host, "unseen": {RUN: MISSING.source}}
        WORKER_REPORTS.report(own_client, blind, scripts=load_scripts(own_client))
        assert here.leaves(RUN, MISSING, MODEL) is is_left
    assert here.leaves("b" * 16, MISSING, MODEL), "of another run they have said nothing"


def test_a_machine_rests_twice_as_long_each_time_until_an_input_is_there(
    own_client: redis.Redis, clock: FakeClock, tmp_path: Path, events: pytest.LogCaptureFixture
) -> None:
    here, present = locality(own_client, clock, GPU2), replace(MISSING, source=str(tmp_path / "b.txt"))
    Path(present.source).touch()
    for rest_s in (0.5, 1, 2, 4, 8, 15, 15):
        assert here.leaves(RUN, MISSING, MODEL)
        clock.advance(rest_s - 0.01)
        assert here.rests
        clock.advance(0.01)
        assert not here.rests
    clock.advance(14.99)
    assert (here.is_aside(RUN), here.unseen()) == (True, {RUN: MISSING.source})
    clock.advance(0.01)
    assert (here.is_aside(RUN), here.unseen()) == (False, {})
    assert not here.leaves(RUN, present, MODEL)
    # One input of a folder stands for the others, and the pause begins anew.
    absent = replace(present, source=str(tmp_path / "gone.txt"))
    assert (here.leaves(RUN, absent, MODEL), here.leaves("b" * 16, absent, MODEL)) == (False, True)
    clock.advance(0.5)
    assert not here.rests
    lines = [record.getMessage() for record in events.records]
    assert ["gpu2" in line and RUN in line and MISSING.source in line for line in lines] == [True, False]
