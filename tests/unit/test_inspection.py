"""A file that ends the library that reads it, or keeps it busy for ever, fails alone; planning goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.errors import ConfigError, MalformedError, SourceError
from embq.core.units import Unit
from embq.producer.plan import plan
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.sources.reader_process import client
from embq.sources.unit_reader import read

CHILD = """
import os
from embq.sources.reader_process import server
look = server._response
def fatal(unit, metadata_of):
    if "aborts" in unit.source:
        os.abort()
    while "spins" in unit.source:
        pass
    return look(unit, metadata_of)
server._response = fatal
server.serve()
"""
"""A process that looks as always, except that two libraries are as bad as some are."""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[client.Process]:
    process = client.Process("-c", CHILD)
    monkeypatch.setattr(client, "_LOOKS", process)
    monkeypatch.setattr(client, "CPU_S", 0)
    yield process
    process.close()


def test_a_process_that_cannot_start_is_no_ones_damage(tmp_path: Path) -> None:
    broken = client.Process("-c", "raise SystemExit(3)")
    with pytest.raises(ConfigError, match="ended with status 3"):
        broken.query(Unit(kind="parquet", source=str(tmp_path)))


def write(path: Path) -> Path:
    pq.write_table(pa.table({"text": [path.stem, "another"]}), path)
    return path


def test_a_file_that_ends_its_reader_fails_alone(tmp_path: Path, process: client.Process) -> None:
    for name in ("a", "b-aborts", "c"):
        write(tmp_path / f"{name}.parquet")
    units = list(plan([str(tmp_path)], ReadOptions()).units)
    assert [unit.samples for unit in units] == [2, None, 2]
    assert [sample.text for unit in units[::2] for sample in read(unit, ())][::2] == ["a", "c"]
    with pytest.raises(SourceError, match="b-aborts") as caught:
        list(read(units[1], ()))  # no worker opens it
    assert (caught.value.code, caught.value.transient) == ("reader_died", False)


@pytest.mark.parametrize(("name", "says"), [("aborts", "SIGABRT"), ("spins", "comes to no end")])
def test_a_run_of_such_a_file_alone_is_refused_with_how_it_ended(
    tmp_path: Path, process: client.Process, name: str, says: str
) -> None:
    with pytest.raises(SourceError, match=says) as caught:
        plan([str(write(tmp_path / f"{name}.parquet"))], ReadOptions())
    assert caught.value.code == "reader_died"
    assert caught.value.next_step


def test_a_process_that_somebody_ends_is_replaced(tmp_path: Path, process: client.Process) -> None:
    path = str(write(tmp_path / "a.parquet"))
    for _ in range(2):
        (unit,) = SOURCES["parquet"].split(path, ReadOptions())
        assert unit.samples == 2
        child = process._process
        assert child is not None
        child.kill()


def test_what_the_other_process_raises_is_raised_here(tmp_path: Path) -> None:
    gone = Unit(kind="parquet", source=str(tmp_path / "gone.parquet"), etag="1-1")
    with pytest.raises(SourceError, match="does not exist") as caught:
        client.inspect(gone)
    assert (caught.value.code, caught.value.transient) == ("source_missing", False)
    with pytest.raises(RuntimeError, match="AttributeError"):
        client.inspect(Unit(kind="lines", source=str(tmp_path)))
    with pytest.raises(MalformedError, match="kind"):
        client.inspect(Unit(kind="no such kind", source=str(tmp_path)))


READER = """
import os, signal
from embq.sources.reader_process import server
read = server.read_here
def odd(unit, roots, on_progress, only):
    for sample in read(unit, roots, on_progress=on_progress):
        yield sample
    if sample.text != "b":
        return
    if "aborts" in unit.source:
        os.abort()
    if "ended" in unit.source:
        os.kill(os.getpid(), signal.SIGTERM)
    if "killed" in unit.source:
        os.kill(os.getpid(), signal.SIGKILL)
server.read_here = odd
server.serve()
"""


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[client.Process]:
    """The process in which units of tables are read."""
    process = client.Process("-c", READER)
    monkeypatch.setattr(client, "_IDLE", [process])
    yield process
    process.close()
    client.close()


def units_of(path: Path, count: int) -> list[Unit]:
    with open(path, "wb") as file:
        pq.write_table(pa.table({"text": ["a", "b"] * count}), file)
    return list(SOURCES["parquet"].split(str(path), ReadOptions(unit_samples=2)))


@pytest.mark.parametrize(("name", "transient"), [("aborts", False), ("killed", True)])
def test_a_table_that_ends_its_reader_fails_and_the_worker_reads_on(
    tmp_path: Path, reader: client.Process, name: str, transient: bool
) -> None:
    (bad,) = units_of(tmp_path / f"{name}.parquet", 1)
    with pytest.raises(SourceError, match=name) as caught:
        list(read(bad, ()))
    assert (caught.value.code, caught.value.transient) == ("reader_died", transient)
    (good,) = units_of(tmp_path / "good.parquet", 1)
    assert [sample.text for sample in read(good, ())] == ["a", "b"]


def test_units_of_one_table_are_read_by_one_process_and_one_left_halfway_by_none(
    tmp_path: Path, reader: client.Process
) -> None:
    first, second, third = units_of(tmp_path / "good.parquet", 3)
    assert len(list(read(first, ()))) == 2
    child = reader._process
    assert child is not None
    left = read(second, ())
    assert next(left).text == "a"
    assert reader._process is child
    left.close()  # type: ignore[attr-defined]
    assert child.poll() is not None
    assert [sample.key for sample in read(third, ())] == ["good.parquet:5", "good.parquet:6"]


def test_a_signal_that_is_meant_for_the_worker_fails_no_table(tmp_path: Path, reader: client.Process) -> None:
    """systemd sends SIGTERM to every process of a service, and the worker finishes what it has begun."""
    (unit,) = units_of(tmp_path / "ended.parquet", 1)
    assert [sample.text for sample in read(unit, ())] == ["a", "b"]


def test_a_name_that_is_not_utf8_comes_through(tmp_path: Path) -> None:
    (unit,) = units_of(tmp_path / os.fsdecode(b"caf\xe9.parquet"), 1)
    assert [sample.key for sample in read(unit, ())] == [
        os.fsdecode(b"caf\xe9.parquet:1"),
        os.fsdecode(b"caf\xe9.parquet:2"),
    ]
    (tmp_path / os.fsdecode(b"caf\xe9.parquet")).unlink()
    with pytest.raises(SourceError, match="does not exist"):
        list(read(unit, ()))
