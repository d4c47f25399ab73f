"""Runs with different models on the same workers: real services around a real server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from embq.core.broker.embedded import EmbeddedServer
from tests.e2e.check import check_complete, read_output
from tests.e2e.services import DIM, SAMPLES, Services, finished, hints_waiting
from tests.e2e.session import closed

FIRST, SECOND = (f"stub:{DIM}?batch_size={SAMPLES}&ms_per_sample={ms}" for ms in (8, 4))
"""One unit is one batch, so that little is begun when a slice ends."""


def loads(services: Services) -> int:
    """Number of times that a worker has loaded a model."""
    return services.services["worker"].stderr.count(" model_loaded ")


def test_a_small_run_with_another_model_waits_for_a_slice_and_not_for_the_end_of_a_large_one(
    own_server: EmbeddedServer, own_client: redis.Redis, short_tmp: Path
) -> None:
    large, small = short_tmp / "large", short_tmp / "small"
    with ExitStack() as stack:
        services = Services(stack, own_server, workers=1, environment={"EMBQ_SLICE_S": "1"})
        services.enqueue(large, 4000, model=FIRST)
        services.until(lambda: finished(own_client, large) >= 20)
        expected = services.enqueue(small, 50, model=SECOND)
        services.until(lambda: closed(small))
        assert finished(own_client, large) < 4000
        check_complete(small, expected, units=50, dim=DIM)
        before = finished(own_client, large)
        services.until(lambda: finished(own_client, large) > before)
        services.call("cancel", large)
    read_output(large)


@pytest.mark.slow
def test_a_worker_that_changes_its_model_again_and_again_loses_and_doubles_nothing(
    own_server: EmbeddedServer, own_client: redis.Redis, short_tmp: Path
) -> None:
    """Each slice is as long as a unit, so every change finds units in hand: begun, claimed ahead, and hinted."""
    models = {short_tmp / "one": FIRST, short_tmp / "two": SECOND}
    with ExitStack() as stack:
        environment = {"EMBQ_SLICE_S": "0.04"}
        services = Services(stack, own_server, start=("writer", "producer"), workers=1, environment=environment)
        expected = {root: services.enqueue(root, 40, model=model) for root, model in models.items()}
        services.until(lambda: all(hints_waiting(own_client, model) for model in models.values()))
        services.start("worker")
        services.until(lambda: all(closed(root) for root in models))
        # What the first turn can begin is bounded by the pipeline, a few batches of one unit each: so it had another.
        assert loads(services) >= 3
    for root in models:
        check_complete(root, expected[root], units=40, dim=DIM)


@pytest.mark.slow
def test_the_model_of_a_paused_run_makes_room_and_comes_back(
    own_server: EmbeddedServer, own_client: redis.Redis, short_tmp: Path
) -> None:
    first, second = short_tmp / "first", short_tmp / "second"
    with ExitStack() as stack:
        # No slice ends before the test does.
        services = Services(stack, own_server, workers=1, environment={"EMBQ_SLICE_S": "1000"})
        services.enqueue(first, 4000, model=FIRST)
        services.until(lambda: finished(own_client, first) >= 5)
        expected = services.enqueue(second, 20, model=SECOND)

        def waits() -> bool:
            shown = services.status(second)
            return (shown["state"], shown["limit"], shown["waits_for"]) == ("running", "turn", [FIRST])

        services.until(waits)
        assert finished(own_client, second) == 0
        services.call("pause", first)
        services.until(lambda: closed(second))
        before = finished(own_client, first)
        assert before < 4000
        services.call("resume", first)
        services.until(lambda: finished(own_client, first) > before)
        services.call("cancel", first)
    check_complete(second, expected, units=20, dim=DIM)
    read_output(first)
