"""Messages to a user, by the logs of real services and by `embq status`, when a machine does not fit in."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit
from tests.e2e.check import check_complete
from tests.e2e.services import DIM, Services
from tests.e2e.session import closed, process_ended, run_of, started
from tests.faults.kit.clock import WallClock

HOUR_S = 3600.0


def everything(services: Services) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(services.call("status", "--json"))
    return told


@pytest.mark.slow
def test_a_model_that_cannot_be_downloaded_is_told_by_the_log_and_by_status(
    own_server: EmbeddedServer, short_tmp: Path
) -> None:
    pytest.importorskip("sentence_transformers")
    root = short_tmp / "out"
    with ExitStack() as stack:
        environment = {"HF_HOME": str(short_tmp / "hf"), "HF_HUB_OFFLINE": "1"}
        services = Services(stack, own_server, workers=1, environment=environment)
        services.enqueue(root, 2, "--modality", "text", model="st:nobody/nothing")
        worker = services.services["worker"]
        services.until(lambda: " model_refused " in worker.stderr)
        loading, refused = (worker.stderr.find(f" {event} ") for event in ("model_loading", "model_refused"))
        assert 0 < loading < refused
        assert "HF_HUB_OFFLINE is set" in worker.stderr
        assert "next='unset HF_HUB_OFFLINE, so that it is downloaded once; or copy the cache" in worker.stderr
        services.until(lambda: everything(services)["warnings"])
        (warning,) = everything(services)["warnings"]
        start = f"st:nobody/nothing cannot be loaded on {socket.gethostname()}, until the worker there is started again"
        assert warning.startswith(start)
        assert "unset HF_HUB_OFFLINE" in warning
        for named in ((), (run_of(root),)):
            assert f"warning: {start}" in services.call("status", *named)
        services.call("cancel", run_of(root))
        services.until(lambda: everything(services)["warnings"] == [])


def test_a_worker_that_may_not_read_the_inputs_is_named_by_the_failure(
    own_server: EmbeddedServer, short_tmp: Path
) -> None:
    root = short_tmp / "out"
    with ExitStack() as stack:
        services = Services(stack, own_server, workers=1, environment={"EMBQ_ROOTS": "/nowhere"})
        services.enqueue(root, 1)
        services.until(lambda: closed(root))
        told = services.call("failures", root)
    assert "source_denied" in told
    assert f"outside of what the worker on {socket.gethostname()} may read (/nowhere)" in told


@pytest.mark.parametrize("hours", [5, pytest.param(-3, marks=pytest.mark.slow)])
def test_clocks_that_are_hours_apart_change_no_row_and_are_told(
    own_server: EmbeddedServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that no cell of the table is broken
    clock = WallClock(short_tmp / "clock")
    clock.set(hours * HOUR_S)
    root = short_tmp / "out"
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("producer", "writer"))
        wrong = {**services.environment, **clock.environment}
        worker = stack.enter_context(started("worker", "--devices", "sim:4,sim:1", environment=wrong))
        expected = services.enqueue(root, 40)
        services.until(lambda: " clock_differs " in worker.stderr)
        services.until(lambda: closed(root))
        (ahead_s,) = [one["clock_s"] for one in everything(services)["services"] if one["role"] == "worker"]
        assert abs(ahead_s - hours * HOUR_S) < 60
        assert f"(clock {abs(hours)} h 0 min {'ahead' if hours > 0 else 'behind'})" in services.call("status")
        # A person whose own clock is wrong, and who does not see the folder, sees no hours that have not passed.
        run = run_of(root)
        root.rename(short_tmp / "elsewhere")
        status, told, _ = process_ended("status", run, "--json", environment=wrong)
        (short_tmp / "elsewhere").rename(root)
        assert status == 0
        assert 0 < json.loads(told)["timing"]["wall_s"] < 600
        status, told, _ = process_ended("worker", "--check", "--devices", "sim:1", environment=wrong)
        assert status == Exit.DONE
        side = "ahead of" if hours > 0 else "behind"
        assert f"warn  clock       this machine's is {abs(hours)} h 0 min {side} the broker's" in told
        assert "fix: set both machines' clocks by NTP" in told
    check_complete(root, expected, units=40, dim=DIM)
