"""A worker that somebody has broken into: it has the rights of the broker's user `worker`, and may write to `_staging`.

Its commands go to a server with embq's own users; writer and feeder are the real ones, as the user `writer`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from redis.exceptions import NoPermissionError

from embq.app.gc.collect import live_tokens
from embq.app.services.broker_metrics import BrokerMetrics
from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor
from embq.core.queue.keys import MAX_ATTEMPTS, SERVICES, VERSION, WORKERS
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.runs import register
from embq.core.queue.scripts import Loader, load_scripts
from embq.core.rows.results import FAILURE_SCHEMA, encode_result, row_schema
from embq.core.rows.spec import RowSpec
from embq.core.run.commit_log import CommitLog
from embq.core.service.log import Events
from embq.core.service.metrics import MetricSamples
from embq.core.wire import Skips, skip_counts
from embq.producer.feeder import Feeder
from embq.writer.run_writer import OVERFULL_S, RECONCILE_S, RunWriter
from embq.writer.service import WriterService
from tests.support.outputs.run_case import DIM, FINGERPRINT, LEASE_S, RunCase, make_case, sample
from tests.support.servers.guarded import GuardedServer, guarded_server

GREATEST_ID = f"{2**64 - 1}-{2**64 - 1}"


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedServer]:
    with guarded_server("valkey") as server:
        yield server


@dataclass(slots=True)
class Attacked:
    """A run of 8 units of 3 samples, with honest workers, and a hostile one."""

    run: RunCase
    server: redis.Redis
    hostile: redis.Redis

    def writer(self) -> RunWriter:
        self.server.delete(f"embq:{{{self.run.info.run}}}:writer")
        return RunWriter(self.server, self.run.record, version="test", clock=self.run.clock)

    def feeder(self) -> Feeder:
        return Feeder(self.server, lease_s=0.0, only=self.run.info.run)

    def add(self, fields: dict[Any, Any], **options: Any) -> str:
        """The hostile worker puts an entry into the result stream."""
        return self.hostile.xadd(self.run.key("res"), fields, **options).decode()

    def forged(self, u: int, token: str, **changes: str | bytes | int) -> dict[str, str | bytes | int]:
        """A result without fault, of vectors that no honest worker has computed."""
        schema = row_schema(("text",), {"text": DIM}, RowSpec())
        data = encode_result(
            [sample(u, i) for i in range(3)], {"embedding": np.full((3, DIM), 9, "float16")}, [], schema
        )
        return {**self.run.fields(u, data=data), "u": u, "token": token, "bytes": len(data), **changes}

    def finish(self, writer: RunWriter) -> None:
        """Feed, work honestly and write until the run is closed."""
        self.run.finish(writer, feeder=self.feeder())

    def finish_exactly(self, writer: RunWriter) -> None:
        self.finish(writer)
        self.run.assert_exact()
        assert self.server.xlen(self.run.key("res")) == 0
        assert self.run.ledger.meta()["bytes"] == "0"


@pytest.fixture
def attacked(guarded: GuardedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attacked]:
    monkeypatch.setattr("embq.core.wire._SKIPS", Skips(Events("wire")))  # which names 60 in a minute
    with guarded.client("writer") as server, guarded.client("worker") as honest, guarded.client("worker-gpu2") as other:
        Loader(server, load_scripts(server)).load_missing()
        run = make_case(honest, tmp_path / "out")
        register(server, run.record)
        yield Attacked(run, server, other)


# --- entries ---

NO_RESULTS: list[dict[Any, Any]] = [
    {"x": "y"},
    {b"\xff\xfe": b"\xff"},
    {"u": "0"},
    {"token": "1-0:w:1"},
    {"u": "x", "token": "1-0:w:1"},
    {"u": b"\xff", "token": b"\xff"},
    {"u": "-1", "token": "1-0:w:1"},
    {"u": "8", "token": "1-0:w:1"},
    {"u": "9" * 5_000, "token": "1-0:w:1"},
    {"u": "1e3", "token": "1-0:w:1"},
    {"u": "1.5", "token": "1-0:w:1"},
    {"u": "nan", "token": "1-0:w:1"},
    {"u": "0", "token": ""},
    {"u": "0", "token": "1-0:w:1 0-1"},
    {"u": "0", "token": "t" * 100_000},
    {"u": "0", "token": "1-0:w:1", "long": "x" * 1_000_000},
    {"u": "0", "token": "1-0:w:2", "bytes": "9" * 300},
    {"u": "0", "token": "quarantine", "code": "crash", "message": "m", "attempts": "3", "v": VERSION},
    {**{f"f{i}": "x" for i in range(3_000)}, "u": "0", "token": "1-0:w:3"},
]


def test_entries_that_are_no_results_are_skipped_counted_named_and_never_come_back(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    writer = attacked.writer()
    before = skip_counts()
    for fields in NO_RESULTS:
        attacked.add(fields)
        with caplog.at_level("WARNING"):
            writer.step()
    after = skip_counts()
    kinds = ("result", "result without a lease")
    assert sum(after.get(kind, 0) - before.get(kind, 0) for kind in kinds) == len(NO_RESULTS)
    assert caplog.text.count("malformed_skipped") == len(NO_RESULTS)
    assert attacked.server.xlen(attacked.run.key("res")) == 0
    assert attacked.server.xpending(attacked.run.key("res"), "w")["pending"] == 0
    attacked.finish_exactly(writer)


def test_the_writer_serves_on_while_such_entries_come(attacked: Attacked) -> None:
    run = attacked.run
    attacked.writer().release()
    feeder, ended, end = attacked.feeder(), False, time.monotonic() + 30

    def stopped() -> bool:
        nonlocal ended
        for fields in NO_RESULTS:
            attacked.add(fields)
        feeder.tick()
        run.work_off_hints()
        ended = run.ledger.meta().get("state") == "done"
        return ended or time.monotonic() > end

    WriterService(attacked.server, version="test", only=run.info.run).serve(stopped)
    assert ended
    run.assert_exact()


def test_a_result_that_was_not_leased_is_not_committed(attacked: Attacked, caplog: pytest.LogCaptureFixture) -> None:
    run, writer = attacked.run, attacked.writer()
    held = run.claim(0, "honest")
    read_token = attacked.hostile.hget(run.key("owner"), "0").decode()
    assert read_token == held
    ours = new_token(run.gen, "hostile")
    for u, token in ((0, ours), (0, held), (1, ours), (2, "quarantine")):
        attacked.add(attacked.forged(u, token))
    with caplog.at_level("WARNING"):
        writer.drain()
    assert run.committed_units() == []
    assert caplog.text.count("unit 0 was not leased to it") == 2
    assert run.publish(0, held) is PublishVerdict.ACCEPTED, "the lease of the honest worker goes on"
    attacked.finish_exactly(writer)


def test_a_published_result_cannot_be_put_aside(attacked: Attacked) -> None:
    run, writer = attacked.run, attacked.writer()
    run.work_one(0)
    ours = new_token(run.gen, "hostile")
    id_ = attacked.add(attacked.forged(0, ours))
    with pytest.raises(NoPermissionError):
        attacked.hostile.hset(run.key("pub"), "0", f"{ours} {id_}")
    assert attacked.hostile.hsetnx(run.key("pub"), "0", f"{ours} {id_}") == 0
    with pytest.raises(NoPermissionError):
        attacked.hostile.hdel(run.key("pub"), "0")
    writer.drain()
    run.assert_exact([0])


def test_a_result_that_was_not_leased_takes_no_file_of_another_away(attacked: Attacked) -> None:
    run, writer = attacked.run, attacked.writer()
    data, token = run.data(0), run.claim(0, "honest")
    path = run.layout.staging / f"{run.units[0].unit_id}.{token.replace(':', '_')}.arrow"
    path.write_bytes(data)
    staged = {"ref": path.name, "sha256": hashlib.sha256(data).hexdigest(), "data": b""}
    attacked.add(attacked.forged(0, token, **staged))
    theirs = run.claim(1, "hostile")
    assert (
        Ledger(attacked.hostile, run.info.run).publish(1, theirs, run.fields(1, **staged), size=10)
        is PublishVerdict.ACCEPTED
    )
    writer.step()
    assert path.exists()
    assert run.publish(0, token, **staged) is PublishVerdict.ACCEPTED
    attacked.finish_exactly(writer)


# --- what a lease covers, and is no result ---


def rows_of(u: int, *, width: int = DIM, count: int = 3, compression: str | None = None) -> bytes:
    """A result of vectors of zeros."""
    schema = row_schema(("text",), {"text": width}, RowSpec())
    zeros = pa.array(np.zeros(count * width, "float16"))
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(range(count), pa.int32()),
            pa.array([f"{u}:{i}" for i in range(count)]),
            pa.FixedSizeListArray.from_arrays(zeros, type=schema.field("embedding").type),
            pa.nulls(count, pa.string()),
            pa.nulls(count, pa.string()),
        ],
        schema=schema,
    )
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, schema, options=options) as stream:
        stream.write_batch(rows)
    with pa.ipc.new_stream(sink, FAILURE_SCHEMA) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([], FAILURE_SCHEMA))
    return bytes(sink.getvalue())


def a_failure(code: str, message: str = "m") -> bytes:
    schema = row_schema(("text",), {"text": DIM}, RowSpec())
    batch = pa.RecordBatch.from_pylist(
        [{"ordinal": None, "key": "", "code": code, "message": message, "attempt": 1}], FAILURE_SCHEMA
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([], schema))
    with pa.ipc.new_stream(sink, FAILURE_SCHEMA) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def messages(run: RunCase) -> list[str]:
    """Messages of the committed failures."""
    files = [file for commit in CommitLog(run.layout).read() for file in commit.files if file.kind == "failures"]
    return [text for file in files for text in pq.read_table(run.layout.root / file.path)["message"].to_pylist()]


def bad_offsets() -> bytes:
    """A result whose offsets of keys lead far out of it."""
    data = bytearray(rows_of(0))
    offsets = np.array([0, 3, 6, 9], np.int32).tobytes()
    at = data.index(offsets)
    data[at : at + 16] = np.array([0, 3, 2**31 - 9, 2**31 - 8], np.int32).tobytes()
    return bytes(data)


BAD: dict[str, Callable[[], dict[str, str | bytes | int]]] = {
    "offsets that lead out of it": lambda: {"data": bad_offsets()},
    "a compressed body": lambda: {"data": rows_of(0, width=20_000_000, compression="zstd")},
    "fewer rows than its unit": lambda: {"data": rows_of(0, count=2), "rows": 2},
    "more rows than its unit": lambda: {"data": rows_of(0, count=4), "rows": 4},
    "bytes behind its end": lambda: {"data": rows_of(0) + b"\0"},
    "no end": lambda: {"data": rows_of(0)[:-8]},
    "a second result": lambda: {"data": rows_of(0) * 2},
    "another kind of file": lambda: {"data": b"PAR1" * 100},
    "a code that is none": lambda: {"data": a_failure("\x1b]0;x\x07"), "rows": 0, "failures": 1},
    "a message that is too long": lambda: {"data": a_failure("x", "m" * 2_000), "rows": 0, "failures": 1},
    "tokens without end": lambda: {"tokens": 2**62},
    "texts without end": lambda: {"truncated": 2**62},
    "a fingerprint that is none": lambda: {"fingerprint": "\x1b[2J"},
    "a name of a file without end": lambda: {"ref": "x" * 100_000},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
def test_a_result_with_a_fault_is_done_again_and_nothing_is_lost(
    attacked: Attacked, caplog: pytest.LogCaptureFixture, fields: Callable[[], dict[str, str | bytes | int]]
) -> None:
    run, writer = attacked.run, attacked.writer()
    token = run.claim(0, "hostile")
    assert (
        Ledger(attacked.hostile, run.info.run).publish(0, token, run.fields(0, **fields()), size=100)
        is PublishVerdict.ACCEPTED
    )
    with caplog.at_level("WARNING"):
        writer.drain()
    assert "result_rejected" in caplog.text
    assert "worker=hostile" in caplog.text
    assert run.committed_units() == []
    attacked.finish_exactly(writer)


def test_a_unit_whose_results_have_faults_again_and_again_is_a_failure_that_says_whose(attacked: Attacked) -> None:
    """Malformed results are put aside, and the run says which worker sent what."""
    run, writer = attacked.run, attacked.writer()
    for _ in range(MAX_ATTEMPTS):
        token = run.claim(0, "box.cuda0.666")
        assert run.publish(0, token, data=bad_offsets()) is PublishVerdict.ACCEPTED
        writer.step()
        run.age()
        attacked.feeder().tick()
    attacked.finish(writer)
    run.assert_exact(failures=[("", "bad_result")], whole=[0])
    (failure,) = messages(run)
    assert "said by worker box.cuda0.666" in failure
    assert "offset" in failure.lower()


def test_no_mutation_of_a_result_crashes_its_reader() -> None:
    script = Path(__file__).with_name("mutated_results.py")
    ended = subprocess.run([sys.executable, str(script), "22", "3000"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    seen = ast.literal_eval(ended.stdout)
    assert seen["taken"] + seen["refused"] == 3000
    assert seen["refused"] > 2000


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "endless"])
def test_a_staging_file_that_is_no_file_holds_nobody_up(attacked: Attacked, kind: str) -> None:
    run, writer = attacked.run, attacked.writer()
    data, token = run.data(0), run.claim(0, "hostile")
    path = run.layout.staging / f"{run.units[0].unit_id}.{token.replace(':', '_')}.arrow"
    if kind == "link":
        (run.layout.root / "secret").write_bytes(data)
        path.symlink_to(run.layout.root / "secret")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**42)
    fields = {"ref": path.name, "sha256": hashlib.sha256(data).hexdigest(), "data": b""}
    assert run.publish(0, token, **fields) is PublishVerdict.ACCEPTED
    writer.drain()
    assert run.committed_units() == []
    if kind == "folder":
        path.rmdir()
    attacked.finish_exactly(writer)


# --- the ledger ---


def test_nothing_that_a_worker_writes_to_the_ledger_stops_a_service_or_a_command(attacked: Attacked) -> None:
    """What stands in the keys that a worker may write is read by all others."""
    run, hostile, writer = attacked.run, attacked.hostile, attacked.writer()
    feeder = attacked.feeder()
    rubbish = ["x", "", "-1", "0", "nan", "inf", "1e400", "9" * 30, "9" * 15, b"\xff", " ", "\x1b[2J"]
    for value in rubbish:
        for name in attacked.server.hkeys(run.key("meta")):
            if name not in (b"gen", b"v", b"state", b"nonce"):
                hostile.hset(run.key("meta"), name, value)
        for field in ("7", "evil", value):
            for part in ("owner", "spare", "busy", "att", "poison"):
                hostile.hset(run.key(part), field, value)
            hostile.hsetnx(run.key("pub"), field, value)
            for part in ("due", "hinted"):
                hostile.zadd(run.key(part), {field: 1})
        feeder.tick()
        run.work_off_hints()
        token = new_token(run.gen, "honest")
        claim = run.ledger.claim(6, token, lease_s=LEASE_S, fingerprint=FINGERPRINT)
        assert claim.word in ("ok", "gen", "later", "leased", "dup", "fingerprint", "state")
        run.ledger.start([(6, token)])
        run.ledger.beat(run.gen, [(6, token)], lease_s=LEASE_S)
        run.ledger.release(6, token)
        run.ledger.abandon("evil", "killed", blame={token: None})
        RemoteRunMonitor(run.record, attacked.server).poll().to_json()
        RunMonitor(run.layout.root, attacked.server).poll().to_json()
        BrokerMetrics(attacked.server)(MetricSamples("producer"))
        live_tokens(attacked.server, run.info.run)
        writer.step()
        run.clock.advance(RECONCILE_S + 0.1)
    for part in ("owner", "spare", "busy", "att", "poison"):  # a worker can hold a unit back as long as it is there
        for field in attacked.server.hkeys(run.key(part)):
            hostile.hdel(run.key(part), field)
    attacked.finish(writer)
    run.assert_exact()


@pytest.mark.parametrize("value", [b"\xff", "done", "9", ""])
@pytest.mark.parametrize("name", ["gen", "v", "state"])
def test_a_queue_that_a_worker_calls_another_one_is_put_right(
    attacked: Attacked, name: str, value: str | bytes
) -> None:
    run, writer = attacked.run, attacked.writer()
    run.work_one(0)
    writer.drain()
    attacked.hostile.hset(run.key("meta"), name, value)
    attacked.feeder().tick()
    run.clock.advance(RECONCILE_S + 0.1)
    writer.step()
    assert run.ledger.meta()["state"] == "running"
    attacked.finish_exactly(writer)


@pytest.mark.parametrize("trimmed", [False, True], ids=["seen", "unseen"])
def test_a_stream_that_takes_nothing_more_is_made_anew(attacked: Attacked, trimmed: bool) -> None:
    run, writer = attacked.run, attacked.writer()
    run.work_one(0)
    writer.drain()
    attacked.add({"x": "y"}, id=GREATEST_ID, **({"maxlen": 0, "approximate": False} if trimmed else {}))
    gen = run.gen
    assert run.publish(1, run.claim(1)) is PublishVerdict.LOST, "a lost lease, and no error that would end the worker"
    run.clock.advance(RECONCILE_S + 0.1)
    writer.step()
    assert run.gen not in ("", gen)
    attacked.finish_exactly(writer)


def test_results_that_a_worker_trims_away_are_made_again(attacked: Attacked) -> None:
    """`XADD ... MAXLEN 0` removes what others have published."""
    run, writer = attacked.run, attacked.writer()
    for u in range(4):
        run.work_one(u)
    attacked.add({"x": "y"}, maxlen=0, approximate=False)
    attacked.finish_exactly(writer)


def test_more_than_the_stream_may_hold_is_read_one_by_one(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = attacked.writer()
    assert writer.inbox.read() == []
    monkeypatch.setattr("embq.core.queue.result_stream.LIMIT_BYTES", 100_000)
    for _ in range(8):
        attacked.add({"u": "0", "token": "t", "data": b"x" * 50_000})
    attacked.run.clock.advance(2 * OVERFULL_S)
    assert [len(writer.inbox.read()) for _ in range(2)] == [1, 1]
    second = attacked.writer()
    assert len(second.inbox.read()) == 1
    second.inbox.read_again()
    attacked.finish_exactly(second)


def test_entries_larger_than_any_result_are_passed_by(attacked: Attacked) -> None:
    writer = attacked.writer()
    large = b"x" * (17 << 20)
    attacked.add({"u": "0", "token": "t", "data": large})
    attacked.add({"u": large, "token": "t"})
    attacked.add({"u": "0", "token": "t", **{f"data{i}": large for i in range(3)}})
    tracemalloc.start()
    try:
        while writer.inbox.has_more:
            writer.step()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    attacked.finish_exactly(writer)


def test_a_worker_cannot_take_the_lists_of_all_services_away(attacked: Attacked) -> None:
    for key in (WORKERS, SERVICES):
        for command in (("SET", key, "x"), ("DEL", key)):
            with pytest.raises(NoPermissionError):
                attacked.hostile.execute_command(*command)
