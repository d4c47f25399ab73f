"""Parts that workers write: committed as they are, whatever happens around the commit."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.export.export import ExportOptions, export
from embq.app.output.output import open_output
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import AwayError
from embq.core.formats.part import read_unit
from embq.core.queue.hints import Hint
from embq.core.queue.result_stream import PART_SUFFIX, PublishVerdict
from embq.core.rows.arrow_messages import MOST_BYTES, listed_blocks
from embq.core.run.commit_log import CommitLog
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place
from embq.index.collection.run import describe_run
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.meter.meter import Meter
from embq.worker.stages import publish as module
from embq.worker.stages.publish import PublishStage
from tests.support.outputs.run_case import DIM, FINGERPRINT, MakeRun, RunCase, next_file_is, sample, vector, write
from tests.support.second_reader.checks import verify
from tests.support.servers.storage import Killed, environment, s3_proxy

FORMATS = ("parquet", "arrow")


@pytest.fixture(scope="module")
def server(broker: EmbeddedServer) -> EmbeddedServer:
    """One server: what announces a part is tried on both by other files."""
    return broker


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> PublishStage:
    """A worker that writes parts, however small."""
    monkeypatch.setattr(module, "PART_BYTES", 1)
    return PublishStage(Meter(), fingerprint=FINGERPRINT, dims={"text": DIM}, transport="auto", version="test")


def publish(
    run: RunCase,
    stage: PublishStage,
    u: int,
    failed: tuple[int, ...] = (),
    *,
    token: str | None = None,
    count: int = 3,
    width: int = DIM,
) -> None:
    """Publish a unit of `count` samples, of which some have failed."""
    hint = Hint(run=run.info.run, gen=run.gen, u=u, unit=run.units[u])
    work = LeasedUnit(hint, run.record, run.ledger, token or run.claim(u), attempts=0, poison=frozenset())
    samples = [sample(u, ordinal) for ordinal in range(count) if ordinal not in failed]
    if samples:
        vectors = np.array([vector(u, s.ordinal) for s in samples], run.record.rows.dtype)
        work.add_rows(samples, {"text": np.tile(vectors, width // DIM)})
    for ordinal in failed:
        work.add_failure(sample(u, ordinal), "decode", "no image")
    work.end_of_read(count)
    Leases().add(work)
    stage.run(work)


def staged(run: RunCase) -> list[Place]:
    return sorted(path for path in run.layout.staged_parts.iterdir() if path.suffix == PART_SUFFIX)


@pytest.fixture
def make_far(s3: str, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Makes a run whose output is in a bucket; the state of this machine goes into the test's folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return partial(make_run, root=ObjectPath(f"s3://bucket/{tmp_path.name}"))


@pytest.fixture(params=["folder", "bucket"])
def make_any(request: pytest.FixtureRequest, make_run: MakeRun) -> MakeRun:
    """Makes a run whose output is a folder, or in a bucket."""
    made: MakeRun = make_run if request.param == "folder" else request.getfixturevalue("make_far")
    return made


@pytest.mark.parametrize("format_", FORMATS)
def test_parts_of_workers_and_small_results_are_one_record(
    make_any: MakeRun, stage: PublishStage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, format_: str
) -> None:
    run = make_any(5, format=format_)
    writer = run.writer()
    publish(run, stage, 3)
    publish(run, stage, 1, failed=(1,))
    monkeypatch.setattr(module, "PART_BYTES", 1 << 30)
    publish(run, stage, 0)
    publish(run, stage, 4, failed=(0, 1, 2))
    assert len(staged(run)) == 2
    monkeypatch.setattr(module, "PART_BYTES", 1)
    publish(run, stage, 2)
    writer.drain()
    assert writer.finished
    assert staged(run) == []
    failures = [("1:1", "decode"), *((f"4:{i}", "decode") for i in range(3))]
    run.assert_exact(failures=failures)
    (record,) = [commit for commit in CommitLog(run.layout).read() if commit.kind == "data"]
    names = [file.path for file in record.files if file.kind == "rows"]
    assert [file.first_id for file in record.files if file.kind == "rows"] == [0, 3, 5, 8]
    assert sorted(names) == names, "in order of their ids"
    assert [f"{first:012d}" in name for name, first in zip(names[:3], (0, 3, 5), strict=True)] == [True] * 3
    assert [unit.u for unit in record.units] == [3, 1, 2, 0, 4]
    for mode in ("quick", "full"):
        found = verify(run.layout.root, mode=mode).violations  # type: ignore[arg-type]
        assert {one.invariant for one in found} <= {"source_changed"}, "its input is nowhere"
    assert len(open_output(run.layout.root)) == 11
    parts = describe_run(run.layout.root, output=None, column=None)["parts"]
    assert [part.first_id for part in parts] == [0, 3, 5, 8]
    export(run.layout.root, tmp_path / "sorted", ExportOptions(format="parquet", order="manifest"))
    table = pq.read_table(tmp_path / "sorted" / "parts")
    assert table["key"].to_pylist() == [f"{u}:{i}" for u in range(4) for i in range(3) if (u, i) != (1, 1)]
    assert dict(zip(table["key"].to_pylist(), table["id"].to_pylist(), strict=True)) == {
        key: id_ for id_, key, _ in run.rows()
    }


def test_a_part_is_the_writers_but_for_its_ids(
    run: RunCase, stage: PublishStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = run.writer()
    publish(run, stage, 0)
    monkeypatch.setattr(module, "PART_BYTES", 1 << 30)
    publish(run, stage, 1)
    writer.drain()
    (record,) = [commit for commit in CommitLog(run.layout).read() if commit.kind == "data"]
    of_worker, of_writer = (pq.read_schema(run.layout.root / file.path) for file in record.files)
    assert of_writer.names[1:] == of_worker.names
    assert of_writer.remove(0).equals(of_worker)
    assert {**of_writer.metadata, b"ARROW:schema": b""} == {**of_worker.metadata, b"ARROW:schema": b""}


@pytest.mark.parametrize(
    "when",
    ["embq.writer.commit.link", "embq.writer.commit.CommitLog.append", "embq.writer.queue.RunQueue.mark"],
    ids=["before the parts", "between parts and record", "before the broker knows"],
)
def test_a_writer_that_dies_in_a_commit_leaves_nothing_twice(
    make_any: MakeRun, stage: PublishStage, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run = make_any(5)
    writer = run.writer()
    publish(run, stage, 0)
    publish(run, stage, 1)

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(when, killed)
        with pytest.raises(Killed):
            writer.drain()
    assert len(staged(run)) == 2
    publish(run, stage, 2)
    successor = run.writer()
    successor.drain()
    run.assert_exact([0, 1, 2])
    assert staged(run) == []


def test_two_workers_with_one_unit(make_any: MakeRun, stage: PublishStage) -> None:
    run = make_any(5)
    writer = run.writer()
    publish(run, stage, 0)
    late = run.layout.staged_parts / f"{run.units[0].unit_id}.late{PART_SUFFIX}"
    write(late, staged(run)[0].read_bytes())
    writer.drain()
    run.assert_exact([0])
    assert late.exists(), "it may be of a worker that is at work"
    run.finish(writer)
    assert not late.exists()
    run.assert_exact()


DAMAGES = {
    "gone": "lost_result",
    "cut": "bad_result",
    "rows": "wrong_count",
    "columns": "bad_result",
    "twice": "wrong_count",
}


@pytest.mark.parametrize(
    ("make_any", "format_", "damage"),
    [
        *(("folder", format_, damage) for format_ in FORMATS for damage in DAMAGES),
        *(("bucket", "parquet", "gone"), ("bucket", "parquet", "twice"), ("bucket", "arrow", "cut")),
    ],
    indirect=["make_any"],
)
def test_a_part_that_is_not_what_was_announced_is_refused(
    make_any: MakeRun, stage: PublishStage, format_: str, damage: str
) -> None:
    run = make_any(2, format=format_)
    writer = run.writer()
    publish(run, stage, 0)
    (path,) = staged(run)
    data = path.read_bytes()
    table = pq.read_table(io.BytesIO(data)) if format_ == "parquet" else pa.ipc.open_file(data).read_all()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        write(path, data[:-20])
    else:
        changed = {
            "rows": table.slice(1),
            "columns": table.drop_columns(["caption"]),
            "twice": pa.concat_tables([table.slice(0, 2), table.slice(0, 1)]),
        }[damage]
        new = io.BytesIO()
        if format_ == "parquet":
            pq.write_table(changed, new)
        else:
            with pa.ipc.new_file(new, changed.schema) as file:
                file.write_table(changed)
        write(path, new.getvalue())
    writer.step()
    run.clock.advance(20)
    writer.step()
    assert writer.counts.rejected == {DAMAGES[damage]: 1}
    run.finish(writer)
    run.assert_exact()


def test_no_part_is_taken_where_the_staging_folder_is_apart(
    make_any: MakeRun, stage: PublishStage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMBQ_STAGING", str(tmp_path / "apart"))
    (tmp_path / "apart").mkdir()
    run = make_any(1)
    writer = run.writer()
    publish(run, stage, 0)
    assert staged(run) == []
    writer.drain()
    run.assert_exact([0])


def test_a_full_disk_keeps_the_rows(run: RunCase, stage: PublishStage, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = run.writer()
    token = run.claim(0)
    next_file_is("/dev/full", monkeypatch)
    publish(run, stage, 0, token=token)
    assert stage.full_runs() == {run.info.run}
    deadline = time.monotonic() + 10
    while stage.full_runs() and time.monotonic() < deadline:
        time.sleep(0.01)
        stage.again()
    writer.drain()
    run.assert_exact([0])


def test_a_part_without_rows_is_refused(run: RunCase) -> None:
    """Its name would be that of the next part."""
    writer = run.writer()
    assert run.publish_part(0, run.claim(0), failed=[0, 1, 2]) is PublishVerdict.ACCEPTED
    writer.drain()
    assert writer.counts.rejected == {"bad_result": 1}
    assert run.publish_part(1, run.claim(1)) is PublishVerdict.ACCEPTED
    writer.drain()
    run.assert_exact([1])


def test_a_part_that_is_gone_before_its_commit_holds_up_no_other(make_any: MakeRun) -> None:
    run = make_any(5)
    writer = run.writer()
    for u in (0, 1):
        assert run.publish_part(u, run.claim(u)) is PublishVerdict.ACCEPTED
    writer.step()
    assert len(writer.buffer.results) == 2
    (lost,) = [path for path in staged(run) if path.name.startswith(run.units[0].unit_id)]
    lost.unlink()
    writer.drain()
    assert writer.counts.rejected == {"lost_result": 1}
    run.assert_exact([1])
    run.finish(writer)
    run.assert_exact()


def test_a_part_that_cannot_be_linked_is_copied(run: RunCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file of another user where fs.protected_hardlinks is set."""
    writer = run.writer()
    assert run.publish_part(0, run.claim(0)) is PublishVerdict.ACCEPTED
    real = os.link

    def link(source: Path, target: Path, **options: object) -> None:
        if PART_SUFFIX in str(source):
            raise PermissionError(errno.EPERM, "not permitted")
        real(source, target, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", link)
    writer.drain()
    run.assert_exact([0])


@pytest.mark.parametrize("format_", FORMATS)
def test_a_part_of_another_length_than_announced_is_not_read(tmp_path: Path, format_: str) -> None:
    fields = [pa.field("ordinal", pa.int32(), nullable=False), pa.field("embedding", pa.list_(pa.float16(), 4))]
    schema, rows = pa.schema(fields), 200_000
    table = pa.table([np.zeros(rows, np.int32), pa.nulls(rows, fields[1].type)], schema=schema)
    path = tmp_path / "part"
    if format_ == "parquet":
        pq.write_table(table, path, compression="zstd")
        assert path.stat().st_size < rows, "a few bytes become many"
    else:
        with pa.ipc.new_file(path, schema) as file:
            file.write_table(table)
    for most in (rows, rows - 1) if format_ == "parquet" else (rows - 1,):
        with open(path, "rb") as part, pytest.raises(ValueError, match="rows"):
            read_unit(format_, part, schema, most_rows=most)


@pytest.mark.parametrize("block", [(0, -(1 << 30), 8), (-8, 64, 8), (1 << 40, 64, 8), (8, 64, 1 << 40)], ids=str)
def test_a_batch_that_is_listed_outside_of_an_arrow_part_is_not_read(block: tuple[int, int, int]) -> None:
    """pyarrow ends in a SystemError where a length is negative: found by `make fuzz`."""
    table, file = pa.table({"ordinal": pa.array([0], pa.int32())}), io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as into:
        into.write_table(table)
    (listed,) = listed_blocks(file)[1]
    data = file.getvalue()
    assert data.count(struct.pack("<qi4xq", *listed)) == 1
    changed = io.BytesIO(data.replace(struct.pack("<qi4xq", *listed), struct.pack("<qi4xq", *block)))
    with pytest.raises(ValueError, match="lists a batch that is not in the file"):
        read_unit("arrow", changed, table.schema, most_rows=1)


def test_a_footer_of_an_arrow_part_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.core.rows.arrow_messages.MOST_BYTES", 1)
    table, file = pa.table({"ordinal": pa.array([0], pa.int32())}), io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as into:
        into.write_table(table)
    with pytest.raises(ValueError, match=r"the header of the batch at byte \d+ has"):
        read_unit("arrow", file, table.schema, most_rows=1)
    length = MOST_BYTES + 1
    large = io.BytesIO(b"ARROW1\0\0" + bytes(length) + struct.pack("<i", length) + b"ARROW1")
    with pytest.raises(ValueError, match="its footer has 67,108,865 bytes, more than 67,108,864"):
        listed_blocks(large)


def test_a_run_whose_disk_is_full_gets_no_hints(run: RunCase) -> None:
    run.build()
    run.ledger.disk_full()
    assert run.ledger.next_units(run.gen, 5, queue_empty=True, reap_at=0) == ([], [])
    run.client.hincrby(run.key("meta"), "full_ms", -3_000)
    assert run.ledger.next_units(run.gen, 5, queue_empty=True, reap_at=0)[1] == [0, 1, 2, 3, 4]


def test_a_record_of_several_parts_is_no_older_embqs(run: RunCase) -> None:
    writer = run.writer()
    for u in (0, 1):
        assert run.publish_part(u, run.claim(u)) is PublishVerdict.ACCEPTED
    writer.drain()
    schemas = [json.loads(path.read_bytes())["schema"] for path in sorted(run.layout.commits.iterdir())]
    assert schemas == [1, 2]


# --- in a bucket ---


def test_a_part_in_a_bucket_costs_the_writer_the_same_whatever_it_weighs(
    make_far: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 1)
    asked: Counter[str] = Counter()
    call, read_range = ObjectPath.call, ObjectPath.read_range

    def counted(path: ObjectPath, request: Callable[[Any, str], Any]) -> Any:
        asked["requests"] += 1
        return call(path, request)

    def weighed(path: ObjectPath, start: int, stop: int) -> bytes:
        asked["bytes"] += stop - start
        return read_range(path, start, stop)

    costs = []
    for width in (DIM, 4096):
        run = make_far(1, root=ObjectPath(f"s3://bucket/{tmp_path.name}-{width}"), samples=3_000)
        writer = run.writer()
        stage = PublishStage(Meter(), fingerprint=FINGERPRINT, dims={"text": width}, transport="auto")
        publish(run, stage, 0, count=3_000, width=width)
        (path,) = staged(run)
        size = path.stat().st_size
        with monkeypatch.context() as patched:
            patched.setattr(ObjectPath, "call", counted)
            patched.setattr(ObjectPath, "read_range", weighed)
            writer.step()
        assert writer.finished
        costs.append(asked.copy())
        asked.clear()
    assert size > 24e6, "it was sent in pieces"
    assert costs[0]["requests"] == costs[1]["requests"]
    assert costs[1]["bytes"] < 256 * 1024


@pytest.mark.parametrize("put", [False, True], ids=["before the put", "after it"])
def test_a_worker_that_dies_leaves_nothing_in_the_bucket(
    make_far: MakeRun, stage: PublishStage, monkeypatch: pytest.MonkeyPatch, put: bool
) -> None:
    run = make_far(3)
    writer = run.writer()
    upload = ObjectPath.upload

    def killed(path: ObjectPath, local: Path) -> None:
        if put:
            upload(path, local)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(ObjectPath, "upload", killed)
        with pytest.raises(Killed):
            publish(run, stage, 0, token=run.claim(0, "dies"))
    assert len(staged(run)) == put
    run.die("dies")
    run.age()
    for u in (1, 0, 2):
        publish(run, stage, u)
    writer.drain()
    assert writer.finished
    run.assert_exact()
    assert [path.name for path in run.layout.staged_parts.iterdir()] == [".shared"]


def test_a_worker_that_may_not_write_sends_its_rows_through_the_broker(
    s3: str, make_far: MakeRun, stage: PublishStage
) -> None:
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url}):
        run = make_far(3)
        writer = run.writer()
        proxy.suffer("denied", 1)
        publish(run, stage, 0, failed=(1,))
        assert proxy.asked["PUT denied"] == 1
        publish(run, stage, 1)
        assert staged(run) == [], "it is not tried again"
        writer.drain()
        assert not run.client.exists(run.key("att"))
        publish(run, PublishStage(Meter(), fingerprint=FINGERPRINT, dims={"text": DIM}, transport="auto"), 2)
        assert len(staged(run)) == 1, "another worker may"
        writer.drain()
    run.assert_exact(failures=[("0:1", "decode")])


def test_a_bucket_in_which_the_writer_left_no_nonce_gets_no_part(make_far: MakeRun, stage: PublishStage) -> None:
    run = make_far(1)
    writer = run.writer()
    write(run.layout.staged_parts / ".shared", b"of another broker's writer")
    publish(run, stage, 0)
    assert staged(run) == []
    writer.drain()
    run.assert_exact()


def test_a_worker_that_may_not_list_sends_its_rows_through_the_broker(
    make_far: MakeRun, stage: PublishStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_far(2)
    writer = run.writer()
    asked = []

    def denied(root: Place) -> None:
        asked.append(root)
        raise PermissionError(errno.EACCES, "Access Denied", str(root))

    monkeypatch.setattr(module, "load_run", denied)
    for u in (0, 1):
        publish(run, stage, u)
    assert (len(asked), staged(run)) == (1, [])
    writer.drain()
    run.assert_exact()


def test_a_store_that_is_away_costs_no_unit_an_attempt(
    s3: str, make_far: MakeRun, stage: PublishStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_far(3)
    writer = run.writer()

    def away(*_: object, **__: object) -> None:
        assert stage.meter.board.in_hand() == [], "it is not watched: the client needs longer than the watchdog"
        raise AwayError("the store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectPath, "upload", away)
        publish(run, stage, 0)
        assert staged(run) == []
    publish(run, stage, 1)
    assert staged(run) == [], "for a while it is given nothing"
    stage._shared_from = {key: again_at - module.AWAY_S for key, again_at in stage._shared_from.items()}
    publish(run, stage, 2)
    assert len(staged(run)) == 1
    with monkeypatch.context() as patched:
        patched.setattr("embq.writer.accept.reader", away)
        with pytest.raises(AwayError):
            writer.drain()
    assert not writer.counts.rejected
    assert len(staged(run)) == 1
    run.writer().drain()
    run.assert_exact()


def test_a_put_whose_answer_is_lost_is_one_part(s3: str, make_far: MakeRun, stage: PublishStage) -> None:
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url}):
        run = make_far(1)
        writer = run.writer()
        proxy.suffer("lost", 1)
        publish(run, stage, 0)
        assert (proxy.left, len(staged(run))) == (0, 1)
        writer.drain()
    run.assert_exact()
