"""Whole runs on one machine and through resident services: interrupted, resumed, repeated, watched."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit
from tests.e2e.check import Output, check_complete, read_output
from tests.e2e.session import (
    Command,
    Ledger,
    await_in,
    called,
    closed,
    committed,
    ended,
    logs,
    run_of,
    started,
    succeed,
    write_shards,
    write_texts,
)
from tests.faults.kit.cluster import Sabotage, held_after, let_go, sabotaged
from tests.support.waiting import wait_until

DIM = 16
DRAIN_S = 20


def status_of(*arguments: str | Path, **options: Any) -> dict[str, Any]:
    """The object that `embq status --json` prints."""
    answer = json.loads(succeed("status", *arguments, "--json", **options))
    assert isinstance(answer, dict)
    return answer


def assert_shape(status: dict[str, Any]) -> None:
    """The shape that other programs rely on."""
    assert status["schema"] == 1
    assert isinstance(status["run"], str)
    assert status["state"] in ("running", "done", "stopped")
    for name in ("rows", "rows_total", "failures"):
        assert isinstance(status[name], int), name
    for name in ("done", "in_flight", "queued", "quarantined"):
        assert isinstance(status["units"][name], int), name
    assert isinstance(status["rows_per_s"], (int, float))
    assert status["eta_s"] is None or status["eta_s"] >= 0
    assert isinstance(status["limit"], str)
    for worker in status["workers"]:
        assert set(worker) >= {"name", "device", "rows_per_s", "unit", "stage", "age_s"}
        assert 0 <= (worker["padding"] or 0) < 1
        assert not worker["memory_full"]
        assert not worker["recomputed"]
    assert set(status["timing"]) >= {"load_s", "embed_s", "wall_s"}


@pytest.fixture
def ledger(short_tmp: Path) -> Iterator[Ledger]:
    """The broker's view of the run in `short_tmp/out`."""
    ledger = Ledger(short_tmp / "out")
    yield ledger
    ledger.close()


# --- one machine ---


def test_a_second_ctrl_c_gives_begun_units_back_instead_of_finishing_them(short_tmp: Path, ledger: Ledger) -> None:
    root, texts = short_tmp / "out", short_tmp / "texts.jsonl"
    write_texts(texts, 6000)
    model = f"stub:{DIM}?ms_per_sample=20"  # a unit takes a minute, a batch about a second
    with started("run", texts, "-o", root, "-m", model, "--unit-size", "3000") as command:
        await_in(command, lambda: ledger.begun())
        command.signal(signal.SIGINT)
        await_in(command, lambda: "units in flight are finished" in command.stderr)
        # Two signals within a second of the clock of any process that they come to are one request. So an impatient
        # user is asked for; the unit would take a minute.
        impatient = time.monotonic()

        def ended_by_impatience() -> bool:
            nonlocal impatient
            if time.monotonic() - impatient > 1.2 and command.service("worker") is not None:
                impatient = time.monotonic()
                command.signal(signal.SIGINT)
            return command.process.poll() is not None

        wait_until(ended_by_impatience, 50)
        # A signal that comes when all is done and only the interpreter is left ends that; to a shell it is the same.
        assert command.wait() in (130, -signal.SIGINT), command.said
        assert f"embq resume {root}" in command.stderr
    assert committed(root) == []


def test_a_run_can_be_watched_interrupted_resumed_and_repeated(short_tmp: Path, ledger: Ledger) -> None:
    root, texts = short_tmp / "out", short_tmp / "texts.jsonl"
    expected = write_texts(texts, 1500)
    run = ["run", texts, "-o", root, "-m", f"stub:{DIM}?ms_per_sample=5", "--unit-size", "10"]
    run += ["--devices", "cpu", "--workers", "2", "--drain-timeout", str(DRAIN_S)]

    gate = short_tmp / "gate"
    with started(*run, environment=sabotaged(held_after(20, gate))) as command:
        await_in(command, lambda: len(committed(root)) >= 20 and len(ledger.workers()) == 2)
        during = status_of(root)
        # A second session on the same output is sent away and leaves the first one alone.
        second, _, refusal = called(*run)
        command.signal(signal.SIGINT)
        await_in(command, lambda: "units in flight are finished" in command.stderr)
        let_go(gate)
        assert command.wait() == 130, command.said
        assert f"embq resume {root}" in command.stderr
        again = f"it uses --devices cpu --workers 2 --drain-timeout {float(DRAIN_S)} again"
        assert again in " ".join(command.stderr.split())
        assert "Traceback" not in command.stderr + logs(root)
        assert command.stderr.startswith("precision fp32: the fastest float type on every device (")
    assert during["precision"] == "fp32"
    assert second == 75
    assert refusal.splitlines()[0].startswith("run ")
    assert "error[busy]" in refusal
    assert "next:" in refusal
    assert_shape(during)
    assert during["state"] == "running"
    assert len(during["workers"]) == 2
    assert during["rows_total"] == 1500

    before = read_output(root)
    assert 20 <= len(before.tokens) < 150
    stopped = status_of(root)
    assert_shape(stopped)
    assert stopped["state"] == "stopped"
    assert stopped["rows"] == len(before.keys)
    files = {path: path.stat().st_mtime_ns for folder in ("parts", "commits") for path in (root / folder).iterdir()}

    published: dict[int, int] = {}
    with started("resume", root, "--workers", "1") as command:

        def everything_is_committed() -> bool:
            for pid, said in ledger.workers().items():
                published[pid] = max(published.get(pid, 0), said["units"])
            return len(committed(root)) == 150

        await_in(command, everything_is_committed)
        assert command.wait() == 0, command.said
        assert f"workers: --devices cpu --workers 1 --drain-timeout {float(DRAIN_S)}" in command.stderr
    assert len(published) == 1
    after = check_complete(root, expected, units=150, dim=DIM)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert after.records[: len(before.records)] == before.records
    # What was done before was not done again: neither published by a worker, nor committed under a new token.
    assert sum(published.values()) <= 150 - len(before.tokens)
    assert not _generations(before) & {
        token.partition(":")[0] for unit, token in after.tokens.items() if unit not in before.tokens
    }

    done = status_of(root)
    assert_shape(done)
    assert done["state"] == "done"
    assert done["units"]["done"] == 150
    assert done["rows"] == done["rows_total"] == 1500
    assert done["eta_s"] == 0
    status, stdout, stderr = called(*run)
    assert status == 0
    assert "nothing is left to do" in stderr
    assert "in 1,500 = rows 1,500 + failures 0" in stdout
    assert read_output(root).records == after.records


@pytest.mark.slow
def test_a_finished_run_leaves_no_server_state_and_goes_on_without_it(short_tmp: Path) -> None:
    root, texts, more = short_tmp / "out", short_tmp / "texts.jsonl", short_tmp / "more.jsonl"
    expected, added = write_texts(texts, 60), write_texts(more, 40, name="m")
    good = texts.read_text()
    texts.write_text(good.replace(good.splitlines()[7], json.dumps({"id": "k7", "text": ""})))
    run = ["-o", root, "-m", f"stub:{DIM}", "--unit-size", "10", "-q"]

    def left() -> list[str]:
        return [path.name for path in (root / "_broker").iterdir() if path.stat().st_size or path.name != "lock"]

    assert ended("run", texts, *run)[0] == Exit.SOME_FAILED
    assert left() == []
    records = read_output(root).records
    assert (status_of(root)["state"], status_of(root)["failures"]) == ("done", 1)
    assert called("run", texts, *run)[0] == called("resume", root, "-q")[0] == Exit.SOME_FAILED
    assert json.loads(succeed("failures", root, "--json"))["groups"][0]["count"] == 1
    succeed("verify", root)
    assert read_output(root).records == records, "none of these began anything anew"

    assert ended("run", texts, more, *run, "--add")[0] == Exit.SOME_FAILED
    assert left() == []
    texts.write_text(good)
    succeed("retry", root, "-q")
    assert left() == []
    check_complete(root, expected | added, units=11, dim=DIM)
    succeed("verify", root)
    assert status_of(root)["rows"] == 100


def _names(output: Output) -> set[str]:
    """The workers whose results were committed."""
    return {token.split(":")[1] for token in output.tokens.values()}


def _generations(output: Output) -> set[str]:
    return {token.partition(":")[0] for token in output.tokens.values()}


@pytest.mark.slow
def test_a_run_does_not_embed_its_own_rows(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["x", "y"]}), data / "t.parquet")
    for inputs in (str(data / "**" / "*.parquet"), str(data / "**" / "*.parquet"), data):
        succeed("run", inputs, "-o", data / "out", "-m", f"stub:{DIM}", "--add")
    assert sorted(read_output(data / "out").keys) == ["a", "b"]
    status, _, stderr = ended("run", data, "-o", tmp_path / "other", "-m", f"stub:{DIM}")
    assert (status, stderr.splitlines()[0]) == (0, "taken: parquet (1); left out: output folder of embq (1)")
    answer = json.loads(succeed("run", data, "-o", tmp_path / "new", "-m", f"stub:{DIM}", "--dry-run", "--json"))
    assert answer["listing"] == "taken: parquet (1); left out: output folder of embq (1)"


def test_results_that_travel_as_files_are_the_same_rows(short_tmp: Path) -> None:
    """As those that travel through the broker, which small results do in the other tests."""
    expected, root = write_shards(short_tmp / "shards", 8, 40), short_tmp / "out"
    run = ["run", short_tmp / "shards", "-o", root, "-m", f"stub:{DIM}", "--transport", "staging", "--json"]
    assert_shape(json.loads(succeed(*run)))
    check_complete(root, expected, units=8, dim=DIM)


# --- resident services ---


class Box:
    """Resident services on one broker."""

    def __init__(self, server: EmbeddedServer, stack: ExitStack) -> None:
        self.environment = {"EMBQ_BROKER_URL": server.url}
        self._stack = stack

    def start(self, *arguments: str | Path, sabotage: Sabotage = ()) -> Command:
        environment = {**self.environment, **(sabotaged(sabotage) if sabotage else {})}
        return self._stack.enter_context(started(*arguments, environment=environment))

    def do(self, *arguments: str | Path) -> str:
        return succeed(*arguments, environment=self.environment)


@pytest.fixture
def box(own_server: EmbeddedServer) -> Iterator[Box]:
    """A broker with nothing on it yet."""
    with ExitStack() as stack:
        yield Box(own_server, stack)


def test_resident_services_work_on_several_runs_and_take_late_workers(
    short_tmp: Path, box: Box, own_client: redis.Redis
) -> None:
    first, second = short_tmp / "first", short_tmp / "second"
    texts = write_texts(short_tmp / "texts.jsonl", 800)
    images = write_shards(short_tmp / "shards", 4, 10)
    enqueue = ["enqueue", short_tmp / "texts.jsonl", "-o", first, "-m", f"stub:{DIM}?ms_per_sample=10"]
    enqueue += ["--unit-size", "10", "--json"]

    # Enqueued before anything else is there; the same again adds nothing.
    new = json.loads(box.do(*enqueue))
    assert (new["new"], new["units"], new["done"]) == (True, 80, 0)
    assert json.loads(box.do(*enqueue)) == {**new, "new": False}
    waiting = status_of(new["run"], environment=box.environment)
    assert waiting["state"] == "stopped"
    assert waiting["units"]["queued"] == 80

    services = [box.start("producer"), box.start("writer"), box.start("worker", "--devices", "cpu")]
    await_in(services[2], lambda: len(committed(first)) >= 10)
    # A second machine joins, and another model is asked for, while the first run goes on. However slow the start of the
    # second is, the first leaves it something to do.
    (early,) = services[2].workers()
    early.suspend()
    late = box.start("worker", "--devices", "cpu")
    await_in(late, lambda: "model_loaded" in late.stderr)
    early.resume()
    await_in(late, lambda: len(_names(read_output(first))) == 2)
    other = json.loads(box.do("enqueue", short_tmp / "shards", "-o", second, "-m", f"stub:{DIM * 2}", "--json"))
    assert other["run"] == run_of(second) != new["run"]
    everything = status_of(environment=box.environment)
    assert everything["schema"] == 1
    assert {run["run"] for run in everything["runs"]} == {new["run"], other["run"]}
    for run in everything["runs"]:
        assert run["state"] in ("running", "stopped", "done")
    await_in(late, lambda: closed(first) and closed(second))

    one = check_complete(first, texts, units=80, dim=DIM)
    check_complete(second, images, units=4, dim=DIM * 2)
    assert len(_names(one)) == 2
    # Of a run whose folder cannot be seen the broker tells.
    await_in(late, lambda: not own_client.exists(f"embq:{{{other['run']}}}:writer"))  # which has let go of the folder
    second.rename(short_tmp / "moved")
    told = {run["run"]: run for run in status_of(environment=box.environment)["runs"]}
    assert told.keys() == {new["run"], other["run"]}
    assert (told[other["run"]]["state"], told[other["run"]]["rows"]) == ("done", len(images))
    assert_shape(told[other["run"]])
    again = json.loads(box.do(*enqueue))
    assert (again["new"], again["done"]) == (False, 80)

    # SIGTERM ends each of them in order.
    for service in (*services, late):
        service.signal(signal.SIGTERM)
    for service in (*services, late):
        assert service.wait() == 0, service.said
        assert "Traceback" not in service.stderr


def test_a_model_that_cannot_be_loaded_does_not_end_the_workers_of_other_runs(short_tmp: Path, box: Box) -> None:
    texts = write_texts(short_tmp / "texts.jsonl", 20)
    worker = box.start("worker", "--devices", "cpu")
    services = [worker, box.start("writer"), box.start("producer")]
    box.do("enqueue", short_tmp / "texts.jsonl", "-o", short_tmp / "wrong", "-m", "hf:org/absent?pooling=mean")
    await_in(worker, lambda: "model_refused" in worker.stderr)
    box.do("enqueue", short_tmp / "texts.jsonl", "-o", short_tmp / "right", "-m", f"stub:{DIM}")
    await_in(worker, lambda: closed(short_tmp / "right"))
    check_complete(short_tmp / "right", texts, units=1, dim=DIM)
    assert committed(short_tmp / "wrong") == []
    assert "cannot be had from the model hub" in worker.stderr
    for service in services:
        assert service.process.poll() is None, service.said
