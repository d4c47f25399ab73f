"""P, V: people start things twice or with other options, stop them rudely, and replace them while they are at work."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from embq.producer.feed_policy import MIN_HINTS
from tests.e2e.session import Command, Ledger, await_in, logs, started, succeed
from tests.faults.kit.cluster import DIM, Cluster, Service
from tests.faults.kit.monitor import Attempts
from tests.faults.kit.table import Recovery

OTHER_VERSION = {"set": "embq.core.queue.keys:VERSION", "to": 99}


def arguments(cluster: Cluster, model: str = f"stub:{DIM}?ms_per_sample=10") -> list[str | Path]:
    """Arguments of `embq run` and `embq enqueue`."""
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
    cluster.assert_completes()


@pytest.mark.fault("P2", "two `embq run` are started on one output at the same moment: one works, one is refused")
@pytest.mark.parametrize("broker", ["private server", "shared broker"])
def test_two_runs_on_one_output(cluster: Cluster, recovery: Recovery, broker: str) -> None:
    cluster.write_texts(150)
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
    cluster.begin(100, f"stub:{DIM}?ms_per_sample=10")
    cluster.workers()
    cluster.until(lambda: len(cluster.committed()) >= 5)
    with started("resume", cluster.root, "--quiet") as second:
        recovery.injected()
        # One of the two completes it. They do not shut each other out again and again.
        if second.wait() != 0:
            assert "has taken over" in assert_refused(second, exits=75, code="busy")
    output = cluster.assert_completes()
    assert sum(record["kind"] == "fence" for record in output.records) <= 3


@pytest.mark.fault("P2", "a run that `embq run` works on is enqueued to the services as well")
def test_a_run_at_work_that_is_enqueued_as_well(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(250)
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


# --- P3: the same output, something else ---


@pytest.mark.fault(
    "P3", "the output of a run at work is asked for with another model, precision, dtype or cut of its inputs"
)
def test_another_run_into_an_output_at_work_is_refused(cluster: Cluster, recovery: Recovery, short_tmp: Path) -> None:
    cluster.begin(80)
    cluster.workers()
    other = short_tmp / "other.jsonl"
    other.write_text('{"text": "something else"}\n')
    asked = {
        "model: stub:16?ms_per_sample=5 there, stub:32 asked for": [cluster.input, "-m", "stub:32"],
        "precision: fp32 there, bf16 asked for": [cluster.input, "--precision", "bf16"],
        "dtype: float16 there, float32 asked for": [cluster.input, "--dtype", "float32"],
        "unit_samples: 10 there, 20 asked for": [other, cluster.input, "--unit-size", "20"],
    }
    for difference, given in asked.items():
        options = [str(part) for part in given]
        for option, value in (("-m", "stub:16?ms_per_sample=5"), ("--unit-size", "10")):
            options += [] if option in options else [option, value]
        for verb in ("enqueue", "run"):
            # Another input beside the first one is `--add` to `embq run`; without it, that is what it refuses.
            added = ["--add"] if verb == "run" and other in given else []
            command = cluster.service(verb, *options, *added, "-o", str(cluster.root))
            command.may_end = True
            code = "input_changed" if difference.startswith("unit_samples") else "other_run"
            assert difference in assert_refused(command, exits=65, code=code), verb
            recovery.injected()
    cluster.assert_completes()


@pytest.mark.fault("P3", "a machine has other weights or preprocessing under the same name: it is refused", gate=False)
def test_a_machine_with_another_model_under_the_same_name(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(80)
    gate = cluster.folder / "gate"
    # The run has begun and is far from over, however long the stranger takes to start.
    wait = {"at": "embq.worker.stages.publish:PublishStage.run", "count": 3, "do": "gate", "gate": gate}
    cluster.workers(sabotage=wait, environment={"EMBQ_STALL_S": "120"})
    cluster.until(Path(f"{gate}.reached").exists)
    stranger = cluster.workers(sabotage={"set": "embq.worker.embedders.stub:EMBEDDER_VERSION", "to": 99})
    stranger.may_end = True
    recovery.injected()
    assert stranger.wait() == 78, stranger.said
    assert "wrong_model" in stranger.log
    Path(f"{gate}.open").touch()
    output = cluster.assert_completes()
    assert len({record["fingerprint"] for record in output.records if record["units"]}) == 1


# --- P4: rude ends ---


@pytest.mark.fault("V2", "Ctrl-C twice in `embq run`: begun units are given back, and it ends at once")
def test_ctrl_c_twice(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(12)
    run = ["run", *arguments(cluster, f"stub:{DIM}?ms_per_sample=400&batch_size=8"), "--workers", "2"]
    ledger = Ledger(cluster.root)
    try:
        with started(*run) as command:
            await_in(command, lambda: len(ledger.workers()) == 2 and ledger.finished() >= 1)
            command.signal(signal.SIGINT)
            recovery.injected()
            await_in(command, lambda: "stopping" in command.stderr)
            time.sleep(1.1)  # sooner, it would be the same Ctrl-C that reached two processes
            began = time.monotonic()
            command.signal(signal.SIGINT)
            recovery.injected()
            assert command.wait() == 130, command.said
            # What is read and not embedded yet would keep the devices busy for longer.
            recovery.note("ended after the second Ctrl-C", time.monotonic() - began, bar=15.0)
            assert f"embq resume {cluster.root}" in command.stderr
            assert "Traceback" not in command.stderr + logs(cluster.root)
    finally:
        ledger.close()
    assert len(cluster.committed()) < 12
    succeed("resume", cluster.root, "--workers", "2", "--quiet")
    cluster.assert_exact()


@pytest.mark.fault("V2", "SIGTERM to every process of every service at once, and all are started again")
@pytest.mark.parametrize("who", ["services", "all processes"])
def test_sigterm_to_everything_at_once(cluster: Cluster, recovery: Recovery, who: str) -> None:
    cluster.begin(240)
    with Attempts(cluster.broker) as attempts:
        machines = [cluster.workers() for _ in range(2)]
        for round_ in range(2):
            cluster.until_finished(30 * round_ + 20)
            everybody = [service for service in cluster.services if service.alive()]
            cluster.until(lambda everybody=everybody: all(connected(cluster, service) for service in everybody))
            below = [process for service in everybody for process in service.descendants()]
            for service in everybody:
                service.terminate()
                recovery.injected()
            for process in below if who == "all processes" else []:
                process.terminate()
            for service in everybody:
                assert service.wait() == 0, service.said
            assert not cluster.owners(), "a lease was kept"
            cluster.writer()
            cluster.producer()
            machines = [cluster.workers() for _ in range(2)]
        cluster.until_closed()
        assert len(attempts.reruns()) <= 2 * len(machines)
    cluster.assert_exact()


# --- V: versions ---


def connected(cluster: Cluster, service: Service) -> bool:
    """True when it, or a process of it, talks to the broker."""
    try:
        family = [psutil.Process(service.pid), *service.descendants()]
        ports = {c.raddr.port for process in family for c in process.net_connections("tcp") if c.raddr}
    except psutil.Error:
        return False
    return cluster.broker.port in ports


class Pace:
    """Measures the longest time in which no unit was finished."""

    def __init__(self, cluster: Cluster) -> None:
        self.longest_s = 0.0
        self._cluster = cluster
        self._finished, self._since = cluster.finished(), time.monotonic()

    def during(self, predicate: Callable[[], object]) -> Callable[[], object]:
        """`predicate`, to be asked again and again, with a look at the pace each time."""

        def look() -> object:
            now, finished = time.monotonic(), self._cluster.finished()
            self.longest_s = max(self.longest_s, now - self._since)
            if finished != self._finished:
                self._finished, self._since = finished, now
            return predicate()

        return look


def longest_pause(root: Path) -> float:
    """Seconds between two commit records, at most."""
    times = sorted(path.stat().st_mtime for path in (root / "commits").iterdir())
    return max(after - before for before, after in pairwise(times))


@pytest.mark.fault("V2", "machines, writer and producer are replaced one by one while the run goes on")
def test_a_rolling_upgrade(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(400, f"stub:{DIM}?ms_per_sample=20")
    writer, producer = cluster.services
    with Attempts(cluster.broker) as attempts:
        machines = [cluster.workers() for _ in range(2)]
        cluster.until_finished(10)
        pace = Pace(cluster)

        def replace(old: Service, start: Callable[[], Service], ready: Callable[[Service], object]) -> None:
            new = start()
            cluster.until(pace.during(lambda: ready(new)))
            old.terminate()
            recovery.injected()
            cluster.until(pace.during(lambda: not old.alive()))
            assert old.wait() == 0, old.said

        replace(machines[0], cluster.workers, cluster.held_on)
        replace(writer, cluster.writer, lambda new: connected(cluster, new))
        replace(machines[1], cluster.workers, cluster.held_on)
        replace(producer, cluster.producer, lambda new: connected(cluster, new))
        finished = cluster.finished()
        assert finished < 400, "the run was over before all were replaced"
        cluster.until(pace.during(lambda: cluster.finished() >= 400), 120)
        cluster.until_closed()
        assert len(attempts.reruns()) <= len(machines)
    recovery.note("longest time without a result", pace.longest_s, bar=10.0)
    recovery.note("longest time without a commit", longest_pause(cluster.root), bar=10.0)
    output = cluster.assert_exact()
    assert len({token.split(":")[1] for token in output.tokens.values()}) == 4
    assert [record["kind"] for record in output.records].count("fence") == 2


@pytest.mark.fault("V1", "a worker, a writer and a producer of another protocol version stand among the others")
def test_services_of_another_version_among_the_others(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(60)
    strangers = [
        cluster.service(*verb, sabotage=OTHER_VERSION)
        for verb in (("worker", "--devices", "cpu"), ("writer",), ("producer",))
    ]
    recovery.injected(3)
    cluster.writer()
    cluster.producer()
    cluster.enqueue()
    # Everything but a worker of this version is at work: the strangers have all the time to take what is not theirs.
    client = cluster.broker.client()

    def looks() -> int:
        return int(client.info("commandstats")["cmdstat_hgetall"]["calls"])

    cluster.until(lambda: all(connected(cluster, stranger) for stranger in strangers))
    cluster.until(lambda: waiting_hints(cluster) == MIN_HINTS)
    before = looks()
    cluster.until(lambda: looks() > before + 60)
    assert waiting_hints(cluster) == MIN_HINTS
    assert cluster.finished() == 0
    assert not cluster.owners()

    cluster.workers()
    output = cluster.assert_completes()
    assert [record["kind"] for record in output.records].count("fence") == 1
    for stranger in strangers:
        assert stranger.alive()
        stranger.terminate()
        assert stranger.wait() == 0, stranger.said


def waiting_hints(cluster: Cluster) -> int:
    """Hints of all queues that nobody has taken."""
    client = cluster.broker.client()
    return sum(client.llen(key) for key in client.scan_iter("rq:queue:embq.*", _type="list"))


@pytest.mark.fault("V1", "a worker publishes results of another protocol version: they are refused as wrong_version")
def test_results_of_another_version_are_refused(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(40)
    writer = cluster.writer()
    cluster.producer()
    cluster.enqueue(f"stub:{DIM}?ms_per_sample=20&batch_size=10")
    stranger = cluster.workers(sabotage={"set": "embq.worker.stages.publish:VERSION", "to": 99})
    recovery.injected()
    cluster.until(lambda: "code=wrong_version" in writer.log)
    assert cluster.committed() == []
    stranger.kill()
    cluster.workers(count=2)
    cluster.assert_completes()


@pytest.mark.fault("V1", "all services are replaced by those of another protocol version in mid-run")
@pytest.mark.parametrize("order", ["old ones end first", "both at once"])
def test_a_run_goes_on_under_another_version(cluster: Cluster, recovery: Recovery, order: str) -> None:
    cluster.begin(150, f"stub:{DIM}?ms_per_sample=10")
    cluster.workers()
    old = list(cluster.services)
    cluster.until_finished(30)

    def end_the_old() -> None:
        for service in old:
            service.terminate()
            recovery.injected()
        for service in old:
            assert service.wait() == 0, service.said

    def begin_the_new() -> None:
        for verb in (("writer",), ("producer",), ("worker", "--devices", "cpu")):
            cluster.service(*verb, sabotage=OTHER_VERSION)
        resume = cluster.service("resume", str(cluster.root), sabotage=OTHER_VERSION)
        resume.may_end = True
        assert resume.wait() == 0, resume.said

    if order == "both at once":
        begin_the_new()
        committed = len(cluster.committed())
        cluster.until(lambda: len(cluster.committed()) > committed or cluster.closed())
        end_the_old()
    else:
        end_the_old()
        begin_the_new()
    cluster.assert_completes()
