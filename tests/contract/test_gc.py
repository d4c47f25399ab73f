"""`embq gc` removes what nobody will use any more, and nothing that somebody may."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import redis
from rq import Queue

from embq.app.cli.entry_point import run as embq
from embq.app.gc.collect import Collected, collect
from embq.core.broker.embedded import EmbeddedServer, kept_off
from embq.core.errors import Exit
from embq.core.queue.keys import RUNS, WORKERS
from embq.core.queue.result_stream import PART_SUFFIX, RESULT_SUFFIX, PublishVerdict
from embq.core.queue.runs import register, registered
from embq.core.settings import Settings
from embq.writer.service import WriterService
from tests.support.outputs.run_case import MakeRun, RunCase

HOUR = 3600.0


@pytest.fixture
def settings(server: EmbeddedServer) -> Settings:
    return Settings(broker_url=server.url)


def gc(run: RunCase, settings: Settings, *, older_than_s: float = 24 * HOUR, dry_run: bool = False) -> Collected:
    return collect(
        run.layout.root, settings, must_answer=bool(settings.broker_url), older_than_s=older_than_s, dry_run=dry_run
    )


def leave(path: Path, age_s: float = 48 * HOUR) -> Path:
    """A file that was last written `age_s` ago."""
    path.write_bytes(b"x" * 1000)
    written = time.time() - age_s
    os.utime(path, (written, written))
    return path


def staging_name(run: RunCase, u: int, token: str, suffix: str = RESULT_SUFFIX) -> str:
    return f"{run.units[u].unit_id}.{token.replace(':', '_')}{suffix}"


def removed(collected: Collected) -> set[str]:
    return {item.path for item in collected.orphans.files}


def finished(run: RunCase) -> RunCase:
    writer = run.writer()
    run.finish(writer)
    writer.release()
    return run


# --- files ---


def test_what_dead_writers_left_behind_goes_and_what_records_name_stays(run: RunCase, settings: Settings) -> None:
    writer = run.writer()
    run.work_one(0)
    run.work_one(1, failed=[0])
    writer.drain()
    orphans = [
        leave(run.layout.parts / "part-00000001.parquet"),
        leave(run.layout.failures / "failures-00000001.parquet"),
        leave(run.layout.temporary / "part-00000002.1.parquet"),
        leave(run.layout.temporary / "manifest-00000.parquet"),
        leave(run.layout.temporary / "run-0123456789abcdef.12345678.json"),
    ]
    for path in [*run.layout.parts.iterdir(), *run.layout.failures.iterdir()]:
        os.utime(path, (0, 0))
    collected = gc(run, settings)
    assert removed(collected) == {str(path.relative_to(run.layout.root)) for path in orphans}
    assert collected.orphans.bytes == 5000
    run.finish(writer)
    assert len(run.rows()) == 3 * 8 - 1


@pytest.mark.parametrize(("older_than_s", "goes"), [(HOUR, True), (3 * HOUR, False)])
def test_what_is_not_old_enough_stays(run: RunCase, settings: Settings, older_than_s: float, goes: bool) -> None:
    finished(run)
    orphan = leave(run.layout.temporary / "part-00000001.1.parquet", 2 * HOUR)
    collected = gc(run, settings, older_than_s=older_than_s)
    assert orphan.exists() is not goes
    assert collected.orphans.young == (not goes)
    assert [round(item.age_s / HOUR) for item in collected.orphans.files] == [2] * goes


def test_what_the_next_record_may_name_stays_until_there_is_none_to_come(run: RunCase, settings: Settings) -> None:
    writer = run.writer()
    run.work_one(0)
    writer.drain()
    number = writer.committer.state.n + 1
    paths = [
        leave(run.layout.parts / f"part-{number:08d}.parquet"),
        leave(run.layout.temporary / f"commit-{number:08d}.0123456789abcdef.json"),
    ]
    collected = gc(run, settings, older_than_s=0)
    assert removed(collected) == set()
    assert collected.orphans.in_use == 2
    run.finish(writer)
    paths.append(leave(run.layout.parts / "part-00000999.parquet"))
    gc(run, settings, older_than_s=0)
    assert not any(path.exists() for path in paths[1:])
    run.assert_exact()


@pytest.mark.parametrize("suffix", [RESULT_SUFFIX, PART_SUFFIX])
def test_the_results_of_live_leases_and_results_that_wait_stay_and_others_go(
    run: RunCase, settings: Settings, suffix: str
) -> None:
    def named(u: int, token: str) -> str:
        return staging_name(run, u, token, suffix)

    run.writer()
    holds, waits, ended = run.claim(0), run.claim(1), run.claim(2)
    data = run.data(1)
    (run.layout.staging / named(1, waits)).write_bytes(data)
    assert run.publish(1, waits, ref=named(1, waits), sha256="0" * 64) is PublishVerdict.ACCEPTED
    run.ledger.release(2, ended)
    kept = {
        leave(run.layout.staging / named(0, holds)),
        leave(run.layout.staging / f".{named(0, holds)}"),
        leave(run.layout.staging / named(1, waits)),
        leave(run.layout.staging / ".shared"),
    }
    leave(run.layout.staging / named(2, ended))
    leave(run.layout.staging / f".{named(2, ended)}")
    leave(run.layout.staging / named(0, "1-0:dead:0123456789ab"))
    collected = gc(run, settings, older_than_s=0)
    assert len(removed(collected)) == 3
    assert set(run.layout.staging.iterdir()) == kept


def test_the_second_lease_on_a_unit_is_a_lease(run: RunCase, settings: Settings) -> None:
    run.writer()
    run.client.hset(run.key("spare"), "0", "1-0:second:0123456789ab")
    kept = leave(run.layout.staging / staging_name(run, 0, "1-0:second:0123456789ab"))
    gc(run, settings)
    assert kept.exists()


def test_staged_results_stay_where_nobody_can_say_whose_they_are(run: RunCase, settings: Settings) -> None:
    writer = run.writer()
    orphan = leave(run.layout.staging / staging_name(run, 0, "1-0:dead:0123456789ab"))
    collected = gc(run, Settings())
    assert orphan.exists()
    assert "no broker" in " ".join(collected.notes)
    away = Settings(broker_url="unix:///nowhere/at/all.sock")
    collected = collect(run.layout.root, away, must_answer=False, older_than_s=0, dry_run=False)
    assert orphan.exists()
    assert "no broker answers" in " ".join(collected.notes)
    run.finish(writer)
    orphan = leave(orphan)
    assert gc(run, Settings()).notes == ()
    assert not orphan.exists()


def test_the_leases_of_embq_run_are_asked_for_and_end_with_its_server(run: RunCase) -> None:
    run.writer()
    token = "1-0:at-work:0123456789ab"
    orphan = leave(run.layout.staging / staging_name(run, 0, token))
    with EmbeddedServer(run.layout.broker) as server, redis.Redis.from_url(server.url) as client:
        client.hset(run.key("owner"), "0", token)
        gc(run, Settings())
        assert orphan.exists()
    with kept_off(run.layout.broker) as alone:
        assert alone, "the server is gone"
        gc(run, Settings())
        assert orphan.exists(), "somebody is at work there, and does not answer"
    gc(run, Settings())
    assert not orphan.exists()


def test_a_damaged_log_is_no_ground_to_delete_anything(
    run: RunCase, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(run)
    orphan = leave(run.layout.parts / "part-00000001.parquet")
    (run.layout.commits / "00000002.json").write_text("{}")
    monkeypatch.setenv("EMBQ_BROKER_URL", settings.broker_url)
    assert embq(["gc", str(run.layout.root)]) == Exit.OUTPUT
    assert orphan.exists()
    assert run.info.run in registered(run.client)


def test_a_dry_run_removes_nothing(run: RunCase, settings: Settings) -> None:
    finished(run)
    orphan = leave(run.layout.parts / "part-00000001.parquet")
    first, second = gc(run, settings, dry_run=True), gc(run, settings, dry_run=True)
    assert orphan.exists()
    assert first.broker is not None
    assert first.broker.keys > 1
    assert removed(first) == removed(second) == {"parts/part-00000001.parquet"}
    third = gc(run, settings)
    assert (removed(third), third.broker) == (removed(first), first.broker), "it said what would be removed"
    assert not orphan.exists()


# --- the broker ---


def test_a_finished_run_is_taken_out_of_the_broker_and_others_stay(make_run: MakeRun, settings: Settings) -> None:
    run, other = make_run(3), make_run(3)
    client = run.client
    other.build()
    writer = run.writer()
    run.feeder().tick()
    assert other.feeder().tick() == 3
    assert run.pop() is not None
    Queue.dequeue_any([run.queue], None, client)  # popped, and its worker died
    for u in range(3):
        run.work_one(u)
    writer.drain()
    writer.release()
    client.zadd(WORKERS, {"somebody": 1})
    ours = (run.info.run.encode(), b"embq:speeds:")  # those live for 3 s

    def content(key: bytes) -> object:  # the dump of a set changes with its hash table
        return client.smembers(key) if client.type(key) == b"set" else client.dump(key)

    of_others = {key: content(key) for key in client.scan_iter() if not any(name in key for name in ours)}

    collected = gc(run, settings)

    assert collected.broker is not None
    assert collected.broker.hints == 2
    left = [key for key in client.scan_iter() if run.info.run.encode() in key]
    assert left == []
    assert not client.hexists(RUNS, run.info.run)
    assert not client.exists(run.queue.key, run.queue.intermediate_queue.key)
    assert not client.sismember("rq:queues", run.queue.key)
    assert client.zscore(WORKERS, "somebody") == 1
    shared = {RUNS.encode(), b"rq:queues", run.queue.key.encode(), run.queue.intermediate_queue.key.encode()}
    assert {key: content(key) for key in of_others if key not in shared} == {
        key: dump for key, dump in of_others.items() if key not in shared
    }
    assert client.hexists(RUNS, other.info.run)
    client.zrem(WORKERS, "somebody")


def test_an_unfinished_run_stays_in_the_broker(run: RunCase, settings: Settings) -> None:
    writer = run.writer()
    run.work_one(0)
    writer.drain()
    assert gc(run, settings).broker is None
    run.finish(writer)
    run.assert_exact()


def test_a_run_whose_writer_is_there_stays_in_the_broker(run: RunCase, settings: Settings) -> None:
    writer = run.writer()
    run.finish(writer)
    run.client.persist(f"embq:{{{run.info.run}}}:writer")  # however slow this machine is
    collected = gc(run, settings)
    assert collected.broker is None
    assert "a writer holds the run" in " ".join(collected.notes)
    assert run.ledger.meta()["state"] == "done"


def test_no_resident_service_brings_a_forgotten_run_back(run: RunCase, settings: Settings) -> None:
    register(run.client, run.record)
    service = WriterService(run.client, version="test")
    rounds = 0

    def stopped() -> bool:
        nonlocal rounds
        if run.info.run in service.runs and run.ledger.gen():
            run.feeder().tick()
            run.work_off_hints()
        if run.ledger.meta().get("state") == "done" and run.info.run not in service.runs:
            gc(run, settings)
        if not run.client.hexists(RUNS, run.info.run):
            run.feeder().tick()
            rounds += 1
        return rounds > 150  # a service looks every second

    service.serve(stopped)
    assert [key for key in run.client.scan_iter() if run.info.run.encode() in key] == []
    run.assert_exact()


# --- the verb ---


def test_the_verb_tells_what_it_does(
    run: RunCase, settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(run)
    for number in range(25):
        leave(run.layout.temporary / f"part-{number:08d}.1.parquet")
    monkeypatch.setenv("EMBQ_BROKER_URL", settings.broker_url)
    given = ["gc", str(run.layout.root)]

    assert embq([*given, "--dry-run", "--older-than", "1.5d"]) == Exit.DONE
    told = capsys.readouterr().out
    assert "would remove 25 files, 25.0 kB" in told
    assert "and 5 more" in told
    assert "would remove 4 keys and 0 hints" in told

    assert embq([*given, "--json", "--older-than", "3d"]) == Exit.DONE
    shape = json.loads(capsys.readouterr().out)
    assert (shape["schema"], shape["run"], shape["files"], shape["young"]) == (1, run.info.run, [], 25)

    assert embq([*given]) == Exit.DONE
    assert "removed 25 files" in capsys.readouterr().out
    assert list(run.layout.temporary.iterdir()) == []
    run.assert_exact()


@pytest.mark.parametrize("age", ["", "soon", "-1h", "1w", "1 h", "h"])
def test_an_age_that_is_none_is_refused(run: RunCase, capsys: pytest.CaptureFixture[str], age: str) -> None:
    assert embq(["gc", str(run.layout.root), "--older-than", age]) == Exit.USAGE
    assert "is not a time" in capsys.readouterr().err


def test_a_broker_that_was_named_must_answer(run: RunCase) -> None:
    assert embq(["gc", str(run.layout.root), "--broker", "unix:///nowhere/at/all.sock"]) == Exit.UNAVAILABLE
