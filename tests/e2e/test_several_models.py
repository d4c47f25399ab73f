"""Runs with different models on the same workers: real services around a real server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import redis

from embq.core.broker.embedded import EmbeddedServer
from tests.e2e.check import check_complete, read_output
from tests.e2e.services import DIM, SAMPLES, Services, finished
from tests.e2e.session import closed

FIRST, SECOND = (f"stub:{DIM}?batch_size={SAMPLES}&ms_per_sample={ms}" for ms in (8, 4))
"""One unit is one batch, so that little is begun when a slice ends."""


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
