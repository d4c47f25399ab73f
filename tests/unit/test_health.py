"""A service's answer about its own health, by a clock that the test holds."""

from __future__ import annotations

import pytest
import redis

from embq.core.broker.embedded import EmbeddedServer
from embq.core.service.health import Health, single_try_client
from embq.worker.supervisor.slot import NEVER
from embq.worker.supervisor.supervisor import Supervisor
from embq.writer.lock import WEDGED_S, LockKeeper
from tests.support.fakes.clock import FakeClock
from tests.support.fleet import fleet


def test_a_loop_that_does_not_move_is_told_and_so_is_that_it_moves_again(clock: FakeClock) -> None:
    health = Health(stands_s=30, clock=clock)
    assert health.complaint() == "starting"
    health.beat()
    clock.advance(30)
    assert health.complaint() == ""
    clock.advance(1)
    assert health.complaint() == "the loop has stood still for 31 s"
    health.beat()
    assert health.complaint() == ""


def test_a_service_has_a_word_of_its_own(clock: FakeClock) -> None:
    health = Health(clock=clock)
    health.beat()
    health.also = lambda: "no device is left: cuda:0"
    assert health.complaint() == "no device is left: cuda:0"


def test_a_quick_client_leads_to_the_same_server_and_does_not_wait(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    own_client.set("k", "v")
    asked = single_try_client(own_client, answer_s=0.2)
    assert asked.get("k") == b"v"
    own_server.stop()
    with pytest.raises(redis.exceptions.ConnectionError):
        asked.get("k")


def test_a_commit_that_sends_a_part_for_long_keeps_the_writer_well(clock: FakeClock) -> None:
    health = Health(stands_s=WEDGED_S, clock=clock)
    keeper = LockKeeper(clock, beat=health.beat)
    for _ in range(10):
        keeper.note_progress()
        clock.advance(WEDGED_S)
        assert health.complaint() == ""
    clock.advance(1)
    assert health.complaint() == f"the loop has stood still for {WEDGED_S + 1:.0f} s"


def test_a_worker_is_well_as_long_as_one_device_has_a_process(own_client: redis.Redis) -> None:
    processes = fleet("sim:1", "cpu")
    supervisor = Supervisor(own_client, processes)
    assert supervisor.complaint() == "no worker process is alive; it is started again on cpu, sim:1"
    slot = supervisor.slots[0]
    slot.start(processes)
    try:
        assert supervisor.complaint() == ""
    finally:
        assert slot.process is not None
        slot.process.kill()
        slot.process.wait()
        slot.clear()
    for slot in supervisor.slots:
        slot.start_at = NEVER
    assert supervisor.complaint() == "no device is left: cpu, sim:1"
