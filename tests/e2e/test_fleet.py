"""Machines show in `embq status` from their start on, and say what is wrong with them."""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit
from tests.e2e.check import check_complete
from tests.e2e.services import DIM, Services
from tests.e2e.session import Ledger, await_in, closed, ended, process_ended, started, write_texts
from tests.faults.kit.cluster import held_after, let_go, sabotaged
from tests.support.waiting import wait_until

SHOWN_S = 10.0


def services_of(services: Services) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(services.call("status", "--json"))["services"]
    return found


def devices_of(services: Services) -> list[dict[str, Any]]:
    return [device for one in services_of(services) if one["role"] == "worker" for device in one["devices"]]


@pytest.mark.slow
def test_an_idle_machine_shows_within_ten_seconds_and_is_gone_when_it_was_stopped(own_server: EmbeddedServer) -> None:
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("producer", "writer"))
        services.until(lambda: [one["role"] for one in services_of(services)] == ["producer", "writer"])
        began = time.monotonic()
        worker = stack.enter_context(started("worker", "--devices", "sim:3,cpu", environment=services.environment))
        services.until(lambda: len(devices_of(services)) == 2)
        assert time.monotonic() - began < SHOWN_S
        services.until(lambda: {device["state"] for device in devices_of(services)} == {"idle"})
        told = services.call("status")
        assert "the broker knows no run" in told
        assert "simulated device of speed 3" in told
        (machine,) = [one for one in services_of(services) if one["role"] == "worker"]
        assert machine["cores"] > 0 < machine["memory_bytes"]
        assert machine["cache_free_bytes"] > 0
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert devices_of(services) == []
        services.services["writer"].kill_all()
        wait_until(lambda: [one["role"] for one in services_of(services)] == ["producer"])


@pytest.mark.slow
def test_a_machine_at_work_shows_its_model_its_rate_now_and_the_one_last_measured(
    own_server: EmbeddedServer, short_tmp: Path
) -> None:
    root, gate = short_tmp / "out", short_tmp / "gate"
    with ExitStack() as stack:
        environment = sabotaged(held_after(30, gate))
        services = Services(stack, own_server, workers=1, environment=environment)
        expected = services.enqueue(root, 60)
        services.until(lambda: any(device["rows_per_s"] and device["unit"] for device in devices_of(services)))
        (device,) = devices_of(services)
        assert device["model"].startswith(f"stub:{DIM}")
        services.until(lambda: devices_of(services)[0]["state"] == "serving")
        watching = stack.enter_context(started("status", "--watch", "--json", environment=services.environment))
        services.until(lambda: watching.stdout.count("\n") > 1)
        first = json.loads(watching.stdout.splitlines()[0])
        assert [run["output"] for run in first["runs"]] == [str(root)]
        assert [one["role"] for one in first["services"]] == ["producer", "writer", "worker"]
        let_go(gate)
        services.until(lambda: closed(root))
        services.until(lambda: json.loads(watching.stdout.splitlines()[-2])["runs"][0]["state"] == "done")
        watching.signal(signal.SIGINT)
        assert watching.wait() == Exit.INTERRUPTED
        services.until(lambda: devices_of(services)[0]["measured"])
        assert devices_of(services)[0]["measured"][0]["rows_per_s"] > 0
        services.until(lambda: devices_of(services)[0]["state"] == "idle")
    check_complete(root, expected, units=60, dim=DIM)


def test_two_stacks_on_one_broker_are_told_of_by_the_services_and_by_status(own_server: EmbeddedServer) -> None:
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("writer",))
        first = services.services["writer"]
        services.start("writer")
        second = services.services["writer"]
        services.until(lambda: "two_of_a_kind" in first.stderr and "two_of_a_kind" in second.stderr)
        told = services.call("status")
        assert "warning: two services of the kind writer serve the same runs" in told
        assert "give each stack a broker of its own" in told


@pytest.mark.parametrize("visible", ["", "-1"])
def test_cuda_on_a_machine_that_shows_no_gpu_is_an_error_with_the_way_out(
    own_server: EmbeddedServer, visible: str
) -> None:
    environment = {"EMBQ_BROKER_URL": own_server.url, "CUDA_VISIBLE_DEVICES": visible}
    status, _, said = process_ended("worker", "--devices", "cuda", environment=environment)
    assert status == Exit.UNAVAILABLE
    assert f"no CUDA device here: CUDA_VISIBLE_DEVICES='{visible}' hides them all" in said
    assert "next:" in said


def test_auto_without_a_gpu_says_in_its_first_line_that_the_cpu_computes(own_server: EmbeddedServer) -> None:
    environment = {"EMBQ_BROKER_URL": own_server.url, "CUDA_VISIBLE_DEVICES": ""}
    with started("worker", environment=environment) as worker:
        await_in(worker, lambda: "worker_started" in worker.stderr)
        first = worker.stderr.splitlines()[0]
    assert " warning supervisor devices devices=cpu " in first
    assert "the CPU computes" in first


def test_a_run_of_another_protocol_version_shows_in_status(own_server: EmbeddedServer, own_client: Any) -> None:
    own_client.hset("embq:runs", "f" * 16, json.dumps({"v": 2, "output": "/data/old"}))
    environment = {"EMBQ_BROKER_URL": own_server.url}
    _, told, _ = ended("status", environment=environment)
    assert f"run {'f' * 16} for /data/old was announced under protocol version 2" in told
    status, _, said = ended("status", "f" * 16, environment=environment)
    assert status == Exit.BAD_INPUT
    assert "protocol version 2" in said


def test_a_worker_of_a_batch_system_ends_when_it_has_been_idle(own_server: EmbeddedServer, short_tmp: Path) -> None:
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("producer", "writer"))
        expected = services.enqueue(short_tmp / "out", 8)
        worker = stack.enter_context(
            started("worker", "--devices", "cpu", "--idle-exit", "3", environment=services.environment)
        )
        assert worker.wait() == Exit.DONE
        assert "idle_exit seconds=3" in worker.stderr
        services.until(lambda: closed(short_tmp / "out"))
        check_complete(short_tmp / "out", expected, units=8, dim=DIM)


def test_a_worker_with_notice_gives_back_at_once_what_it_would_not_finish(
    own_server: EmbeddedServer, own_client: redis.Redis, short_tmp: Path
) -> None:
    lines, texts = 400, short_tmp / "texts.jsonl"
    write_texts(texts, lines)
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("producer", "writer"))
        given = ("--unit-size", str(lines), "-m", f"stub:{DIM}?ms_per_sample=300")
        services.call("enqueue", texts, "-o", short_tmp / "out", *given)
        notice = ("--devices", "cpu", "--batch-size", "4", "--drain-timeout", "60")
        worker = stack.enter_context(started("worker", *notice, environment=services.environment))
        ledger = Ledger(short_tmp / "out", own_server.url)
        await_in(worker, lambda: ledger.begun() and any(one.get("rows_per_s") for one in ledger.workers().values()))
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == Exit.DONE
        assert time.monotonic() - began < 45, "the unit takes two minutes, and there is one"
        assert ledger.begun() == 0
        assert set(own_client.hvals(ledger.key("att"))) <= {b"0"}, "nothing is charged"
        ledger.close()
