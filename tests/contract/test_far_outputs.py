"""An output on an object store: planned, written, taken over, cleaned up, each time with the exact rows in the end."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis

from embq.app.gc.collect import collect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import AwayError, ConfigError, InputError, OutputError, TryLaterError
from embq.core.formats.folders import row_folders
from embq.core.queue.result_stream import PART_SUFFIX
from embq.core.run import checkpoint
from embq.core.run.checkpoint import committed
from embq.core.run.commit_log import CommitLog
from embq.core.run.control import Control, load_control, save_control
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import row_tables
from embq.core.run.run_info import load_run
from embq.core.run.standing_failures import standing_failures
from embq.core.settings import Settings
from embq.core.storage.objects import ObjectPath, unfinished
from embq.producer.enqueue import Request, prepare
from embq.producer.retry import FailureFilter, preview, retry
from embq.sources.reader_options import ReadOptions
from embq.writer.run_writer import RunWriter
from tests.faults.kit.disk import SmallDisk
from tests.support.outputs.build import go_on, request_of
from tests.support.outputs.run_case import RunCase, make_case
from tests.support.second_reader.checks import verify
from tests.support.servers.storage import Killed, killing


@pytest.fixture(scope="module")
def server(broker: EmbeddedServer) -> EmbeddedServer:
    """One server, not each of two in turn: these tests are about the object store."""
    return broker


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of this machine goes into the test's folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def root(s3: str, tmp_path: Path) -> ObjectPath:
    return ObjectPath(f"s3://bucket/{tmp_path.name}/out")


@pytest.fixture
def run(client: redis.Redis, root: ObjectPath) -> RunCase:
    """A run of 8 units of 3 samples."""
    return make_case(client, root)


def keys(root: ObjectPath) -> list[str]:
    """Keys of the output in the bucket, as the store itself lists them."""
    bucket, _, prefix = str(root).removeprefix("s3://").partition("/")
    listed = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")
    return [one["Key"].removeprefix(f"{prefix}/") for one in listed.get("Contents", ())]


def assert_exact(run: RunCase, root: ObjectPath, folder: Path, **wanted: Any) -> None:
    """As in a folder, with a copy of the bucket that was made without embq; and nothing is left on this machine."""
    bucket, _, prefix = str(root).removeprefix("s3://").partition("/")
    copy = Layout(folder / "copy")
    copy.make(*row_folders(copy, run.info))
    for key in keys(root):
        (copy.root / key).parent.mkdir(exist_ok=True)
        boto3.client("s3").download_file(bucket, f"{prefix}/{key}", str(copy.root / key))
    replace(run, layout=copy).assert_exact(**wanted)
    assert list(run.layout.temporary.iterdir()) == []


def begin_upload(root: ObjectPath, name: str) -> None:
    """Begin an upload, as a writer leaves it that is killed while it sends a large part."""
    bucket, _, prefix = str(root).removeprefix("s3://").partition("/")
    boto3.client("s3").create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{name}")


# --- writing ---


def test_results_become_rows_that_every_reader_finds(run: RunCase, root: ObjectPath, tmp_path: Path) -> None:
    writer = run.writer()
    run.work_one(0, failed=[1])
    run.finish(writer)
    assert_exact(run, root, tmp_path, failures=[("0:1", "decode")])
    _, state = committed(root)
    assert (state.closed, state.rows, state.failures) == (True, 23, 1)
    assert sum(table.num_rows for table in row_tables(root, ["id", "key"])) == 23
    assert [table["key"].to_pylist() for table in standing_failures(root)] == [["0:1"]]
    private = [name for name in keys(root) if name.startswith(("_staging", "_tmp", "_broker", "_writer/probe"))]
    assert private == ["_staging/.shared"]
    report = verify(root, mode="quick")
    assert (report.ok, report.state, report.litter) == (True, "complete", 0)


@pytest.mark.parametrize("format_", ["hdf5", "npy", "arrow"])
def test_parts_of_every_format_are_read_back(client: redis.Redis, root: ObjectPath, format_: str) -> None:
    run = make_case(client, root, 4, format=format_)
    run.finish(run.writer())
    rows = [row for table in row_tables(root) for row in table.to_pylist()]
    assert sorted(row["key"] for row in rows) == sorted(f"{u}:{i}" for u in range(4) for i in range(3))
    assert all(row["embedding"][:2] == [float(part) for part in row["key"].split(":")] for row in rows)


@pytest.mark.parametrize("error", [AwayError("no answer"), OutputError("refused"), PermissionError(13, "denied")])
def test_a_store_that_takes_no_checkpoint_does_not_hold_a_writer_up(
    run: RunCase, root: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    replace_object, refused = ObjectPath.replace, 0

    def replaced(path: ObjectPath, data: bytes) -> None:
        nonlocal refused
        if path.name == "checkpoint.json":
            refused += 1
            raise error
        replace_object(path, data)

    monkeypatch.setattr(checkpoint, "EVERY", 1)
    monkeypatch.setattr(ObjectPath, "replace", replaced)
    run.finish(run.writer())
    assert refused > 2
    assert_exact(run, root, tmp_path)


def test_a_takeover_ends_the_first_writer_at_its_next_commit(run: RunCase, root: ObjectPath, tmp_path: Path) -> None:
    first = run.writer()
    run.work_one(0)
    first.step()
    second = RunWriter(run.client, run.record, version="test", clock=run.clock, takeover=True)
    with pytest.raises(TryLaterError, match="taken over"):
        first.flush()
    run.finish(second)
    assert_exact(run, root, tmp_path)


@pytest.mark.parametrize(("at", "after"), [(0, True), (2, False), (4, False), (4, True), (6, False)])
def test_a_writer_killed_at_any_request_is_followed_by_one_that_ends_exactly(
    run: RunCase, root: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, after: bool
) -> None:
    first = run.writer()
    for u in range(4):
        run.work_one(u, failed=[2] if u == 3 else [])
    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "call", killing(at, after=after))
        with pytest.raises(Killed):
            first.drain()
    run.finish(run.writer())
    assert_exact(run, root, tmp_path, failures=[("3:2", "decode")])


def test_what_a_dead_writer_left_goes_after_the_fence(run: RunCase, root: ObjectPath, tmp_path: Path) -> None:
    run.writer()
    (root / "parts" / "part-00000002.parquet").create(b"never named")
    begin_upload(root, "parts/part-00000002.parquet")
    second = run.writer()
    assert "parts/part-00000002.parquet" not in keys(root)
    assert unfinished(root) == []
    run.finish(second)
    assert_exact(run, root, tmp_path)


def test_no_room_on_this_machine_stops_the_writer_and_loses_nothing(
    run: RunCase, root: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SmallDisk(1)) as disk:
        monkeypatch.setenv("EMBQ_SPOOL", str(disk.path))
        writer = run.writer()
        run.work_one(0)
        writer.step()
        disk.fill()
        with pytest.raises(OutputError) as full:
            writer.flush()
        assert (full.value.code, "EMBQ_SPOOL" in full.value.next_step) == ("no_space", True)
        assert not [name for name in keys(root) if name.startswith("parts/")]
        disk.make_room()
        run.finish(run.writer())
        assert_exact(run, root, tmp_path)


def test_a_store_that_lets_a_name_be_created_twice_holds_nothing_of_a_run(
    texts: Request, root: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectPath, "create", ObjectPath.replace)
    with pytest.raises(ConfigError, match="created twice"):
        prepare(texts)
    assert keys(root) == []


# --- planning ---


@pytest.fixture
def texts(root: ObjectPath, tmp_path: Path) -> Request:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {n}\n" for n in range(25)))
    return request_of(root, tmp_path / "a.txt", models=("stub:4",), options=ReadOptions(unit_samples=10))


def test_a_run_is_made_found_and_added_to(texts: Request, root: ObjectPath, tmp_path: Path) -> None:
    made = prepare(texts)
    assert (made.new, made.info.units, load_run(root)) == (True, 3, made.info)
    again = prepare(texts)
    assert (again.new, again.added) == (False, 0)
    more = prepare(replace(texts, inputs=(*texts.inputs, str(tmp_path / "b.txt"))))
    assert (more.added, more.info.units, len(Manifest(Layout(root)))) == (3, 6, 6)
    with pytest.raises(InputError, match="another run"):
        prepare(replace(texts, models=("stub:8",)))
    save_control(Layout(root), Control(state="paused", priority=7))
    assert load_control(Layout(root)) == Control(state="paused", priority=7)


def test_what_failed_is_mended_and_done_again(texts: Request, root: ObjectPath, tmp_path: Path) -> None:
    good = (tmp_path / "a.txt").read_text()
    (tmp_path / "a.txt").write_text(good.replace("a 7\n", "\n").replace("a 19\n", "\n"))
    prepare(texts)
    go_on(root)
    assert committed(root)[1].failures == 2
    (tmp_path / "a.txt").write_text(good)
    assert preview(root, FailureFilter()).failures == 2
    assert retry(root, FailureFilter(), version="test").units == 2
    go_on(root)
    assert (committed(root)[1].rows, committed(root)[1].failures) == (25, 0)
    assert list(standing_failures(root)) == []
    assert verify(root).violations == ()


@pytest.mark.parametrize("first_there", [False, True], ids=["a new run", "more of a run"])
def test_of_two_plans_at_the_same_time_one_is_told_to_try_again(
    texts: Request, root: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_there: bool
) -> None:
    """The other plans on another machine, whose lock this one does not see."""
    if first_there:
        prepare(texts)
        texts = replace(texts, inputs=(*texts.inputs, str(tmp_path / "b.txt")))
    (tmp_path / "c.txt").write_text("c\n" * 5)
    other = replace(texts, inputs=(*texts.inputs, str(tmp_path / "c.txt")))
    real, planned = ObjectPath.create, []

    def create(path: ObjectPath, data: bytes) -> None:
        if path.name in ("run.json", "gen-0001.json") and not planned:
            planned.append("begun")
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
            thread = threading.Thread(target=lambda: planned.append(prepare(other)))
            thread.start()
            thread.join()
        real(path, data)

    monkeypatch.setattr(ObjectPath, "create", create)
    with pytest.raises(TryLaterError, match="at the same time"):
        prepare(texts)
    info = load_run(root)
    assert planned[1].info == info
    manifest = Manifest(Layout(root))
    assert len(manifest) == info.units == sum(1 for _ in manifest)
    named = {*info.segments, *(name for one in info.added for name in one.segments)}
    assert {name.removeprefix("manifest/") for name in keys(root) if name.endswith("0.parquet")} == named


def test_a_plan_that_adds_nothing_leaves_the_segments_of_another_alone(
    texts: Request, root: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(texts)
    real = ObjectPath.create

    def create(path: ObjectPath, data: bytes) -> None:
        if path.name == "gen-0001.json":
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
            thread = threading.Thread(target=prepare, args=[texts])
            thread.start()
            thread.join()
        real(path, data)

    monkeypatch.setattr(ObjectPath, "create", create)
    assert prepare(replace(texts, inputs=(*texts.inputs, str(tmp_path / "b.txt")))).added == 3
    assert sum(1 for _ in Manifest(Layout(root))) == 6


# --- cleaning up ---


def test_gc_removes_what_nothing_names_and_nothing_else(
    run: RunCase, root: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.finish(run.writer())
    (root / "parts" / "part-00000077.parquet").create(b"never named")
    (root / "manifest" / "gen-0001-abcdef01-00000.parquet").create(b"of a plan that may be at work")
    begin_upload(root, "failures/failures-00000077.parquet")
    before = set(keys(root))
    young = collect(root, Settings(), must_answer=False, older_than_s=3600.0, dry_run=True)
    assert (young.orphans.files, young.orphans.young, young.orphans.in_use) == ((), 1, 1)
    assert set(keys(root)) == before
    old = collect(root, Settings(), must_answer=False, older_than_s=0.0, dry_run=False)
    assert [item.path for item in old.orphans.files] == ["parts/part-00000077.parquet"]
    assert len(old.orphans.uploads) == 1
    assert set(keys(root)) == before - {"parts/part-00000077.parquet"}
    assert unfinished(root) == []
    assert CommitLog(Layout(root)).replay(8).closed


def test_an_upload_of_a_live_worker_outlives_a_takeover_and_others_are_aborted(
    run: RunCase, root: ObjectPath, server: EmbeddedServer, tmp_path: Path
) -> None:
    run.writer()
    live, dead = (
        f"{run.units[u].unit_id}.{token.replace(':', '_')}" for u, token in ((0, run.claim(0)), (1, "1-0:d:0"))
    )
    for name in (live, dead):
        begin_upload(root, f"_staging/{name}{PART_SUFFIX}")
        (root / "_staging" / f"{name}{PART_SUFFIX}").create(b"of a worker that has not published")

    def left() -> list[set[str]]:
        names = (upload.path.name for upload in unfinished(root)), (path.name for path in (root / "_staging").iterdir())
        return [{name.removesuffix(PART_SUFFIX) for name in some} - {".shared"} for some in names]

    run.writer()
    assert left() == [{live, dead}] * 2
    found = collect(root, Settings(broker_url=server.url), must_answer=True, older_than_s=0.0, dry_run=False).orphans
    assert (len(found.files), len(found.uploads), found.in_use) == (1, 1, 2)
    assert left() == [{live}] * 2
    writer = run.writer(rebuild=True)
    assert left() == [set()] * 2
    run.finish(writer)
    assert_exact(run, root, tmp_path)
