"""`embq worker --check` says beforehand what would not work on a machine, for the runs that the broker knows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit
from embq.core.models import ModelConfig
from embq.core.process.libraries import model_packages
from embq.core.queue.heartbeats import SERVICE_REPORTS
from embq.core.queue.keys import VERSION, queue_name
from embq.core.queue.reporting import this_service
from embq.core.queue.scripts import load_scripts
from tests.e2e.services import MODEL, Services, hints_waiting
from tests.e2e.session import called, process_ended, run_of, started, write_texts
from tests.support.servers.guarded import SERVERS_OF_WHOLE_RUNS, guarded_server
from tests.support.waiting import wait_until

GONE = "st:/nowhere/on-this-machine"


@pytest.fixture
def services(own_server: EmbeddedServer) -> Iterator[Services]:
    """A producer and a writer; the machine with the workers is still to come."""
    with ExitStack() as stack:
        yield Services(stack, own_server, start=("writer", "producer"))


def checked(services: Services, *arguments: str, **environment: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """(exit status, name -> rows of that name), of a process where the environment is read at imports."""
    start = process_ended if "HF_HOME" in environment else called
    environment = {"EMBQ_BROKER_URL": services.environment["EMBQ_BROKER_URL"], **environment}
    status, stdout, _ = start("worker", "--check", "--json", *arguments, environment=environment)
    told = json.loads(stdout)
    assert told["ok"] == (status == 0)
    rows: dict[str, list[dict[str, str]]] = {}
    for check in told["checks"]:
        rows.setdefault(check["name"], []).append(check)
    return status, rows


def planned(services: Services, root: Path) -> None:
    """A run whose hints are there."""
    services.enqueue(root, 4)
    with connect(services.environment["EMBQ_BROKER_URL"]) as client:
        services.until(lambda: hints_waiting(client, MODEL) == 4)


def test_a_machine_that_can_work_passes_and_says_where_results_go(services: Services, short_tmp: Path) -> None:
    root = short_tmp / "out"
    planned(services, root)
    services.until((root / "_staging" / ".shared").exists)
    status, rows = checked(services, "--devices", "sim:1")
    assert status == 0
    assert {name: row["state"] for name, (row, *_) in rows.items() if row["state"] == "fail"} == {}
    assert "made up" in rows["model"][0]["detail"]
    assert str(root.with_suffix(".jsonl")) in rows["input"][0]["detail"]
    assert "is shared with the writer" in rows["output"][0]["detail"]
    assert "producer on" in rows["services"][0]["detail"]
    assert "like all services" in rows["versions"][0]["detail"]

    # The same from a machine that does not see the output: a unit is taken from the queue, and results travel.
    (root / "_staging" / ".shared").write_text("another folder under the same name")
    (root / "manifest").rename(root / "not-here")
    status, rows = checked(services, "--devices", "sim:1")
    assert status == 0
    assert "is read, as it was planned" in rows["input"][0]["detail"]
    assert "travel through the broker" in rows["output"][0]["detail"]


def test_inputs_that_cannot_be_read_here_fail_with_the_workers_own_reason(services: Services, short_tmp: Path) -> None:
    root = short_tmp / "out"
    planned(services, root)
    status, rows = checked(services, "--devices", "sim:1", EMBQ_ROOTS="/nowhere:s3://elsewhere")
    assert status == Exit.UNAVAILABLE
    assert "outside of what the worker on " in rows["input"][0]["detail"]
    assert "EMBQ_ROOTS" in rows["input"][0]["fix"]

    texts = root.with_suffix(".jsonl")
    os.utime(texts, (1, 1))
    status, rows = checked(services, "--devices", "sim:1")
    assert (status, rows["input"][0]["state"]) == (Exit.UNAVAILABLE, "fail")
    assert "changed since the run was planned" in rows["input"][0]["detail"]

    texts.unlink()
    status, rows = checked(services, "--devices", "sim:1")
    assert status == Exit.UNAVAILABLE
    assert "does not exist" in rows["input"][0]["detail"]
    assert "its disk is mounted on this machine" in rows["input"][0]["fix"]


def test_a_model_that_is_not_to_be_had_here_fails_without_being_loaded(
    services: Services, own_client: redis.Redis, short_tmp: Path
) -> None:
    planned(services, short_tmp / "out")
    run = run_of(short_tmp / "out")
    record = json.loads(own_client.hget("embq:runs", run) or b"")
    for model, said in {
        GONE: "there is no model folder /nowhere/on-this-machine",
        "st:nobody/nothing": "is not in the cache",
    }.items():
        own_client.hset("embq:runs", run, json.dumps({**record, "spec": model, "model": model}))
        status, rows = checked(services, "--devices", "sim:1", HF_HOME=str(short_tmp), HF_HUB_OFFLINE="1")
        assert status == Exit.UNAVAILABLE
        assert said in rows["model"][0]["detail"]
        assert rows["model"][0]["fix"]
    assert "HF_HUB_OFFLINE is set" in rows["model"][0]["detail"]


def test_loading_compares_the_model_with_the_one_that_a_run_was_begun_with(
    services: Services, own_client: redis.Redis, short_tmp: Path
) -> None:
    planned(services, short_tmp / "out")
    status, rows = checked(services, "--load", "--devices", "sim:1")
    assert (status, rows["model"][0]["state"]) == (0, "ok")
    assert "embeds a sample on sim:1" in rows["model"][0]["detail"]
    own_client.hset(f"embq:{{{run_of(short_tmp / 'out')}}}:meta", "fingerprint", "f" * 32)
    status, rows = checked(services, "--load", "--devices", "sim:1")
    assert status == Exit.UNAVAILABLE
    assert "another model here" in rows["model"][0]["detail"]


def test_versions_that_differ_are_told_and_another_protocol_fails(services: Services, own_client: redis.Redis) -> None:
    scripts = load_scripts(own_client)
    other = {**model_packages(), "transformers": "1.0"}
    old = this_service("worker", version="0.0.1")
    SERVICE_REPORTS.report(own_client, replace(old, host="old", packages=other), scripts=scripts)
    status, rows = checked(services, "--devices", "sim:1")
    assert status == 0
    assert [row["state"] for row in rows["versions"]] == ["warn"]
    assert f"embq 0.0.1, protocol {VERSION} on old (worker)" in rows["versions"][0]["detail"]
    assert "1.0 on old" in rows["libraries"][0]["detail"]
    SERVICE_REPORTS.report(own_client, replace(old, host="strange", protocol=VERSION + 1), scripts=scripts)
    status, rows = checked(services, "--devices", "sim:1")
    assert status == Exit.UNAVAILABLE
    assert "upgrade all machines" in rows["versions"][0]["fix"]


def test_a_cache_that_cannot_be_written_and_a_gpu_that_is_not_there_fail(
    own_server: EmbeddedServer, short_tmp: Path
) -> None:
    environment = {
        "EMBQ_BROKER_URL": own_server.url,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": "/proc/embq",  # where nobody can make a folder, not even root
    }
    status, told, _ = process_ended("worker", "--check", "--devices", "cuda", environment=environment)
    assert status == Exit.UNAVAILABLE
    assert "fail  devices     there is no CUDA device here" in told
    assert "fail  cache       /proc/embq/hub" in told
    assert "warn  services    no producer and no writer reports to this broker" in told


def test_without_a_broker_the_rest_is_still_told(short_tmp: Path) -> None:
    environment = {"EMBQ_BROKER_URL": f"unix://{short_tmp}/nobody"}
    status, told, _ = called("worker", "--check", "--devices", "sim:2", environment=environment)
    assert status == Exit.UNAVAILABLE
    assert told.startswith("fail  broker      no broker answers")
    assert "ok    devices     sim:2: simulated" in told
    assert "services" not in told
    status, _, said = called("worker", "--check", environment={})
    assert (status, "no broker is configured" in said) == (Exit.CONFIG, True)


@pytest.mark.parametrize("name", SERVERS_OF_WHOLE_RUNS)
def test_the_users_of_a_guarded_broker_report_see_the_fleet_and_check_themselves(name: str) -> None:
    with guarded_server(name) as server, ExitStack() as stack:
        for verb in ("producer", "writer"):
            stack.enter_context(started(verb, environment=server.environment("writer")))
        worker = started("worker", "--devices", "sim:1", environment=server.environment("worker-gpu2"))
        stack.enter_context(worker)

        def roles_seen_by(user: str) -> list[str]:
            _, told, said = called("status", "--json", environment=server.environment(user))
            assert said == ""
            return [one["role"] for one in json.loads(told)["services"]]

        for user in ("laptop", "monitor"):
            wait_until(lambda user=user: roles_seen_by(user) == ["producer", "writer", "worker"])
        # A run for which no worker of the right kind is there, so that its hints wait.
        texts = Path(server.password_file("worker")).parents[2] / "texts.jsonl"
        write_texts(texts, 20)
        enqueue = ("enqueue", texts, "-o", texts.with_suffix(".out"), "-m", GONE, "--modality", "text")
        status, _, told = called(*enqueue, environment=server.environment("laptop"))
        assert status == 0, told
        worker_hints = queue_name(ModelConfig(spec=GONE, modalities=("text",), precision="fp32").queue_key)
        with server.client("admin") as admin:
            wait_until(lambda: admin.llen(f"rq:queue:{worker_hints}") > 0)
        (texts.with_suffix(".out") / "manifest").rename(texts.with_suffix(".hidden"))
        arguments = ("worker", "--check", "--devices", "sim:1")
        status, told, _ = called(*arguments, environment=server.environment("worker"))
        assert status == Exit.UNAVAILABLE, told
        assert [line.split()[1] for line in told.splitlines() if line.startswith("fail")] == ["model"]
        assert f"{texts} is read, as it was planned" in told
        assert "ok    rights      the user worker may do what a worker does" in told
        assert "ok    services    producer on" in told
        assert server.refused() == []
        status, told, _ = called(*arguments, environment=server.environment("laptop"))
        assert status == Exit.UNAVAILABLE
        assert "fail  rights      the broker's user laptop may not" in told
        assert "worker/password" in told


@pytest.mark.parametrize("option", ["--load", "--json"])
def test_what_belongs_to_the_check_is_refused_without_it(option: str) -> None:
    status, stdout, stderr = called("worker", option, environment={"EMBQ_BROKER_URL": "unix:///nowhere"})
    assert (status, stdout) == (Exit.USAGE, "")
    assert "belong to --check" in stderr
