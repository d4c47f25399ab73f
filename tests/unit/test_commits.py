"""The commit log, and the fence around it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.errors import OutputError, TryLaterError
from embq.core.rows.results import FAILURE_SCHEMA, row_schema
from embq.core.rows.spec import RowSpec
from embq.core.run.commit_log import CommitLog, LogState, row_files
from embq.core.run.commits import Commit, CommitFiles, CommittedFile, CommittedUnit, seal_of
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo
from embq.core.units import canonical_json
from embq.writer.accept import Accepted
from embq.writer.commit import Committer
from tests.support.planning import call_at_once

UNITS = 8
SCHEMA = row_schema(("text",), {"text": 2}, RowSpec(dtype="float32"))


def record(log: CommitLog, state: LogState, *units: int, epoch: int = 1, rows: int = 1, writer: str = "w") -> Commit:
    """Append a record that makes `units` done, and take it into `state`."""
    first = state.next_id
    made = [
        CommittedUnit(u=u, unit_id=f"{u:032x}", token="t", first_row=i * rows, rows=rows, failures=0)
        for i, u in enumerate(units)
    ]
    count = rows * len(units)
    files = [CommittedFile(path=f"parts/{state.n + 1}", kind="rows", rows=count, bytes=1, sha256="", first_id=first)]
    commit = log.append(
        Commit(
            n=state.n + 1,
            run="r",
            kind="data" if units else "fence",
            prev=state.prev,
            epoch=epoch,
            writer=writer,
            version="test",
            files=tuple(files) if units else (),
            units=tuple(made),
        )
    )
    state.apply(commit)
    return commit


@pytest.fixture
def layout(plain_run: RunInfo, tmp_path: Path) -> Layout:
    return Layout(tmp_path / "out")


@pytest.fixture
def log(layout: Layout) -> CommitLog:
    return CommitLog(layout)


# --- the log ---


def test_the_log_is_read_as_it_was_written(log: CommitLog) -> None:
    state = LogState(units=UNITS)
    written = [record(log, state, 0, 3), record(log, state, epoch=2), record(log, state, 7, epoch=2, rows=4)]
    assert list(log.read()) == written
    assert list(log.read(after=2)) == written[2:]
    again = log.replay(UNITS)
    assert again == state
    assert (again.count, again.rows, again.next_id, again.epoch, again.n) == (3, 6, 6, 2, 3)
    assert [u for u in range(UNITS) if again.is_done(u)] == [0, 3, 7]
    assert [file.first_id for file in row_files(log.read())] == [0, 2]


def test_a_record_is_the_same_whatever_the_form_of_its_json(log: CommitLog, layout: Layout) -> None:
    commit = record(log, LogState(units=UNITS), 0, 3)
    data = (layout.commits / "00000001.json").read_bytes()
    indented = json.dumps(json.loads(data), indent=1).encode()
    assert seal_of(data) == commit.sha256
    assert seal_of(indented) == ""
    assert Commit.parse(data, "1") == Commit.parse(indented, "1") == commit
    files = CommitFiles(n=1, prev="", sha256=commit.sha256, files=commit.files)
    assert CommitFiles.parse(data, "1") == CommitFiles.parse(indented, "1") == files


@pytest.mark.parametrize(
    "change", [(b'"rows":2', b'"rows":3'), (b'"sha256":"', b'"sha256":"0'), (b"{", b"["), (b"}", b"")]
)
def test_a_changed_byte_of_a_record_is_seen_with_its_units_and_without(
    log: CommitLog, layout: Layout, change: tuple[bytes, bytes]
) -> None:
    record(log, LogState(units=UNITS), 0, 3)
    data = (layout.commits / "00000001.json").read_bytes().replace(*change)
    for form in (Commit, CommitFiles):
        with pytest.raises(OutputError, match="is damaged"):
            form.parse(data, "1")


def test_the_done_bits_lie_as_redis_lays_them(log: CommitLog) -> None:
    state = LogState(units=UNITS)
    record(log, state, 0, 7)
    assert bytes(state.done) == b"\x81"


def test_a_number_is_given_to_one_of_many_writers(log: CommitLog, layout: Layout) -> None:
    won: list[str] = []
    lost: list[str] = []

    def write(number: int) -> None:
        try:
            record(log, LogState(units=UNITS), 0, writer=f"w{number}")
            won.append(f"w{number}")
        except FileExistsError:
            lost.append(f"w{number}")

    call_at_once(write, 6)
    assert (len(won), len(lost)) == (1, 5)
    (commit,) = log.read()
    assert commit.writer == won[0]
    assert list(layout.temporary.iterdir()) == []


def reseal(path: Path, **changes: object) -> None:
    """Change a record and give it the hash that fits."""
    commit = Commit.parse(path.read_bytes(), path.name)
    path.write_bytes(replace(commit, **changes).seal()[0])  # type: ignore[arg-type]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: (folder / "00000002.json").write_bytes(b""),
    "cut": lambda folder: (folder / "00000002.json").write_bytes((folder / "00000002.json").read_bytes()[:-20]),
    "no object": lambda folder: (folder / "00000002.json").write_bytes(b"[1, 2]\n"),
    "not utf-8": lambda folder: (folder / "00000002.json").write_bytes(b"\xff\xfe{}"),
    "a bit": lambda folder: (folder / "00000002.json").write_bytes(
        (folder / "00000002.json").read_bytes().replace(b'"u":1', b'"u":5')
    ),
    "another's number": lambda folder: (folder / "00000002.json").write_bytes((folder / "00000001.json").read_bytes()),
    "broken chain": lambda folder: reseal(folder / "00000002.json", prev="0" * 64),
    "first changed with its hash": lambda folder: reseal(folder / "00000001.json", writer="x"),
    "unit twice": lambda folder: reseal(
        folder / "00000003.json",
        units=(CommittedUnit(u=1, unit_id="", token="t", first_row=0, rows=1, failures=0),),
    ),
    "unit of no run": lambda folder: reseal(
        folder / "00000003.json",
        units=(CommittedUnit(u=UNITS, unit_id="", token="t", first_row=0, rows=1, failures=0),),
    ),
    "older epoch": lambda folder: reseal(folder / "00000003.json", epoch=0),
    "a gap": lambda folder: (folder / "00000002.json").unlink(),
    "the first is missing": lambda folder: (folder / "00000001.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_log_that_is_damaged_stops_the_run(log: CommitLog, layout: Layout, damage: Callable[[Path], object]) -> None:
    state = LogState(units=UNITS)
    for u in range(3):
        record(log, state, u)
    damage(layout.commits)
    with pytest.raises(OutputError) as caught:
        log.replay(UNITS)
    assert caught.value.code == "commit_damaged"
    assert "backup" in caught.value.next_step


def test_a_record_of_another_schema_says_so(log: CommitLog, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("embq.core.run.commits.SCHEMA", 3)
        record(log, LogState(units=UNITS), 0)
    with pytest.raises(OutputError, match="schema 3, this embq reads up to 2"):
        log.replay(UNITS)


def test_records_appended_while_the_log_is_replayed_are_no_gap(
    log: CommitLog, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = LogState(units=UNITS)
    record(log, state, 0)
    real = CommitLog.read
    late = [1, 2]

    def read(self: CommitLog, after: int = 0) -> Iterator[Commit]:
        yield from real(self, after)
        while late:
            record(log, state, late.pop())

    monkeypatch.setattr(CommitLog, "read", read)
    assert log.replay(UNITS).count == 3


def test_the_seal_covers_every_byte_of_meaning() -> None:
    commit = Commit(n=1, run="r", kind="data", prev="", epoch=1, writer="w", version="v", totals={"rows": 1})
    data, digest = commit.seal()
    assert Commit.parse(data, "x") == replace(commit, sha256=digest)
    body = json.loads(data)
    for name in body:
        with pytest.raises(OutputError):
            Commit.parse(canonical_json({**body, name: "changed"}).encode(), "x")


# --- writers ---


def accepted(u: int, rows: int = 2, failures: int = 0) -> Accepted:
    table = pa.table(
        {
            "ordinal": list(range(rows)),
            "key": [f"{u}:{i}" for i in range(rows)],
            "embedding": [[float(u), float(i)] for i in range(rows)],
            "caption": [None] * rows,
            "metadata": [None] * rows,
        },
        schema=SCHEMA,
    )
    failed = pa.table(
        {
            "ordinal": list(range(rows, rows + failures)),
            "key": [f"{u}:{rows + i}" for i in range(failures)],
            "code": ["decode"] * failures,
            "message": ["m"] * failures,
            "attempt": [1] * failures,
        },
        schema=FAILURE_SCHEMA,
    )
    return Accepted(
        entry=f"{u}-0",
        u=u,
        unit_id=f"{u:032x}",
        token="1-0:a:b",
        rows=table,
        failures=failed,
        quarantined="",
        staged="",
        bytes=10,
    )


def open_writer(layout: Layout, info: RunInfo, name: str) -> Committer:
    """A writer as it is after its start."""
    log = CommitLog(layout)
    committer = Committer(layout, info, log, log.replay(UNITS), writer=name, version="test")
    committer.take_epoch()
    return committer


def contents(layout: Layout) -> list[tuple[int, str]]:
    """(id, key) of every row of the committed files, whose hashes, sizes and counts are checked."""
    rows: list[tuple[int, str]] = []
    for commit in CommitLog(layout).read():
        for file in commit.files:
            path = layout.root / file.path
            assert path.stat().st_size == file.bytes
            if file.kind == "rows":
                table = pq.read_table(path)
                assert table.num_rows == file.rows
                rows += zip(table["id"].to_pylist(), table["key"].to_pylist(), strict=True)
    return rows


def expected(units: Sequence[int]) -> list[tuple[int, str]]:
    return list(enumerate(f"{u}:{i}" for u in units for i in range(2)))


def files(layout: Layout) -> set[str]:
    return {
        str(path.relative_to(layout.root))
        for folder in (layout.parts, layout.failures, layout.temporary)
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("call", ["rename", "link"])
def test_a_writer_paused_in_the_middle_of_a_part_fails_as_one_that_was_taken_over(
    layout: Layout, plain_run: RunInfo, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    first = open_writer(layout, plain_run, "first")
    real = getattr(os, call)

    def paused(*args: object) -> None:
        # While the first writer stands here, a second one takes over, sweeps and commits.
        monkeypatch.setattr(os, call, real)
        open_writer(layout, plain_run, "second").commit([accepted(1)])
        real(*args)

    monkeypatch.setattr(os, call, paused)
    with pytest.raises(TryLaterError, match="epoch 2"):
        first.commit([accepted(0)])
    assert contents(layout) == expected([1])
    assert files(layout) == {"parts/part-00000003.parquet"}


def test_every_writer_has_an_epoch_of_its_own(layout: Layout, plain_run: RunInfo) -> None:
    epochs: list[int] = []

    def start(number: int) -> None:
        try:
            epochs.append(open_writer(layout, plain_run, f"w{number}").epoch)
        except TryLaterError:
            epochs.append(-1)  # a later one was faster to the log

    call_at_once(start, 4)
    kept = [epoch for epoch in epochs if epoch > 0]
    assert len(kept) == len(set(kept)) >= 1
    assert max(kept) == CommitLog(layout).replay(UNITS).epoch


def test_a_writer_paused_after_its_fence_removes_nothing_of_its_successor(
    layout: Layout, plain_run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Committer.sweep

    def paused(self: Committer) -> None:
        monkeypatch.setattr(Committer, "sweep", real)
        open_writer(layout, plain_run, "second").commit([accepted(0, failures=1)])
        (layout.temporary / "part-00000004.2.parquet").write_bytes(b"being written by the second")
        real(self)

    monkeypatch.setattr(Committer, "sweep", paused)
    first = open_writer(layout, plain_run, "first")
    assert contents(layout) == expected([0])
    assert len(files(layout)) == 3
    with pytest.raises(TryLaterError):
        first.commit([accepted(1)])


def test_a_record_whose_folder_could_not_be_synced_keeps_its_files(
    layout: Layout, plain_run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_writer(layout, plain_run, "first")
    real_link, real_fsync = os.link, os.fsync

    def link(*args: object) -> None:
        real_link(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(os, "fsync", fail)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OutputError):
        first.commit([accepted(0, failures=1)])
    monkeypatch.setattr(os, "link", real_link)
    monkeypatch.setattr(os, "fsync", real_fsync)
    assert open_writer(layout, plain_run, "second").state.is_done(0)
    assert contents(layout) == expected([0])


def test_nothing_is_removed_before_the_fence_stands(
    layout: Layout, plain_run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layout.parts / "part-00000001.parquet").write_bytes(b"may still be committed by a live writer")

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OutputError):
        open_writer(layout, plain_run, "second")
    assert files(layout) == {"parts/part-00000001.parquet"}


def test_staging_files_of_live_workers_are_not_swept(layout: Layout, plain_run: RunInfo) -> None:
    (layout.staging / "result.arrow").write_bytes(b"x")
    open_writer(layout, plain_run, "w")
    assert (layout.staging / "result.arrow").exists()


class Killed(BaseException):
    """Stands for SIGKILL: no `except` of the writer sees it, though `finally` runs."""


KILLS = [(call, at, after) for call, most in (("fsync", 9), ("rename", 2), ("link", 1)) for at in range(most)
         for after in (False, True)]  # fmt: skip


@pytest.mark.parametrize(("call", "at", "after"), KILLS, ids=lambda value: str(value))
def test_a_writer_killed_at_any_point_is_followed_by_one_that_ends_exactly(
    layout: Layout, plain_run: RunInfo, monkeypatch: pytest.MonkeyPatch, call: str, at: int, after: bool
) -> None:
    first = open_writer(layout, plain_run, "first")
    first.commit([accepted(0)])
    real = getattr(os, call)
    calls = 0

    def kill(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            if after:
                real(*args)
            raise Killed
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, kill)
        # Neither does a killed process tidy up.
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        try:
            first.commit([accepted(1, failures=1)])
        except Killed:
            pass
        else:
            assert calls <= at, "the commit makes fewer calls of this kind"
    second = open_writer(layout, plain_run, "second")
    again = [u for u in range(3) if not second.state.is_done(u)]
    second.commit([accepted(u, failures=u == 1) for u in again])
    second.close({})
    assert contents(layout) == expected([0, 1, 2])
    named = {file.path for commit in CommitLog(layout).read() for file in commit.files}
    assert files(layout) == named
    assert CommitLog(layout).replay(UNITS).ended


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "no_space"), (errno.EACCES, "not_writable")])
def test_a_full_or_forbidden_output_is_an_output_error_and_leaves_no_part(
    layout: Layout, plain_run: RunInfo, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    writer = open_writer(layout, plain_run, "w")

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(OutputError) as caught:
            writer.commit([accepted(0)])
    assert caught.value.code == code
    assert files(layout) == set()
    writer.commit([accepted(0)])
    assert contents(layout) == expected([0])
