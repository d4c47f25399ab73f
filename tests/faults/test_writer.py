"""The writer is killed at every call, doubled, paused, slowed and kept away; each unit is committed once."""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from conftest import RunCase, make_case
from e2e.session import LOOK_S

from core.commits import CommitLog
from core.embedded import EmbeddedServer
from faults.kit.strace import Call, Zygote, attached, calls_in, unavailable
from faults.kit.table import Recovery

BACK_S = 10.0
"""The bar: a writer that was started again has committed something."""


# --- killed at every call ---


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    if why := unavailable():
        pytest.skip(why)
    zygote = Zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@dataclass(slots=True)
class Sweep:
    """A small run with everything in it, published and waiting for a writer; as often as asked for.

    Unit 0 is in a staging file, unit 1 has a failure, unit 2 is quarantined, unit 3 is plain. The stream also holds a
    second result of unit 0 and one of a fingerprint that is refused. Each unit becomes a part of its own.

    Attributes:
        second: a writer has died before, with part of it committed, the rest delivered, and its files lying about.
    """

    server: EmbeddedServer
    client: redis.Redis
    zygote: Zygote
    folder: Path
    second: bool = False
    made: int = 0

    def published(self) -> tuple[RunCase, dict[int, str]]:
        """The run, and the token of each unit's result."""
        self.made += 1
        run = make_case(self.client, self.folder / f"out{self.made}", 4, part_rows=3)
        run.build()
        tokens = {u: run.claim(u) for u in (0, 1, 3)}
        data = run.data(0)
        staged = {"ref": "zero.arrow", "sha256": hashlib.sha256(data).hexdigest()}
        for name in ("zero.arrow", "again.arrow"):
            (run.layout.staging / name).write_bytes(data)
        fields = run.fields(0, **staged)
        del fields["data"]
        assert run.ledger.publish(0, tokens[0], fields, size=len(data)) == 1
        stream = run.key("res")
        self.client.xadd(stream, {**fields, "u": 0, "token": "again", "bytes": 0, "ref": "again.arrow"})
        self.client.xadd(stream, {**run.fields(3, fingerprint="0" * 32), "u": 3, "token": "other", "bytes": 0})
        assert run.publish(1, tokens[1], failed=[2]) == 1
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
        assert run.publish(3, tokens[3]) == 1
        if self.second:
            assert len(run.ledger.read_results(">", count=9, block_ms=None)) == 1
            number = first.committer.state.n + 1
            for orphan in (
                run.layout.parts / f"part-{number:08d}.parquet",
                run.layout.failures / f"failures-{number:08d}.parquet",
                run.layout.temporary / f"part-{number:08d}.1.parquet",
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
def test_a_writer_killed_at_some_calls_is_followed_exactly(
    sweep: Sweep, recovery: Recovery, random_: random.Random
) -> None:
    calls = undisturbed(sweep)
    names = [call for call in calls if call.name in ("fsync", "rename", "link", "unlink")]
    chosen = [*random_.sample(names, 5), *random_.sample(calls, 5)]
    assert [wrong for call in chosen if (wrong := killed_at(sweep, recovery, call))] == []


@pytest.mark.fault("C1", "SIGKILL for the writer at every system call that changes anything")
@pytest.mark.parametrize("second", [False, True], ids=["the first writer", "the one after it"])
@pytest.mark.timeout(900)
def test_a_writer_killed_at_any_call_is_followed_exactly(sweep: Sweep, recovery: Recovery, second: bool) -> None:
    sweep.second = second
    calls = undisturbed(sweep)
    assert Counter(call.name for call in calls).keys() >= {"write", "fsync", "rename", "link", "unlink", "sendto"}
    assert [wrong for call in calls if (wrong := killed_at(sweep, recovery, call))] == []
    assert recovery.faults >= 0.9 * len(calls)
    print(f"killed at each of {recovery.faults} calls: {dict(Counter(call.name for call in calls))}")  # noqa: T201
