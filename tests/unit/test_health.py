"""What a service says of its own health, by a clock that the test holds."""

from __future__ import annotations

import pytest
import redis
from conftest import FakeClock

from core.embedded import EmbeddedServer
from core.health import Health, quick


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
    asked = quick(own_client, answer_s=0.2)
    assert asked.get("k") == b"v"
    own_server.stop()
    with pytest.raises(redis.exceptions.ConnectionError):
        asked.get("k")
