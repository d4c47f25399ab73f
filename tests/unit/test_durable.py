"""Files that are complete or not there."""

from __future__ import annotations

import concurrent.futures
import errno
import gc
import hashlib
import os
import threading
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.storage import durable
from embq.core.storage.durable import drop, file_sha256, output_error, publish, reserve, trim, write_new
from embq.core.storage.hashing import BEHIND_BYTES, HashingFile
from tests.faults.kit.disk import SmallDisk


def test_a_new_file_is_there_whole_and_its_temporary_name_is_gone(tmp_path: Path) -> None:
    write_new(tmp_path / "a", b"data", temporary=tmp_path / "t")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"data")]


def test_an_existing_name_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"second", temporary=tmp_path / "t")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"first")]


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_failure_before_the_name_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="broken"):
        write_new(tmp_path / "a", b"data", temporary=tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_content_is_synced_before_the_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(name: str, real: object) -> object:
        def called(*args: object) -> object:
            calls.append(name)
            return real(*args)  # type: ignore[operator]

        return called

    for name in ("fsync", "link", "rename"):
        monkeypatch.setattr(os, name, record(name, getattr(os, name)))
    write_new(tmp_path / "a", b"x", temporary=tmp_path / "t")
    assert calls == ["fsync", "link", "fsync"]
    calls.clear()
    (tmp_path / "t").write_bytes(b"y")
    publish(tmp_path / "t", tmp_path / "b")
    assert calls == ["fsync", "rename", "fsync"]
    assert (tmp_path / "b").read_bytes() == b"y"


def test_a_files_hash_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EACCES, "not_writable"),
        (errno.EROFS, "not_writable"),
        (errno.EIO, "output"),
    ],
)
def test_a_failed_write_says_what_the_user_can_do(number: int, code: str) -> None:
    error = output_error(OSError(number, os.strerror(number)), Path("/out/x"))
    assert error.code == code
    assert "/out/x" in error.message
    assert bool(error.next_step) == (code != "output")
    another = output_error(OSError(number, os.strerror(number)), Path("/out/x"), next_steps={code: "do that"})
    assert (another.message, another.code, another.next_step) == (error.message, code, "do that")


def test_a_folder_can_be_synced_and_a_file_is_none(tmp_path: Path) -> None:
    durable.fsync_folder(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(NotADirectoryError):
        durable.fsync_folder(tmp_path / "a")


def test_what_cannot_be_removed_stays_and_hides_no_other_error(tmp_path: Path) -> None:
    drop(tmp_path / "not there")
    drop(tmp_path)
    assert tmp_path.exists()
    (tmp_path / "temporary").mkdir()
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "file", b"data", temporary=tmp_path / "temporary")


def test_room_that_is_not_there_is_refused_before_anything_is_written() -> None:
    with closing(SmallDisk(2)) as disk:
        path = disk.path / "file"
        path.touch()
        with pytest.raises(OSError, match="No space left") as caught:
            reserve(path, 4 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert path.stat().st_size == 0


def test_room_that_was_set_aside_and_not_used_is_given_back() -> None:
    with closing(SmallDisk(2)) as disk:
        path = disk.path / "file"
        path.write_bytes(b"used")
        free = os.statvfs(disk.path).f_bfree
        reserve(path, 1 << 20)
        assert path.read_bytes() == b"used"
        assert os.statvfs(disk.path).f_bfree < free - 200
        trim(path)
        assert (path.read_bytes(), os.statvfs(disk.path).f_bfree) == (b"used", free)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_parquet_writer_that_is_collected_while_another_file_is_hashed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"a": [1]})
    with open(tmp_path / "failed", "wb") as raw:
        failed = pq.ParquetWriter(pa.PythonFile(HashingFile(raw), mode="w"), table.schema)
        failed.write_table(table)
    failed.itself = failed  # as the traceback of a failure holds it: only the garbage collector ends it
    del failed

    class Collecting(concurrent.futures.Future[None]):
        """A future that is made when the garbage collector is due."""

        def __init__(self) -> None:
            gc.collect()
            super().__init__()

    with open(tmp_path / "whole", "wb") as raw:
        file = HashingFile(raw)
        writing = threading.Thread(target=file.write, args=(b"data",), daemon=True)
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures._base.Future", Collecting)
            writing.start()
            writing.join(20)
        assert not writing.is_alive()
    assert file.hexdigest() == hashlib.sha256(b"data").hexdigest()


def test_the_disk_is_asked_for_what_is_written_long_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def begin_sync(descriptor: int, start: int) -> None:
        durable.begin_sync(descriptor, start)
        asked.append(start)

    monkeypatch.setattr("embq.core.storage.hashing.begin_sync", begin_sync)
    data = os.urandom(1 << 20)
    with open(tmp_path / "part", "wb") as raw:
        file = HashingFile(raw)
        for _ in range(20):
            file.write(data)
    assert asked == [0, BEHIND_BYTES]
    assert (tmp_path / "part").read_bytes() == data * 20
    assert file.hexdigest() == hashlib.sha256(data * 20).hexdigest()
