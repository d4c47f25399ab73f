"""The writer: published results become rows exactly once, whatever is published and whoever is killed."""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from embq.app.local.session import summary_lines
from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor
from embq.core.errors import InputError, OutputError, TryLaterError
from embq.core.queue.keys import ACTIVE, MAX_ATTEMPTS, VERSION
from embq.core.queue.result_stream import PublishVerdict, ResultStream
from embq.core.queue.runs import RunRecord, register, registered
from embq.core.rows.results import encode_result, row_schema
from embq.core.rows.spec import Column, RowSpec
from embq.core.run.commit_log import CommitLog
from embq.core.units import Failure
from embq.writer.lock import WEDGED_S, LockKeeper
from embq.writer.queue import RunQueue
from embq.writer.run_writer import LATE_LOOK_S, LATE_S, RECONCILE_S, Inbox, RunWriter
from embq.writer.service import WriterService
from tests.support.outputs.run_case import DIM, FINGERPRINT, MakeRun, RunCase, make_case, sample, unit_of
from tests.support.waiting import wait_until

LOCK_TTL_S = 300.0


def kinds(run: RunCase) -> list[str]:
    return [commit.kind for commit in CommitLog(run.layout).read()]


def parts(run: RunCase) -> list[int]:
    """Rows of each part, in order."""
    return [f.rows for commit in CommitLog(run.layout).read() for f in commit.files if f.kind == "rows"]


def staged(run: RunCase) -> set[str]:
    return {path.name for path in run.layout.staging.iterdir()} - {".shared"}


def publish_staged(run: RunCase, u: int, data: bytes, **changes: str | bytes | int) -> Path:
    """Publish a unit's result as a staging file; gives its path."""
    token = run.claim(u)
    path = run.layout.staging / f"{run.units[u].unit_id}.{token.replace(':', '_')}.arrow"
    path.write_bytes(data)
    fields = run.fields(u, ref=path.name, sha256=hashlib.sha256(data).hexdigest())
    del fields["data"]
    assert run.ledger.publish(u, token, {**fields, **changes}, size=len(data)) is PublishVerdict.ACCEPTED
    return path


@pytest.fixture(autouse=True)
def _no_lock_lapses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is."""
    monkeypatch.setattr("embq.writer.lock.LOCK_TTL_S", LOCK_TTL_S)


def all_work(run: RunCase) -> None:
    for u in range(len(run.units)):
        run.work_one(u)


# --- the plain way ---


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_become_rows_with_dense_ids_and_a_closed_log(make_run: MakeRun, dtype: str) -> None:
    run = make_run(4, rows=RowSpec(dtype=dtype))
    writer = run.writer()
    all_work(run)
    writer.step()
    assert writer.finished, "the last unit is committed without waiting for company"
    run.assert_exact()
    assert kinds(run) == ["fence", "data", "close"]
    (path,) = run.layout.parts.iterdir()
    table = pq.read_table(path)
    value = pa.float16() if dtype == "float16" else pa.float32()
    assert table.column_names == ["id", "ordinal", "key", "embedding", "caption", "metadata", "unit_id"]
    assert table.schema.field("embedding").type == pa.list_(value, DIM)
    assert table.schema.field("id").type == pa.int64()
    assert table["unit_id"].to_pylist() == [unit.unit_id for unit in run.units for _ in range(3)]
    assert table["caption"][4].as_py() == "text 1 of 1"
    assert table.schema.metadata[b"embq.fingerprint"] == FINGERPRINT.encode()
    file = next(CommitLog(run.layout).read(after=1)).files[0]
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_texts_that_the_model_cut_off_are_counted_once_and_shown_everywhere(run: RunCase) -> None:
    writer = run.writer()
    run.work_one(0, truncated=2)
    run.work_one(1)
    writer.drain()
    folder, broker = RunMonitor(run.layout.root, run.client), RemoteRunMonitor(run.record, run.client)
    assert folder.poll().truncated == broker.poll().truncated == 2
    second = run.writer()
    run.work_one(2, truncated=1)
    second.drain()
    assert second.committer.state.totals()["truncated"] == 3
    for watch in (folder, broker, RunMonitor(run.layout.root, None)):
        assert watch.poll().to_json()["truncated"] == 3


def test_samples_whose_metadata_were_not_read_are_counted_in_the_log_and_told_at_the_end(run: RunCase) -> None:
    writer = run.writer()
    run.work_one(0, unread=2)
    run.work_one(1)  # of a worker that read all
    writer.drain()
    (record,) = [commit for commit in CommitLog(run.layout).read() if commit.units]
    assert [unit.describe().get("unread") for unit in record.units] == [2, None]
    second = run.writer()
    run.work_one(2, unread=1)
    second.drain()
    assert second.committer.state.unread == CommitLog(run.layout).replay(len(run.units)).unread == 3
    progress = RunMonitor(run.layout.root, run.client).poll()
    assert any(line.startswith("3 rows lack metadata") for line in summary_lines(progress, run.layout.root))


def test_tokens_of_results_are_counted_while_they_wait_and_once_they_are_committed(run: RunCase) -> None:
    writer = run.writer()
    run.work_one(0, tokens=70)
    run.work_one(1, tokens=5)
    run.work_one(2)  # of a worker that does not say
    assert run.ledger.meta()["tokens_waiting"] == "75"
    writer.drain()
    meta = run.ledger.meta()
    assert (meta["tokens_waiting"], meta["tokens"]) == ("0", "75")
    record = list(CommitLog(run.layout).read())[-1]
    assert [unit.tokens for unit in record.units] == [70, 5, 0]
    assert "tokens" not in record.units[2].describe(), "as in records of versions that did not count them"
    assert run.writer().committer.state.tokens == record.totals["tokens"] == 75


def test_tokens_of_results_that_are_not_taken_wait_no_more(run: RunCase) -> None:
    writer = run.writer()
    run.work_one(0, tokens=70, unit_id="another")
    run.work_one(1, tokens="many")
    writer.step()
    assert run.ledger.meta()["tokens_waiting"] == "0"
    assert writer.committer.state.tokens == 0


def test_failures_stand_beside_the_rows(run: RunCase) -> None:
    writer = run.writer()
    run.work_one(0, failed=[1])
    run.work_one(1, failed=[0, 1, 2])
    writer.drain()
    assert [key for _, key, _ in run.rows()] == ["0:0", "0:2"]
    assert run.failures() == [("0:1", "decode"), ("1:0", "decode"), ("1:1", "decode"), ("1:2", "decode")]
    (path,) = run.layout.failures.iterdir()
    table = pq.read_table(path)
    assert table.column_names == ["ordinal", "key", "code", "message", "attempt", "unit_id", "u"]
    assert table["u"].to_pylist() == [0, 1, 1, 1]
    assert writer.committer.state.totals() == {
        "units": 2,
        "rows": 2,
        "failures": 4,
        "quarantined": 0,
        "truncated": 0,
        "tokens": 0,
    }


def test_a_run_of_failures_only_has_no_part(make_run: MakeRun) -> None:
    run = make_run(2)
    writer = run.writer()
    for u in range(2):
        run.work_one(u, failed=[0, 1, 2])
    writer.step()
    assert writer.finished
    assert (run.rows(), len(run.failures()), list(run.layout.parts.iterdir())) == ([], 6, [])


def test_a_unit_that_failed_whole_is_one_failure(make_run: MakeRun) -> None:
    run = make_run(1)
    writer = run.writer()
    schema = row_schema(("text",), {"text": DIM}, RowSpec())
    whole = Failure(ordinal=None, key="", code="tar_damaged", message="cut")
    data = encode_result([], {"embedding": np.empty((0, DIM), "float16")}, [whole], schema)
    run.work_one(0, rows=0, failures=1, data=data)
    writer.step()
    assert writer.finished
    assert run.failures() == [("", "tar_damaged")]
    assert writer.committer.state.quarantined == 1


def test_a_quarantined_unit_is_one_failure_that_closes_the_run(make_run: MakeRun) -> None:
    run = make_run(2)
    writer = run.writer()
    run.work_one(0)
    for _ in range(MAX_ATTEMPTS):
        token = run.claim(1, "dies")
        run.ledger.abandon("dies", "killed by signal 9", blame={token: None})
        run.age()
        run.ledger.next_units(run.gen, 0, queue_empty=True, reap_at=0)
    writer.step()
    assert writer.finished
    assert run.failures() == [("", "crash")]
    assert int(run.ledger.meta()["quarantined"]) == 1


# --- when a part is cut ---


@pytest.mark.parametrize(
    ("units", "part_rows", "rows"), [(5, 7, [6, 6, 3]), (2, 2, [3, 3])], ids=["units together", "a unit is larger"]
)
def test_a_part_holds_no_more_rows_than_asked_for_and_no_unit_is_split(
    make_run: MakeRun, units: int, part_rows: int, rows: list[int]
) -> None:
    run = make_run(units, part_rows=part_rows)
    writer = run.writer()
    all_work(run)
    writer.step()
    assert parts(run) == rows
    run.assert_exact()


def test_the_writer_knows_whether_more_results_wait(run: RunCase) -> None:
    """It rests after a read that has emptied the stream, and goes on at once after any other."""
    inbox = run.writer().inbox
    for _ in range(17):
        run.client.xadd(run.key("res"), {"x": "y"})
    assert [(len(inbox.read()), inbox.has_more) for _ in range(3)] == [(16, True), (1, False), (0, False)]
    inbox.read_again()
    assert [(len(inbox.read()), inbox.has_more) for _ in range(2)] == [(17, True), (0, False)]


def test_results_that_are_too_large_together_are_read_one_by_one(make_run: MakeRun) -> None:
    run = make_run(8)
    run.build()
    for u in range(8):
        run.work_one(u)
    pool = run.client.connection_pool

    def inbox(answer_bytes: int) -> Inbox:
        options = {**pool.connection_kwargs, "answer_bytes": answer_bytes}
        client = redis.Redis(connection_pool=redis.ConnectionPool(pool.connection_class, **options))
        return Inbox(ResultStream(client, run.info.run), run.clock)

    run.ledger.results.make_group()
    enough = inbox(5_000)  # for two
    seen: dict[str, bool] = {}
    while enough.has_more:
        seen |= {entry.id: entry.is_whole for entry in enough.read()}
    assert list(seen.values()) == [True] * 8
    little = inbox(1_000)
    assert [[entry.is_whole for entry in little.read()] for _ in range(2)] == [[], [False]]


def test_large_results_are_read_one_by_one(run: RunCase, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 100_000
    monkeypatch.setattr("embq.writer.run_writer.READ_BYTES", size)
    inbox = run.writer().inbox
    for _ in range(19):
        run.client.xadd(run.key("res"), {"data": b"x" * size})
    assert [len(inbox.read()) for _ in range(4)] == [16, 1, 1, 1]


@pytest.mark.parametrize(
    ("since", "young", "more"), [(0, 1.9, 0.2), (90, 9.9, 0.2), (10_000, 29, 1)], ids=["first", "tenth", "later"]
)
def test_results_are_committed_when_the_oldest_is_old_enough_and_later_parts_wait_longer(
    run: RunCase, since: float, young: float, more: float
) -> None:
    writer = run.writer()
    run.clock.advance(since)
    run.work_one(0)
    writer.step()
    run.clock.advance(young)
    run.work_one(1)
    writer.step()
    assert parts(run) == []
    run.clock.advance(more)
    writer.step()
    assert parts(run) == [6]


def test_a_part_is_cut_by_bytes_too(run: RunCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.writer.commit.MAX_BYTES", 2 * len(run.data(0)))
    writer = run.writer()
    for u in range(3):
        run.work_one(u)
    writer.step()
    assert parts(run) == [6]
    run.work_one(3)
    writer.step()
    assert parts(run) == [6, 6]


# --- results that are none ---


def test_a_unit_that_is_published_twice_is_taken_once(run: RunCase) -> None:
    writer = run.writer()
    for moment in ("in the buffer", "committed"):
        u = 0 if moment == "in the buffer" else 1
        run.work_one(u)
        if moment == "committed":
            writer.drain()
            run.client.setbit(run.key("done"), u, 0)  # what a lost key does
        else:
            run.client.hdel(run.key("pub"), str(u))
            run.client.zrem(run.key("due"), str(u))
        publish_staged(run, u, run.data(u))
        writer.drain()
        assert staged(run) == set()
    run.assert_exact([0, 1])
    assert run.client.xlen(run.key("res")) == 0
    assert run.ledger.done_bits() == b"\xc0"
    assert run.ledger.meta()["bytes"] == "0"


BAD: dict[str, tuple[str, dict[str, str | bytes | int]]] = {
    "of another unit": ("wrong_unit", {"unit_id": "0" * 32}),
    "of another model": ("wrong_model", {"fingerprint": "0" * 32}),
    "of another protocol version": ("wrong_version", {"v": VERSION - 1}),
    "of a version that is no number": ("wrong_version", {"v": f"{VERSION}.0"}),
    "with fewer rows than it says": ("wrong_count", {"rows": 4}),
    "with failures that it does not have": ("wrong_count", {"failures": 1}),
    "that is cut": ("bad_result", {"data": b"\xff\xff\xff\xff\x10"}),
    "that is empty": ("bad_result", {"data": b""}),
    "in a lost file": ("lost_result", {"ref": f"{unit_of(0).unit_id}.nothing.arrow", "sha256": "0" * 64}),
    "in another unit's file": ("bad_result", {"ref": f"{unit_of(1).unit_id}.nothing.arrow", "sha256": "0" * 64}),
    "outside the folder": ("bad_result", {"ref": "../run.json", "sha256": "0" * 64}),
    "at the sign of shared storage": ("bad_result", {"ref": ".shared", "sha256": "0" * 64}),
    "at the folder itself": ("bad_result", {"ref": "..", "sha256": "0" * 64}),
    "with a number that is none": ("bad_result", {"rows": "x"}),
}


@pytest.mark.parametrize(("code", "changes"), BAD.values(), ids=BAD.keys())
def test_a_result_that_cannot_be_trusted_is_rejected_and_made_again(
    run: RunCase, caplog: pytest.LogCaptureFixture, code: str, changes: dict[str, str | bytes | int]
) -> None:
    writer = run.writer()
    run.work_one(7)  # fixes the run's fingerprint and columns
    run.work_one(0, **changes)
    with caplog.at_level("WARNING"):
        writer.step()
        if code == "lost_result":
            run.clock.advance(LATE_S)
            writer.step()
    assert f"code={code}" in caplog.text
    assert run.layout.run_json.exists(), "a result names files of the staging folder only"
    assert run.client.hexists(run.key("pub"), "0") == 0
    assert run.client.zscore(run.key("hinted"), "0") == 0
    run.finish(writer)
    run.assert_exact()


@pytest.mark.parametrize("missing", ["v", "unit_id", "fingerprint", "rows", "failures", "data"])
def test_a_result_without_one_of_its_fields_is_rejected(run: RunCase, missing: str) -> None:
    writer = run.writer()
    fields = run.fields(0)
    del fields[missing]
    assert run.ledger.publish(0, run.claim(0), fields, size=10) is PublishVerdict.ACCEPTED
    writer.step()
    assert run.client.hexists(run.key("pub"), "0") == 0
    run.finish(writer)
    run.assert_exact()


COLUMNS = (Column(name="n", type="int64", path=("n",)),)


@pytest.mark.parametrize(
    "other",
    [
        RowSpec(),
        RowSpec(columns=(Column(name="n", type="string", path=("n",)),)),
        RowSpec(dtype="float32", columns=COLUMNS),
    ],
)
def test_the_very_first_result_must_have_the_columns_of_the_run(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture, other: RowSpec
) -> None:
    run = make_run(2, rows=RowSpec(columns=COLUMNS))
    writer = run.writer()
    of_another = replace(run, record=replace(run.record, rows=other))
    run.work_one(0, data=of_another.data(0))
    with caplog.at_level("WARNING"):
        writer.step()
    assert "code=wrong_schema" in caplog.text
    assert writer.acceptor.fingerprint == "", "it says nothing of the run"
    run.finish(writer)
    run.assert_exact()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_vectors_of_the_first_part_fix_how_long_all_are(
    run: RunCase, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, checkpoint: bool
) -> None:
    if checkpoint:
        monkeypatch.setattr("embq.core.run.checkpoint.EVERY", 1)
    writer = run.writer()
    run.work_one(0)
    writer.drain()
    second = run.writer()
    assert second.committer.state.widths == {"embedding": DIM}
    samples = [sample(1, ordinal) for ordinal in range(3)]
    schema = row_schema(("text",), {"text": DIM + 1}, RowSpec())
    longer = encode_result(samples, {"embedding": np.zeros((3, DIM + 1), "float16")}, [], schema)
    run.work_one(1, data=longer)
    with caplog.at_level("WARNING"):
        second.step()
    assert "code=wrong_schema" in caplog.text
    assert f"{DIM + 1} numbers" in caplog.text
    run.finish(second)
    run.assert_exact()


def test_a_sample_that_is_a_row_and_a_failure_is_rejected(run: RunCase) -> None:
    writer = run.writer()
    schema = row_schema(("text",), {"text": DIM}, RowSpec())
    vectors = {"embedding": np.zeros((1, DIM), "float16")}
    twice = encode_result([sample(0, 0)], vectors, [Failure(ordinal=0, key="0:0", code="x", message="")], schema)
    run.work_one(0, rows=1, failures=1, data=twice)
    run.finish(writer)
    run.assert_exact()


def test_the_first_result_fixes_the_fingerprint_and_the_log_keeps_it(run: RunCase) -> None:
    writer = run.writer()
    run.work_one(0)
    writer.drain()
    assert CommitLog(run.layout).replay(8).fingerprint == FINGERPRINT
    second = run.writer()
    run.work_one(1, fingerprint="0" * 32)
    second.drain()
    assert run.committed_units() == [0]


# --- staging files ---


def test_a_result_in_a_staging_file_is_taken_and_the_file_removed(run: RunCase) -> None:
    writer = run.writer()
    path = publish_staged(run, 0, run.data(0))
    writer.step()
    assert staged(run) == {path.name}, "until the commit it is all there is"
    writer.flush()
    assert staged(run) == set()
    run.assert_exact([0])


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_staging_file_is_removed_and_its_unit_made_again(run: RunCase, damage: str) -> None:
    writer = run.writer()
    path = publish_staged(run, 0, run.data(0))
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if damage == "cut" else b"\0" + path.read_bytes()[1:])
    writer.step()
    if damage == "gone":
        run.clock.advance(LATE_S)
        writer.step()
    assert staged(run) == set()
    run.finish(writer)
    run.assert_exact()


def test_a_staging_file_that_is_seen_late_is_waited_for(run: RunCase, tmp_path: Path) -> None:
    writer = run.writer()
    path = publish_staged(run, 0, run.data(0))
    unseen = path.rename(tmp_path / "unseen")
    for _ in range(3):
        writer.step()
        run.clock.advance(LATE_LOOK_S)
    unseen.rename(path)
    writer.step()
    writer.flush()
    run.assert_exact([0])
    assert not writer.counts.rejected


def test_workers_can_see_that_they_share_storage(run: RunCase) -> None:
    first = run.writer()
    assert (run.layout.staging / ".shared").read_text() == run.ledger.meta()["nonce"] == first.id
    second = run.writer()
    assert (run.layout.staging / ".shared").read_text() == run.ledger.meta()["nonce"] == second.id


# --- restarts ---


def test_what_was_delivered_before_a_restart_is_taken_after_it(run: RunCase) -> None:
    first = run.writer()
    for u in range(3):
        run.work_one(u)
    first.step()
    run.work_one(3)
    gen = run.gen
    second = run.writer()
    second.drain()
    run.assert_exact([0, 1, 2, 3])
    assert run.gen == gen, "the queue goes on: leases of before stay good"
    run.finish(second)
    run.assert_exact()
    assert run.client.xpending(run.key("res"), "w")["pending"] == 0


def test_results_whose_delivery_was_lost_on_the_way_are_taken_soon(run: RunCase) -> None:
    writer = run.writer()
    run.work_one(0)
    writer.step()
    for u in (1, 2):
        run.work_one(u)
    assert len(run.ledger.results.read(">", count=10, block_ms=None)) == 2, "a reply that does not arrive"
    for _ in range(3):
        run.clock.advance(RECONCILE_S + 0.1)
        writer.step()
    writer.flush()
    run.assert_exact([0, 1, 2])
    assert run.client.xlen(run.key("res")) == 0
    assert run.ledger.meta()["bytes"] == "0"


def test_a_commit_that_the_broker_did_not_hear_of_is_told_to_it(run: RunCase, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run.writer()
    run.work_one(0)
    publish_staged(run, 1, run.data(1))

    class Killed(BaseException):
        pass

    def kill(self: RunQueue, pairs: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunQueue, "mark", kill)
        with pytest.raises(Killed):
            first.drain()
    assert run.ledger.meta()["done"] == "0"
    second = run.writer()
    second.drain()
    assert run.ledger.meta()["done"] == "2"
    assert (staged(run), run.ledger.meta()["bytes"]) == (set(), "0")
    run.finish(second)
    run.assert_exact()


def test_a_writer_killed_before_the_close_is_followed_by_one_that_closes(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(2)
    first = run.writer()
    all_work(run)

    class Killed(BaseException):
        pass

    def kill(*args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(first.committer, "close", kill)
        with pytest.raises(Killed):
            first.step()
    assert kinds(run) == ["fence", "data"]
    second = run.writer()
    second.step()
    assert second.finished
    assert kinds(run) == ["fence", "data", "fence", "close"]
    run.assert_exact()


# --- the broker is lost ---


def test_a_broker_that_was_flushed_is_rebuilt_and_the_run_ends(own_client: redis.Redis, tmp_path: Path) -> None:
    run = make_case(own_client, tmp_path / "out")
    writer = run.writer()
    run.work_one(0)
    writer.drain()
    run.work_one(1)
    writer.step()
    held = run.claim(2)
    before = run.gen
    own_client.flushall()
    run.clock.advance(2.5)
    writer.step()
    assert run.gen not in ("", before)
    assert run.ledger.done_bits() == b"\x80"
    assert run.info.run in registered(own_client)
    assert run.publish(2, held) is PublishVerdict.LOST, "a lease of before the loss is worthless"
    run.finish(writer)
    run.assert_exact()
    assert [commit.generation for commit in CommitLog(run.layout).read()][-1] == run.gen


def test_a_commit_just_after_the_broker_was_flushed_is_kept(own_client: redis.Redis, tmp_path: Path) -> None:
    run = make_case(own_client, tmp_path / "out")
    writer = run.writer()
    run.work_one(0)
    writer.step()
    own_client.flushall()
    writer.flush()
    run.finish(writer)
    run.assert_exact()


def test_a_broker_that_forgot_its_last_second_is_told_what_is_committed(run: RunCase) -> None:
    writer = run.writer()
    keys = {key: run.client.dump(key) for key in run.ledger.keys if run.client.exists(key)}
    for u in (0, 5):
        run.work_one(u)
    writer.drain()
    run.client.delete(*run.ledger.keys)
    for key, value in keys.items():
        run.client.restore(key, 0, value)
    run.finish(writer)
    run.assert_exact()


def test_a_broker_that_knows_more_than_the_log_is_rebuilt(run: RunCase) -> None:
    run.writer()
    run.client.setbit(run.key("done"), 3, 1)  # the output was restored from a backup
    before = run.gen
    writer = run.writer()
    assert run.gen != before
    run.finish(writer)
    run.assert_exact()


def test_a_rebuild_that_was_asked_for_frees_what_dead_workers_held(run: RunCase) -> None:
    run.writer()
    run.claim(0, "dead")
    before = run.gen
    writer = run.writer(rebuild=True)
    assert run.gen != before
    assert run.client.exists(run.key("owner")) == 0
    run.finish(writer)
    run.assert_exact()


# --- a finished run ---


@pytest.mark.parametrize("broker", ["knows it", "lost it"])
def test_a_finished_run_can_be_opened_again_and_stays_as_it_is(run: RunCase, broker: str) -> None:
    run.finish(run.writer())
    files = {path: path.read_bytes() for path in run.layout.root.rglob("*.[jp]*") if path.is_file()}
    if broker == "lost it":
        run.client.delete(*run.ledger.keys)
    again = run.writer()
    assert again.finished
    again.drain()
    assert run.ledger.meta()["state"] == "done"
    assert run.feeder().tick() == 0
    assert {path: path.read_bytes() for path in run.layout.root.rglob("*.[jp]*") if path.is_file()} == files


# --- two writers ---


class SteppingClock:
    """A clock by which every look takes some seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 4.0
        return self.now


def test_a_second_writer_is_told_to_try_later(run: RunCase) -> None:
    first = run.writer()
    with pytest.raises(TryLaterError, match=first.id) as caught:
        RunWriter(run.client, run.record, version="test", clock=SteppingClock())
    assert "--takeover" in caught.value.next_step
    run.finish(first)
    assert kinds(run)[0] == "fence"
    assert kinds(run).count("fence") == 1, "the second one has not touched the folder"


def test_a_takeover_ends_the_first_writer_at_its_next_commit(run: RunCase) -> None:
    first = run.writer()
    run.work_one(0)
    first.step()
    second = RunWriter(run.client, run.record, version="test", clock=run.clock, takeover=True)
    with pytest.raises(TryLaterError, match="taken over"):
        first.flush()
    run.finish(second)
    run.assert_exact()


def test_a_takeover_ends_the_first_writer_when_it_renews_its_lock(run: RunCase) -> None:
    first = run.writer()
    second = RunWriter(run.client, run.record, version="test", clock=run.clock, takeover=True)
    run.clock.advance(4)
    with pytest.raises(TryLaterError, match=second.id):
        first.step()
    second.step()


@pytest.mark.parametrize("number", [0, 1])
def test_a_writer_that_cannot_open_its_run_lets_go_of_the_lock(run: RunCase, number: int) -> None:
    first = run.writer()
    run.work_one(0)
    first.drain()
    first.release()
    (run.layout.commits / f"{number + 1:08d}.json").write_text("damaged")
    with pytest.raises(OutputError):
        run.writer()
    assert run.client.get(f"embq:{{{run.info.run}}}:writer") is None


# --- the lock while a step takes long ---


def lock_of(run: RunCase) -> tuple[str, int]:
    """Holder of the run's lock, and its remaining time in ms."""
    key = f"embq:{{{run.info.run}}}:writer"
    return (run.client.get(key) or b"").decode(), int(run.client.pttl(key))


def test_a_lock_is_kept_while_its_writer_is_busy_with_one_step(run: RunCase) -> None:
    keeper = LockKeeper(run.clock)
    first = run.writer(keeper=keeper)
    run.client.pexpire(f"embq:{{{run.info.run}}}:writer", 100)
    keeper.renew()
    holder, left_ms = lock_of(run)
    assert holder == first.id
    assert 100 < left_ms <= LOCK_TTL_S * 1000


def test_the_lock_of_a_writer_that_is_stuck_is_not_kept(run: RunCase) -> None:
    keeper = LockKeeper(run.clock)
    run.writer(keeper=keeper)
    run.client.pexpire(f"embq:{{{run.info.run}}}:writer", 1)
    run.clock.advance(WEDGED_S + 1)
    wait_until(lambda: lock_of(run)[0] == "")
    keeper.renew()
    assert lock_of(run)[0] == ""
    keeper.note_progress()
    keeper.renew()
    assert lock_of(run)[0] != ""


def test_a_lock_that_was_let_go_or_lost_is_not_taken_again(run: RunCase) -> None:
    keeper = LockKeeper(run.clock)
    first = run.writer(keeper=keeper)
    first.release()
    keeper.renew()
    assert lock_of(run)[0] == ""
    second = run.writer(keeper=keeper)
    third = run.writer()
    keeper.renew()
    third.release()
    keeper.renew()
    assert lock_of(run)[0] == "", f"{second.id} had lost it to {third.id}"


# --- the service ---


def served(service: WriterService, *steps: Callable[[], object]) -> None:
    """Let a service work until each step in turn has given something true."""
    left = iter(steps)
    wanted = next(left, None)
    end = time.monotonic() + 100

    def stopped() -> bool:
        nonlocal wanted
        assert time.monotonic() < end, "nothing came of it"
        if wanted is not None and wanted():
            wanted = next(left, None)
        return wanted is None

    service.serve(stopped)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that the service has tried to open, once for each try."""
    made: list[str] = []

    class Counted(RunWriter):
        def __init__(self, client: redis.Redis, record: RunRecord, **options: Any) -> None:
            made.append(record.run)
            super().__init__(client, record, **options)

    monkeypatch.setattr("embq.writer.service.RunWriter", Counted)
    return made


def test_a_second_service_waits_quietly_and_goes_on_as_soon_as_the_first_lets_go(
    run: RunCase, caplog: pytest.LogCaptureFixture, tries: list[str]
) -> None:
    register(run.client, run.record)
    first = run.writer()
    second = WriterService(run.client, version="test")

    def the_first_lets_go() -> bool:
        if run.info.run in tries:
            first.release()
        return run.info.run in tries

    caplog.clear()  # the first one's opening, where an earlier test has left the log at info
    with caplog.at_level("WARNING"):
        served(second, the_first_lets_go, lambda: run.info.run in second.runs)
    assert run.info.run not in caplog.text
    assert run.info.run not in second._retry_at, "it looks again at each round"
    assert tries.count(run.info.run) == 2, "the first round after that is the one"


def test_a_service_whose_run_was_taken_over_waits_and_does_not_take_it_back(
    run: RunCase, caplog: pytest.LogCaptureFixture, tries: list[str]
) -> None:
    register(run.client, run.record)
    first = WriterService(run.client, version="test", takeover=True)
    second: list[RunWriter] = []

    def the_second_takes_over() -> bool:
        if run.info.run in first.runs:
            second.append(RunWriter(run.client, run.record, version="test", takeover=True))
        return bool(second)

    with caplog.at_level("WARNING"):
        served(
            first,
            the_second_takes_over,
            lambda: run.info.run not in first.runs,
            lambda: second[0].step() or tries.count(run.info.run) > 2,
        )
    assert caplog.text.count("run_held") == 1
    assert lock_of(run)[0] == second[0].id


def test_results_that_a_broker_brings_back_after_the_end_of_their_run_are_dropped(make_run: MakeRun) -> None:
    """A broker that comes back as it was in the middle of the run has them, and they would take its memory from then
    on."""
    run = make_run(40)
    writer = run.writer()
    for u in range(39):
        run.work_one(u)
    writer.inbox.read()  # some are delivered
    copy = {key: run.client.dump(key) for key in run.ledger.keys}
    run.work_one(39)
    run.finish(writer)
    writer.release()
    for key, value in copy.items():
        run.client.delete(key)
        if value is not None:
            run.client.restore(key, 0, value)
    register(run.client, run.record)
    run.client.sadd(ACTIVE, run.info.run)
    assert run.client.xlen(run.key("res")) == 39
    service = WriterService(run.client, version="test")
    served(service, lambda: service._opened, lambda: run.info.run not in service.runs)
    assert run.client.xlen(run.key("res")) == 0
    assert run.client.xpending(run.key("res"), "w")["pending"] == 0
    run.assert_exact()


def test_the_service_writes_new_runs_and_drains_when_it_is_stopped(make_run: MakeRun) -> None:
    run, other = make_run(3), make_run(1)
    for one in (run, other):
        register(one.client, one.record)
    service = WriterService(run.client, version="test", only=run.info.run)
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            run.work_one(0)
            run.work_one(1)
        return asked > 4

    service.serve(stopped)
    run.assert_exact([0, 1])
    assert list(other.layout.commits.iterdir()) == []
    RunWriter(run.client, run.record, version="test", clock=run.clock)


def test_a_run_whose_folder_is_gone_holds_up_no_other(
    own_client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, gone = make_case(own_client, tmp_path / "good", 2), make_case(own_client, tmp_path / "gone", 2)
    for case in (gone, good):
        register(own_client, case.record)
    gone.layout.run_json.unlink()
    service = WriterService(own_client, version="test")
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            all_work(good)
        return CommitLog(good.layout).replay(2).closed

    with caplog.at_level("ERROR"):
        service.serve(stopped)
    assert "run_not_written" in caplog.text
    good.assert_exact()


def test_an_error_of_one_run_s_disk_ends_no_service(
    run: RunCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register(run.client, run.record)
    service = WriterService(run.client, version="test")

    def broken(self: RunWriter) -> int:
        raise OSError(errno.EROFS, "Read-only file system", "/the/file")

    monkeypatch.setattr(RunWriter, "step", broken)
    with caplog.at_level("ERROR"):
        served(service, lambda: "run_not_written" in caplog.text)
    assert "/the/file cannot be written" in caplog.text
    with pytest.raises(OutputError, match="/the/file"):
        WriterService(run.client, version="test", only=run.info.run).serve(lambda: False)


def test_the_only_run_of_a_service_ends_it_where_it_cannot_be_written(run: RunCase) -> None:
    register(run.client, run.record)
    run.layout.run_json.unlink()
    with pytest.raises(InputError):
        WriterService(run.client, version="test", only=run.info.run).serve(lambda: False)
