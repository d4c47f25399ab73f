"""The writer is killed at every call, doubled, paused, slowed and kept away; each unit is committed once."""

from __future__ import annotations

import hashlib
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis

from embq.core.broker.embedded import EmbeddedServer
from embq.core.formats.part import UNIT_FORMATS
from embq.core.queue.result_stream import PublishVerdict
from embq.core.rows.spec import FORMATS
from embq.core.run.commit_log import CommitLog
from tests.e2e.plain import read_joined_hdf5
from tests.e2e.session import LOOK_S
from tests.faults.kit.cluster import QUICK_LEASES, Cluster, Service, held_after, let_go
from tests.faults.kit.strace import Call, Zygote, attached, calls_in, unavailable
from tests.faults.kit.table import Recovery
from tests.support.outputs.run_case import RunCase, make_case
from tests.support.second_reader.checks import verify

BACK_S = 10.0
"""The bar: a writer that was started again has committed something."""


# --- killed at every call ---


@dataclass(slots=True)
class Sweep:
    """A small run with everything in it, published and waiting for a writer; as often as asked for.

    Unit 0 is in a staging file, unit 1 has a failure, unit 2 is quarantined, unit 3 is a part that a worker has written
    where the format allows it. The stream also holds a second result of unit 0 and one of a fingerprint that is
    refused. Each unit becomes a part of its own.

    Attributes:
        format: of its parts.
        second: a writer has died before, with part of it committed, the rest delivered, and its files lying about.
    """

    server: EmbeddedServer
    client: redis.Redis
    zygote: Zygote
    folder: Path
    format: str = "parquet"
    second: bool = False
    made: int = 0

    def published(self) -> tuple[RunCase, dict[int, str]]:
        """The run, and the token of each unit's result."""
        self.made += 1
        run = make_case(self.client, self.folder / f"out{self.made}", 4, part_rows=3, format=self.format)
        run.build()
        tokens = {u: run.claim(u) for u in (0, 1, 3)}
        data = run.data(0)
        zero, again = (f"{run.units[0].unit_id}.{name}.arrow" for name in ("zero", "again"))
        staged = {"ref": zero, "sha256": hashlib.sha256(data).hexdigest()}
        for name in (zero, again):
            (run.layout.staging / name).write_bytes(data)
        fields = run.fields(0, **staged)
        del fields["data"]
        assert run.ledger.publish(0, tokens[0], fields, size=len(data)) is PublishVerdict.ACCEPTED
        stream = run.key("res")
        self.client.xadd(stream, {**fields, "u": 0, "token": "again", "bytes": 0, "ref": again})
        self.client.xadd(stream, {**run.fields(3, fingerprint="0" * 32), "u": 3, "token": "other", "bytes": 0})
        assert run.publish(1, tokens[1], failed=[2]) is PublishVerdict.ACCEPTED
        for _ in range(3):
            run.age()
            token = run.claim(2, "dies")
            run.ledger.abandon("dies", "killed", blame={token: None})
        assert run.client.hexists(run.key("pub"), "2"), "it is quarantined"
        tokens[2] = "quarantine"
        if self.second:
            first = run.writer()
            first.step()
            assert 0 < first.committer.state.count < 3
        publish = run.publish_part if self.format in UNIT_FORMATS else run.publish
        assert publish(3, tokens[3]) is PublishVerdict.ACCEPTED
        if self.second:
            assert len(run.ledger.results.read(">", count=9, block_ms=None)) == 1
            number = first.committer.state.n + 1
            files = {file.path for commit in CommitLog(run.layout).read() for file in commit.files}
            for orphan in (
                *(run.layout.root / re.sub(r"\d{8}", f"{number:08d}", path) for path in files),
                run.layout.temporary / f"part-{number:08d}.1.rows.unfinished",
                run.layout.temporary / f"commit-{number:08d}.{first.id}.json",
            ):
                orphan.write_bytes(b"half")
            first.release()  # its lock has lapsed
        return run, tokens

    def write(self, run: RunCase, inject: Sequence[str] = ()) -> tuple[int, list[Call]]:
        """`embq writer` until it has closed the run, or has died; its exit status and its calls."""
        log = self.folder / f"writer{self.made}.log"
        environment = {"EMBQ_BROKER_URL": self.server.url}
        fork = self.zygote.start(["writer", "--run", run.info.run], log, environment)
        calls = self.folder / f"calls{self.made}.log"
        with attached(fork.pid, calls, inject=inject):
            fork.go()
            end = time.monotonic() + 60
            while fork.alive() and not CommitLog(run.layout).replay(4).closed:
                assert time.monotonic() < end, fork.log
                time.sleep(LOOK_S / 4)
            fork.signal(signal.SIGTERM)
            status = fork.wait()
        assert "Traceback" not in fork.log
        return status, calls_in(calls, fork.pid)

    def check(self, run: RunCase, tokens: dict[int, str]) -> None:
        """The next writer brings the run to its exact end from what was delivered, and nothing is done again."""
        before = {path.name: path.read_bytes() for path in run.layout.commits.iterdir()}
        run.finish(run.writer())
        after = {path.name: path.read_bytes() for path in run.layout.commits.iterdir()}
        assert before.items() <= after.items(), "what was committed stays as it was"
        units = [unit for commit in CommitLog(run.layout).read() for unit in commit.units]
        assert {unit.u: unit.token for unit in units} == tokens, "a unit was computed again"
        run.assert_exact(failures=[("1:2", "decode"), ("", "crash")], whole=[2])
        assert verify(run.layout.root, mode="quick").ok
        if self.format == "hdf5":
            joined = [key for _, key, _ in run.rows()]
            assert read_joined_hdf5(run.layout.root)["key"] == joined
        assert {path.name for path in run.layout.staging.iterdir()} == {".shared"}
        meta = run.ledger.meta()
        assert (meta["state"], meta["done"], meta["bytes"]) == ("done", "4", "0")
        assert run.client.xlen(run.key("res")) == 0
        emptied = ("hinted", "due", "owner", "spare", "busy", "att", "poison", "pub")
        assert not run.client.exists(*(run.key(part) for part in emptied))


@pytest.fixture
def sweep(zygote: Zygote, own_server: EmbeddedServer, own_client: redis.Redis, short_tmp: Path) -> Sweep:
    return Sweep(own_server, own_client, zygote, short_tmp)


def killed_at(sweep: Sweep, recovery: Recovery, call: Call) -> str:
    """Kill a writer at one of its calls, and check what the next one makes of it; what is wrong, or ""."""
    run, tokens = sweep.published()
    status, made = sweep.write(run, [call.kill()])
    try:
        if status == 0:
            return ""  # how often it looks for more before it is told to end is left to chance
        assert status == -signal.SIGKILL, f"it ended with {status}"
        assert (made[-1].name, made[-1].number) == (call.name, call.number), f"it was killed at {made[-1]}"
        recovery.injected()
        sweep.check(run, tokens)
    except AssertionError as error:
        return f"{call}: {error}"
    return ""


def undisturbed(sweep: Sweep) -> list[Call]:
    """The calls of a whole run at which a kill can make a difference."""
    for _ in ("the first writer of a server also loads the scripts", "this one is like all that follow"):
        run, tokens = sweep.published()
        status, calls = sweep.write(run)
        assert status == 0
        sweep.check(run, tokens)
    return [call for call in calls if call.changes]


@pytest.mark.fault("C1", "SIGKILL for the writer at a system call", gate=True)
@pytest.mark.parametrize("format", ["hdf5", "parquet"])  # the next one kills it at every call, in all formats
def test_a_writer_killed_at_some_calls_is_followed_exactly(
    sweep: Sweep, recovery: Recovery, random_: random.Random, format: str
) -> None:
    sweep.format = format
    calls = undisturbed(sweep)
    names = [call for call in calls if call.name in ("fsync", "rename", "link", "unlink")]
    chosen = [*random_.sample(names, 3), *random_.sample(calls, 2)]
    assert [wrong for call in chosen if (wrong := killed_at(sweep, recovery, call))] == []


@pytest.mark.fault("C1", "SIGKILL for the writer at every system call that changes anything")
@pytest.mark.parametrize("second", [False, True], ids=["the first writer", "the one after it"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.timeout(900)
def test_a_writer_killed_at_any_call_is_followed_exactly(
    sweep: Sweep, recovery: Recovery, format: str, second: bool
) -> None:
    sweep.format, sweep.second = format, second
    calls = undisturbed(sweep)
    assert Counter(call.name for call in calls).keys() >= {"write", "fsync", "rename", "link", "unlink", "sendto"}
    assert [wrong for call in calls if (wrong := killed_at(sweep, recovery, call))] == []
    assert recovery.faults >= 0.9 * len(calls)
    print(f"killed at each of {recovery.faults} calls: {dict(Counter(call.name for call in calls))}")  # noqa: T201


# --- a disk that does not keep what it was given ---


def fsync_failed_at(sweep: Sweep, recovery: Recovery, call: Call) -> str:
    """Let one fsync of a writer fail, and check what the next one makes of it; what is wrong, or ""."""
    run, tokens = sweep.published()
    status, made = sweep.write(run, [f"fsync:error=EIO:when={call.number}"])
    try:
        kinds = [one.kind for one in CommitLog(run.layout).read()]
        # A fence that could not be synced is followed by another one; anything else ends the writer. Once the log is
        # closed the sweep asks the writer to stop, which may find it on its way out.
        good = {0} if kinds[:2] == ["fence"] * 2 else {74, -signal.SIGTERM} if "close" in kinds else {74}
        assert status in good
        recovery.injected()
        (failed,) = [position for position, one in enumerate(made) if "EIO" in one.text]
        again = [one for one in made[failed + 1 :] if one.name == "fsync" and one.text == made[failed].text]
        assert not again, "after a failed fsync the kernel may take the pages for written"
        assert list(run.layout.temporary.iterdir()) == [], "what could not be synced is thrown away"
        sweep.check(run, tokens)
    except AssertionError as error:
        return f"{call}: {error}"
    return ""


@pytest.mark.fault("S4", "an fsync of the writer fails, each one in turn")
def test_a_failed_fsync_is_not_tried_again_and_loses_nothing(sweep: Sweep, recovery: Recovery) -> None:
    calls = [call for call in undisturbed(sweep) if call.name == "fsync"]
    assert len(calls) > 10
    assert [wrong for call in calls if (wrong := fsync_failed_at(sweep, recovery, call))] == []


# --- killed and started again ---


def fences(cluster: Cluster) -> int:
    """Number of writers that have begun so far."""
    return sum(record["kind"] == "fence" for record in cluster.records())


def data_of(cluster: Cluster, epoch: int) -> int:
    """Number of records with results of the writer with this epoch."""
    return sum(record["kind"] == "data" and record["epoch"] >= epoch for record in cluster.records())


def waits(writer: Service) -> bool:
    """True when a writer talks to the broker."""
    return bool(psutil.Process(writer.pid).net_connections("tcp"))


def _killed_at_work(alone: bool) -> object:
    """The resident writer in every run of the tests; in `test_kills` that of one run is killed three times."""
    sentence = "SIGKILL for a writer at work, and a new start at once"
    marks = pytest.mark.fault("C1", sentence, gate=not alone)
    return pytest.param(alone, marks=marks, id="of one run" if alone else "resident")


@pytest.mark.parametrize("alone", [_killed_at_work(False), _killed_at_work(True)])
def test_a_writer_that_was_killed_is_back_at_work(cluster: Cluster, recovery: Recovery, alone: bool) -> None:
    first = cluster.begin(150, "stub:16?ms_per_sample=8", alone=alone)
    cluster.workers(count=2, sabotage=held_after(50, cluster.folder / "hold"))
    cluster.until(lambda: data_of(cluster, 1) >= 1)
    first.kill()
    let_go(cluster.folder / "hold")
    cluster.writer(*(["--run", cluster.run()] if alone else []))
    seconds = cluster.until(lambda: data_of(cluster, 2) >= 1)
    recovery.note("writer started again -> first commit", seconds, bar=BACK_S)
    cluster.assert_completes()


@pytest.mark.fault("V2", "one resident writer is started and the other asked to stop: no pause")
def test_a_second_writer_takes_over_from_one_that_is_asked_to_stop(cluster: Cluster, recovery: Recovery) -> None:
    first = cluster.begin(500, "stub:16?ms_per_sample=8")
    cluster.workers(count=2)
    cluster.until(lambda: data_of(cluster, 1) >= 1)
    second = cluster.writer()
    cluster.until(lambda: bool(second.said_times("started")))
    assert fences(cluster) == 1, "it waits its turn"
    first.terminate()
    seconds = cluster.until(lambda: fences(cluster) == 2)
    recovery.note("SIGTERM for one writer -> the other one writes", seconds, bar=BACK_S)
    assert first.wait() == 0
    cluster.until_closed()
    assert "run_not_written" not in second.log
    cluster.assert_exact()


# --- two writers ---


@pytest.mark.fault("C3", "a second writer for the same run")
def test_a_second_writer_is_refused(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(400, "stub:16?ms_per_sample=10")
    cluster.workers(count=2)
    cluster.until(lambda: data_of(cluster, 1) >= 1)
    recovery.injected()
    second = cluster.writer("--run", cluster.run())
    assert second.wait() == 75
    assert "--takeover" in second.log
    cluster.until_closed()
    assert fences(cluster) == 1
    cluster.assert_exact()


@pytest.mark.fault("C3", "a paused writer is taken over, and goes on afterwards")
def test_a_writer_that_was_paused_and_taken_over_ends_at_its_next_commit(cluster: Cluster, recovery: Recovery) -> None:
    first = cluster.begin(120, "stub:16?ms_per_sample=8", alone=True)
    cluster.workers(count=2, sabotage=held_after(40, cluster.folder / "hold"))
    cluster.until(lambda: data_of(cluster, 1) >= 1)
    first.suspend()
    let_go(cluster.folder / "hold")
    second = cluster.writer("--run", cluster.run(), "--takeover")
    seconds = cluster.until(lambda: data_of(cluster, 2) >= 1)
    recovery.note("takeover -> first commit", seconds, bar=BACK_S)
    first.resume()
    assert first.wait() == 75
    cluster.until_closed()
    assert second.alive()
    cluster.assert_exact()


@pytest.mark.fault("C3", "a paused writer loses its lock to one that waits, and goes on afterwards")
def test_a_resident_writer_that_was_paused_waits_its_turn_afterwards(cluster: Cluster, recovery: Recovery) -> None:
    first = cluster.begin(300, "stub:16?ms_per_sample=10")
    cluster.workers(count=2)
    cluster.until(lambda: data_of(cluster, 1) >= 1)
    second = cluster.writer()
    cluster.until(lambda: waits(second))
    first.suspend()
    seconds = cluster.until(lambda: data_of(cluster, 2) >= 1)
    recovery.note("writer stands still -> one that waits has committed", seconds, bar=BACK_S)
    first.resume()
    cluster.until(lambda: first.said_times("run_held") == 1)
    second.terminate()
    cluster.until(lambda: fences(cluster) == 3)
    assert second.wait() == 0
    cluster.assert_completes()


@pytest.mark.fault("C3", "a disk so slow that one commit takes longer than a writer's lock lasts, and a second writer")
def test_a_slow_writer_keeps_its_run(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    if why := unavailable():
        pytest.skip(why)
    cluster.write_texts(60)
    cluster.enqueue("stub:16?ms_per_sample=5")
    first = cluster.writer()
    cluster.until(lambda: fences(cluster) == 1)
    second = cluster.writer()
    cluster.until(lambda: waits(second))
    cluster.producer()
    with attached(first.pid, tmp_path / "calls", trace="fsync", inject=["fsync:delay_enter=8s:when=1..2"]):
        recovery.injected()
        cluster.workers(count=2)
        cluster.until(lambda: data_of(cluster, 1) >= 1)
        cluster.until_closed()
    assert fences(cluster) == 1
    assert second.said_times("run_opened") == 0
    cluster.assert_exact()


# --- away for long ---


@pytest.mark.fault("C2", "the writer is away, and the stream fills up to its bound")
def test_results_are_held_and_nothing_is_done_again_while_the_writer_is_away(
    cluster: Cluster, recovery: Recovery
) -> None:
    limit, away_s = 6, 15.0
    cluster.write_texts(60)
    cluster.enqueue("stub:16?ms_per_sample=2")
    first = cluster.writer()
    client = cluster.broker.client()
    cluster.until(lambda: cluster.meta().get("state") == "running")
    first.kill()
    client.hset(cluster.ledger.key("meta"), "limit_entries", limit)
    cluster.producer(environment=QUICK_LEASES)
    workers = cluster.workers(count=2, environment=QUICK_LEASES)
    stream = cluster.ledger.key("res")
    cluster.until(lambda: client.xlen(stream) == limit)
    time.sleep(3.0)  # what was in hand is embedded by then, and no more is claimed
    held = client.hgetall(cluster.ledger.key("owner"))
    processes = workers.processes()
    memory = {process.pid: process.memory_info().rss for process in processes}
    end = time.monotonic() + away_s
    cluster.until(lambda: time.monotonic() > end)  # the outage: several leases long

    assert client.hgetall(cluster.ledger.key("owner")) == held, "the heartbeat keeps what is held"
    assert client.xlen(stream) == limit
    # A worker that came too late to hold anything may help with a unit that takes long: that one runs in two lanes.
    helped = client.hgetall(cluster.ledger.key("spare"))
    assert {u for u, count in cluster.attempts().items() if count != 1} <= {int(u) for u in helped}
    assert [process.pid for process in workers.processes()] == [process.pid for process in processes]
    grown = max(process.memory_info().rss - memory[process.pid] for process in processes)
    assert grown < 20 * 2**20, f"{grown / 2**20:.0f} MB more"

    cluster.writer()
    recovery.note("writer started again -> first commit", cluster.until(lambda: data_of(cluster, 2) >= 1), bar=BACK_S)
    output = cluster.assert_completes()
    done = {unit["u"]: unit["token"] for record in output.records for unit in record["units"]}
    for u, token in held.items():
        assert done[int(u)] in (token.decode(), helped.get(u, b"").decode()), "a unit was done again"
