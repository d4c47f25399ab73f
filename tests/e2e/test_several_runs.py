"""Several runs at once, and runs that are paused, resumed and cancelled: real services around a real server."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from embq.app.cli import entry_point
from embq.core.broker.embedded import EmbeddedServer
from tests.e2e.check import check_complete, read_output
from tests.e2e.services import DIM, SAMPLES, Services, finished
from tests.e2e.session import await_in, closed, committed, ended, run_of, started, succeed, write_texts
from tests.faults.kit.cluster import held_after, let_go, sabotaged

QUICK, SLOW = (f"stub:{DIM}?ms_per_sample={ms}" for ms in (3, 40))
"""Models of runs that a gate, or a device of this speed, keeps from ending too early."""


@pytest.fixture
def gate(short_tmp: Path) -> Path:
    """Each worker waits for `let_go` of it after 100 units, so that a run is not over before it is paused."""
    return short_tmp / "gate"


@pytest.fixture
def services(own_server: EmbeddedServer, gate: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(stack, own_server, environment=sabotaged(held_after(100, gate)))


def test_a_paused_run_rests_through_everything_until_it_is_resumed(
    services: Services, own_client: redis.Redis, short_tmp: Path, gate: Path
) -> None:
    root = short_tmp / "out"
    expected = services.enqueue(root, 300, model=QUICK)
    run = run_of(root)
    services.until(lambda: finished(own_client, root) >= 10)

    told = json.loads(services.call("pause", run, "--json"))
    assert (told["state"], told["noted"]) == ("paused", True)
    assert json.loads((root / "control.json").read_text())["state"] == "paused"
    let_go(gate)
    own_client.flushall()
    services.until(lambda: own_client.hget(f"embq:{{{run}}}:meta", "state") == b"paused")
    for verb in ("writer", "producer"):
        services.replace(verb)
    services.until(lambda: own_client.exists(f"embq:{{{run}}}:writer"))
    rested = len(committed(root))
    assert rested < 300
    services.until(lambda: own_client.hlen(f"embq:{{{run}}}:owner") == 0)
    services.until(lambda: own_client.keys("rq:job:*") == [])
    assert services.status(root)["state"] == "paused"

    services.call("resume", run)
    services.until(lambda: closed(root))
    output = check_complete(root, expected, units=300, dim=DIM)
    assert len(output.tokens) == 300


@pytest.mark.slow
def test_a_session_on_one_machine_rests_goes_on_and_is_cancelled(short_tmp: Path) -> None:
    root, texts = short_tmp / "out", short_tmp / "texts.jsonl"
    write_texts(texts, 4_000)
    command = ["run", texts, "-o", root, "-m", SLOW, "--unit-size", str(SAMPLES), "--devices", "cpu"]
    with started(*command) as session:
        await_in(session, lambda: len(committed(root)) >= 5)
        assert "is paused" in succeed("pause", root)
        assert json.loads(succeed("status", root, "--json"))["state"] == "paused"
        assert "goes on" in succeed("resume", root)
        assert "is cancelled" in succeed("cancel", root)
        assert session.wait() == 130, session.said
    kept = committed(root)
    assert 5 <= len(kept) < 800
    read_output(root)
    assert json.loads(succeed("status", root, "--json"))["state"] == "cancelled"
    status, _, said = ended("pause", root)
    assert status == 78, said

    with started("resume", root, "--devices", "cpu", "--quiet", "--drain-timeout", "0") as session:
        await_in(session, lambda: len(committed(root)) > len(kept))
        assert json.loads((root / "control.json").read_text())["state"] == "running"
        session.signal(signal.SIGINT)
        assert session.wait() == 130, session.said
    assert committed(root)[: len(kept)] == kept
    read_output(root)


@pytest.mark.parametrize("verb", ["pause", "cancel", "resume"])
def test_who_asks_for_what_is_not_there_is_told_so(
    own_server: EmbeddedServer,
    short_tmp: Path,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EMBQ_BROKER_URL", own_server.url)
    assert entry_point.run([verb, "0123456789abcdef"]) == 65
    assert "the broker knows no run 0123456789abcdef" in capsys.readouterr().err
    assert entry_point.run([verb, str(short_tmp)]) == 65
    assert "is not an embq output folder" in capsys.readouterr().err
