"""A whole small run at a broker with users, each service logged in as its own: nothing that they do is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.check import check_complete
from tests.e2e.session import Command, await_in, called, closed, committed, started, write_shards, write_texts
from tests.support.servers.guarded import SERVERS_OF_WHOLE_RUNS, GuardedServer, guarded_server
from tests.support.waiting import wait_until

DIM = 8
SLOW = f"stub:{DIM}?ms_per_sample=25"


class Box:
    """A guarded broker, and commands of its users."""

    def __init__(self, server: GuardedServer, stack: ExitStack, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self._stack = stack

    def service(self, user: str, *arguments: str, **changes: str) -> Command:
        environment = {**self.server.environment(user), **changes}
        return self._stack.enter_context(started(*arguments, environment=environment))

    def services(self, **changes: str) -> tuple[Command, Command, Command]:
        """Producer, writer and two worker processes of a machine with a user of its own."""
        # With metrics on a free port: what they read of the broker is among what is allowed.
        changes = {"EMBQ_METRICS": "127.0.0.1:0", **changes}
        producer, writer = (self.service("writer", verb, **changes) for verb in ("producer", "writer"))
        worker = self.service("worker-gpu2", "worker", "--devices", "cpu,cpu", **changes)
        await_in(writer, lambda: " started " in writer.stderr)
        return producer, writer, worker

    def laptop(self, *arguments: str | Path) -> tuple[int, str, str]:
        """A command from beginning to end."""
        return called(*arguments, environment=self.server.environment("laptop"))

    def ask(self, *arguments: str | Path) -> str:
        """A command that must succeed; gives its stdout."""
        status, said, wrong = self.laptop(*arguments)
        assert status == 0, f"{arguments}: {said}\n{wrong}"
        return said


@pytest.fixture(params=SERVERS_OF_WHOLE_RUNS)
def box(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Box]:
    with guarded_server(request.param) as server, ExitStack() as stack:
        yield Box(server, stack, short_tmp)


def metrics_of(service: Command) -> str:
    """Metrics of a service."""
    await_in(service, lambda: "metrics_served" in service.stderr)
    found = re.search(r"url=(http://\S+/metrics)", service.stderr)
    assert found is not None, service.said
    with urllib.request.urlopen(found[1], timeout=10) as answer:
        return str(answer.read().decode())


def in_state(box: Box, run: str | Path, state: str) -> Callable[[], bool]:
    def look() -> bool:
        return bool(json.loads(box.ask("status", run, "--json"))["state"] == state)

    return look


@pytest.mark.slow
def test_everything_that_users_do_is_allowed_to_them(box: Box) -> None:
    expected = write_texts(box.folder / "t.jsonl", 600)
    seen, sent, there = (box.folder / name for name in ("seen", "sent", "there"))
    producer, writer, worker = box.services()

    # Into a folder that the laptop sees; a worker process dies, and the broker restarts, in the middle.
    box.ask("enqueue", box.folder / "t.jsonl", "-o", seen, "-m", SLOW, "--unit-size", "20")
    await_in(worker, lambda: committed(seen))
    for service in (producer, writer, worker):
        assert "embq_" in metrics_of(service)
    os.kill(worker.workers()[0].pid, signal.SIGKILL)
    await_in(worker, lambda: "leases_freed" in worker.stderr)
    box.ask("pause", seen)
    wait_until(in_state(box, seen, "paused"))
    box.server.stop()
    box.server.start()
    box.ask("resume", json.loads((seen / "run.json").read_text())["run"])
    with box.server.client("admin") as admin:
        admin.script_flush()
    wait_until(lambda: closed(seen))
    check_complete(seen, expected, units=30, dim=DIM)

    # Through the broker, with the inputs and without.
    texts = write_texts(box.folder / "more.jsonl", 40, name="m")
    box.ask("enqueue", box.folder / "more.jsonl", "-o", sent, "-m", f"stub:{DIM}", "--inline", "--unit-size", "10")
    wait_until(lambda: closed(sent))
    check_complete(sent, texts, units=4, dim=DIM)
    shards = write_shards(box.folder / "shards", 40, 10)
    said = box.ask("enqueue", box.folder / "shards", "-o", there, "-m", SLOW, "--upload", "--priority", "20", "--json")
    run = json.loads(said)["run"]
    wait_until(in_state(box, run, "running"))
    box.ask("cancel", run)
    wait_until(in_state(box, run, "cancelled"))
    box.ask("resume", run)
    wait_until(lambda: closed(there))
    check_complete(there, shards, units=40, dim=DIM)
    assert {run["state"] for run in json.loads(box.ask("status", "--json"))["runs"]} == {"done"}

    for service in (worker, producer, writer):
        service.signal(signal.SIGTERM)
        assert service.wait() == 0, service.said
    assert box.server.refused() == []


def test_workers_that_are_first_wait_for_who_loads_the_scripts(box: Box) -> None:
    worker = box.service("worker", "worker", "--devices", "cpu")
    await_in(worker, lambda: "worker_started" in worker.stderr)
    expected = write_texts(box.folder / "t.jsonl", 20)
    box.service("writer", "producer")
    box.service("writer", "writer")
    box.ask("enqueue", box.folder / "t.jsonl", "-o", box.folder / "out", "-m", f"stub:{DIM}", "--unit-size", "10")
    await_in(worker, lambda: closed(box.folder / "out"))
    check_complete(box.folder / "out", expected, units=2, dim=DIM)
    assert box.server.refused() == []


def test_a_laptop_leaves_its_run_to_the_broker_while_there_is_no_writer(box: Box) -> None:
    with box.server.client("admin") as admin:
        if not admin.execute_command("COMMAND LIST", "FILTERBY", "PATTERN", "waitaof"):
            pytest.skip("this server cannot tell what is on its disk: the laptop waits for a writer")
    expected = write_texts(box.folder / "t.jsonl", 20)
    said = box.ask(
        "enqueue", box.folder / "t.jsonl", "-o", box.folder / "out", "-m", f"stub:{DIM}", "--inline", "--json"
    )
    assert not json.loads(said)["accepted"]
    box.services()
    wait_until(lambda: closed(box.folder / "out"))
    check_complete(box.folder / "out", expected, units=1, dim=DIM)
    assert box.server.refused() == []


def test_a_machine_whose_user_is_revoked_ends_with_the_reason_and_others_take_its_units(box: Box) -> None:
    expected = write_texts(box.folder / "t.jsonl", 800)
    for verb in ("producer", "writer"):
        box.service("writer", verb)
    machines = {
        name: box.service(user, "worker", "--devices", "cpu", EMBQ_MACHINE=name)
        for name, user in (("box", "worker"), ("gpu2", "worker-gpu2"))
    }
    box.ask("enqueue", box.folder / "t.jsonl", "-o", box.folder / "out", "-m", SLOW, "--unit-size", "20")

    def computing() -> set[str]:
        workers = json.loads(box.ask("status", box.folder / "out", "--json"))["workers"]
        return {one["name"].split(".")[0] for one in workers if one["unit"]}

    wait_until(lambda: computing() == {"box", "gpu2"})
    remove = ["broker", "init", box.server.folder, "--remove", "worker-gpu2", "--broker", box.server.url("admin")]
    status, said, wrong = called(*remove, environment={})
    assert status == 0, said + wrong
    assert machines["gpu2"].wait() == 78, machines["gpu2"].said
    assert "Traceback" not in machines["gpu2"].stderr
    (error,) = re.findall(r"^error\[\w+\]: .*$", machines["gpu2"].stderr, re.M)
    assert "the broker's user was removed or has a new password" in error
    assert "EMBQ_BROKER_PASSWORD_FILE" in error
    await_in(machines["box"], lambda: closed(box.folder / "out"))
    check_complete(box.folder / "out", expected, units=40, dim=DIM)


def test_outputs_outside_of_where_they_may_lie_are_refused(box: Box) -> None:
    allowed, outside = box.folder / "allowed", box.folder / "outside"
    allowed.mkdir()
    (allowed / "link").symlink_to(outside)
    _, writer, _ = box.services(EMBQ_OUTPUTS=str(allowed))
    texts = box.folder / "t.jsonl"
    expected = write_texts(texts, 20)

    model = ["-m", f"stub:{DIM}", "--unit-size", "10"]
    for output in (outside, allowed / "link" / "a", allowed / ".." / "outside"):
        status, _, said = box.laptop("enqueue", texts, "-o", output, *model, "--inline")
        assert status == 65, said
        assert "error[outside_outputs]" in said
        assert str(allowed) in said
        assert "EMBQ_OUTPUTS" in said
    assert not outside.exists()

    box.ask("enqueue", texts, "-o", outside, *model)
    await_in(writer, lambda: "output_refused" in writer.stderr)
    box.ask("enqueue", texts, "-o", allowed / "out", *model)
    await_in(writer, lambda: closed(allowed / "out"))
    check_complete(allowed / "out", expected, units=2, dim=DIM)
    assert not list((outside / "commits").iterdir())
    assert writer.stderr.count("output_refused") == 1

    # A laptop cleans the folder; what the broker holds of the run is the admin's to remove.
    status, out, said = box.laptop("gc", allowed / "out")
    assert (status, "the broker's user laptop may not remove what runs have left" in out + said) == (0, True)
    status, _, said = box.laptop("gc", allowed / "out", "--broker", box.server.url("laptop"))
    assert (status, "log in as admin" in said) == (78, True)
    assert called("gc", allowed / "out", environment=box.server.environment("admin"))[0] == 0


def test_a_secret_in_an_input_goes_nowhere(box: Box) -> None:
    url = "https://b.s3.amazonaws.com/a.tar?X-Amz-Signature=hunter2"
    for arguments in ([], ["--upload"], ["--dry-run"]):
        status, out, said = box.laptop("enqueue", url, "-o", box.folder / "out", "-m", f"stub:{DIM}", *arguments)
        assert status == 2
        assert "error[secret_in_url]" in said
        assert "hunter2" not in out + said
    with box.server.client("admin") as admin:
        assert admin.dbsize() == 0
    assert not (box.folder / "out").exists()
