"""P, V: people start things twice, at once, with other options or versions, stop them rudely, and replace them at work."""

from __future__ import annotations

import json
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from e2e.session import Command, await_in, logs, started, succeed

from faults.kit.cluster import DIM, QUICK_LEASES, Cluster, Service
from faults.kit.table import Recovery

OTHER_VERSION = {"set": "core.protocol:VERSION", "to": 99}


def arguments(cluster: Cluster, ms_per_sample: float = 10) -> list[str | Path]:
    """What `embq run` and `embq enqueue` are told."""
    model = f"stub:{DIM}?ms_per_sample={ms_per_sample:g}"
    return [cluster.input, "-o", cluster.root, "-m", model, "--unit-size", "10"]


def assert_refused(command: Command, *, exits: int, code: str) -> str:
    """It ended with one error and one next step, without a traceback; gives the error."""
    assert command.wait() == exits, command.said
    errors = [line for line in command.stderr.splitlines() if line.startswith("error[")]
    assert len(errors) == 1, command.said
    assert errors[0].startswith(f"error[{code}]: "), command.said
    assert command.stderr.count("  next:  ") == 1, command.said
    assert "Traceback" not in command.stderr
    return errors[0]


# --- P2: the same twice ---


@pytest.mark.fault("P2", "the same run is enqueued by four people at once, and again while it goes on")
def test_the_same_run_enqueued_at_once_and_again(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(60)
    cluster.writer()
    cluster.producer()
    cluster.workers(count=2)
    four = [cluster.service("enqueue", *map(str, arguments(cluster)), "--json") for _ in range(4)]
    recovery.injected(3)
    for command in four:
        command.may_end = True
        assert command.wait() == 0, command.said
    answers = [json.loads(command.stdout) for command in four]
    assert len({answer["run"] for answer in answers}) == 1
    assert [answer["new"] for answer in answers].count(True) == 1

    cluster.until_finished(20)
    environment = {"EMBQ_BROKER_URL": cluster.broker.url}
    again = json.loads(succeed("enqueue", *arguments(cluster), "--json", environment=environment))
    recovery.injected()
    assert (again["run"], again["new"], again["units"]) == (answers[0]["run"], False, 60)
    cluster.until_closed()
    cluster.assert_exact()


@pytest.mark.fault("P2", "two `embq run` are started on one output at the same moment: one works, one is refused")
@pytest.mark.parametrize("broker", ["private server", "shared broker"])
def test_two_runs_on_one_output(cluster: Cluster, recovery: Recovery, broker: str) -> None:
    cluster.write_texts(60)
    run = ["run", *arguments(cluster), "--quiet"]
    environment = {"EMBQ_BROKER_URL": cluster.broker.url} if broker == "shared broker" else {}
    with started(*run, environment=environment) as one, started(*run, environment=environment) as other:
        recovery.injected()
        cluster.until(lambda: not (one.process.poll() is None and other.process.poll() is None))
        first, second = (one, other) if one.process.poll() is None else (other, one)
        error = assert_refused(second, exits=75, code="busy")
        assert str(cluster.root) in error
        assert first.wait() == 0, first.said
    cluster.assert_exact()
    assert "Traceback" not in logs(cluster.root)


@pytest.mark.fault("P2", "`embq resume` on this machine, while services on another broker work on the same output")
def test_a_run_that_is_resumed_here_while_others_work_on_it(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(100)
    cluster.enqueue(f"stub:{DIM}?ms_per_sample=10")
    cluster.writer()
    cluster.producer()
    cluster.workers()
    cluster.until(lambda: len(cluster.committed()) >= 5)
    with started("resume", cluster.root, "--quiet") as second:
        recovery.injected()
        # One of the two completes it. They do not shut each other out again and again.
        if second.wait() != 0:
            assert "has taken over" in assert_refused(second, exits=75, code="busy")
    cluster.until_closed()
    output = cluster.assert_exact()
    assert sum(record["kind"] == "fence" for record in output.records) <= 3


@pytest.mark.fault("P2", "a run that `embq run` works on is enqueued to the services as well")
def test_a_run_at_work_that_is_enqueued_as_well(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(100)
    cluster.writer()
    cluster.producer()
    cluster.workers()
    with started("run", *arguments(cluster), "--quiet") as first:
        await_in(first, lambda: len(cluster.committed()) >= 5)
        for verb in (["enqueue", *arguments(cluster)], ["resume", cluster.root]):
            with started(*verb, environment={"EMBQ_BROKER_URL": cluster.broker.url}) as second:
                recovery.injected()
                assert_refused(second, exits=75, code="busy")
        assert first.wait() == 0, first.said
    output = cluster.assert_exact()
    assert sum(record["kind"] == "fence" for record in output.records) == 1
