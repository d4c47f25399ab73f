"""A look at the first metadata of a unit: what its reader would give, from little of it, and no longer than allowed."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from embq.core.errors import SourceError
from embq.core.run.run_info import load_run
from embq.core.units import Unit
from embq.producer import plan
from embq.producer.enqueue import prepare
from embq.sources import unit_reader
from embq.sources.interface import Source
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.sources.reader_process import client
from embq.sources.unit_reader import first_metadata, may_have_metadata, read
from tests.contract.inputs import write_lines
from tests.support.outputs.build import request_of as request
from tests.support.outputs.build import write_tar
from tests.support.servers.storage import http_server

METADATA: list[dict[str, Any]] = [{"n": number, "tags": ["a", "b"], "name": f"ä{number}"} for number in range(6)]
OPTIONS = ReadOptions(unit_samples=4, metadata_columns=("n", "tags", "name"))


def write_shard(folder: Path) -> Path:
    sidecars = [{"jpg": b"image", "json": json.dumps(metadata).encode(), "txt": b"a text"} for metadata in METADATA]
    members = [(f"{number}.{kind}", data) for number, one in enumerate(sidecars) for kind, data in one.items()]
    return write_tar(folder / "shard.tar", members)


def write_packed_tar(folder: Path) -> Path:
    path = folder / "packed.tar.gz"
    path.write_bytes(gzip.compress(write_shard(folder).read_bytes()))
    return path


def write_files(folder: Path) -> Path:
    path = folder / "images"
    path.mkdir()
    for number, metadata in enumerate(METADATA):
        (path / f"{number}.jpg").write_bytes(b"image")
        (path / f"{number}.json").write_text(json.dumps(metadata))
    return path


def write_jsonl(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "a text", **metadata}) + "\n" for metadata in METADATA))
    return path


def write_packed_jsonl(folder: Path) -> Path:
    path = folder / "texts.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder).read_bytes()))
    return path


def write_csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "image_path", *METADATA[0]])
        writer.writerows(["a text", "gone.jpg", *map(str, metadata.values())] for metadata in METADATA)
    return path


def table() -> pa.Table:
    rows = [{"text": "a text", "image_path": "gone.jpg", **metadata} for metadata in METADATA]
    return pa.Table.from_pylist(rows)


def write_parquet(folder: Path) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(table(), path, row_group_size=5)
    return path


def write_arrow(folder: Path) -> Path:
    path = folder / "rows.feather"
    feather.write_feather(table(), str(path), chunksize=5)
    return path


WRITERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "tar": ("tar", write_shard),
    "tar.gz": ("tar", write_packed_tar),
    "files": ("files", write_files),
    "jsonl": ("jsonl", write_jsonl),
    "jsonl.gz": ("jsonl", write_packed_jsonl),
    "csv": ("csv", write_csv),
    "parquet": ("parquet", write_parquet),
    "arrow": ("arrow", write_arrow),
}


def split(kind: str, path: Path | str) -> list[Unit]:
    return list(SOURCES[kind].split(str(path), OPTIONS))


def look(unit: Unit, most: int) -> list[Any]:
    return [json.loads(text) for text in SOURCES[unit.kind].first_metadata(unit, most)]


def expected(kind: str) -> list[dict[str, Any]]:
    """CSV has texts only."""
    return METADATA if kind != "csv" else [{name: str(value) for name, value in one.items()} for one in METADATA]


def test_every_kind_whose_samples_have_metadata_is_here() -> None:
    assert {kind for kind, _ in WRITERS.values()} == {
        kind for kind, one in SOURCES.items() if type(one).first_metadata is not Source.first_metadata
    }


@pytest.mark.parametrize(("kind", "write"), WRITERS.values(), ids=WRITERS)
def test_the_look_sees_what_the_reader_gives(tmp_path: Path, kind: str, write: Callable[[Path], Path]) -> None:
    units = split(kind, write(tmp_path))
    assert all(map(may_have_metadata, units))
    assert look(units[0], 3) == expected(kind)[:3]
    assert [one for unit in units for one in look(unit, 100)] == expected(kind), "the later units have their own"


@pytest.mark.parametrize(("kind", "write"), WRITERS.values(), ids=WRITERS)
def test_no_image_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, write: Callable[[Path], Path]
) -> None:
    unit = split(kind, write(tmp_path))[0]
    for image in tmp_path.rglob("*.jpg"):
        image.unlink()
    assert look(unit, 2) == expected(kind)[:2]


def test_other_kinds_are_not_asked(tmp_path: Path) -> None:
    assert not any(map(may_have_metadata, SOURCES["lines"].split(str(write_lines(tmp_path)), ReadOptions())))


def test_columns_that_nobody_named_are_not_looked_at(tmp_path: Path) -> None:
    for kind, write in (("parquet", write_parquet), ("arrow", write_arrow)):
        assert not any(map(may_have_metadata, SOURCES[kind].split(str(write(tmp_path)), ReadOptions())))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "1.jpg").write_bytes(b"image")
    assert not any(map(may_have_metadata, SOURCES["files"].split(str(tmp_path / "bare"), ReadOptions())))


@pytest.mark.parametrize("write", [write_shard, write_packed_tar])
def test_of_a_shard_only_the_first_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    (unit,) = split("tar", write(tmp_path))
    # The json of the first key, half the image of the next.
    monkeypatch.setattr("embq.sources.formats.tar.LOOKED_AT_BYTES", 512 * 7)
    assert look(unit, 100) == METADATA[:1]


def test_samples_that_will_fail_say_nothing(tmp_path: Path) -> None:
    members = [("a.json", b"{"), ("b.json", b"[1]"), ("c.json", b'{"n":1}'), ("c.jpg", b"i")]
    (unit,) = split("tar", write_tar(tmp_path / "shard.tar", members))
    assert look(unit, 100) == [{"n": 1}]


@pytest.mark.parametrize("kind", ["tar", "files", "jsonl", "parquet"])
def test_a_remote_unit_is_looked_at_as_well(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    path = WRITERS[kind][1](folder)
    with http_server(folder) as server:
        unit = split(kind, f"{server.url}/{path.name}")[0]
        assert may_have_metadata(unit)
        assert look(unit, 2) == METADATA[:2]


# --- when a run is made ---


request_of = partial(request, options=ReadOptions(unit_samples=4))


def named(output: Path) -> dict[str, str]:
    return {column.name: column.type for column in load_run(output).rows.columns}


FOUND = {"n": "int64", "tags": "json", "name": "string"}


def test_a_run_has_the_columns_of_its_first_units_and_keeps_them(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path)
    moved = prepare(request_of(tmp_path / "out", first), relocate=lambda unit: unit).info
    assert named(tmp_path / "out") == FOUND
    later = tmp_path / "later.jsonl"
    later.write_text('{"text":"a text","n":"other","new":1}\n')
    grown = prepare(request_of(tmp_path / "out", first, later))
    assert (grown.added, grown.info.rows) == (1, moved.rows)
    assert prepare(request_of(tmp_path / "other", later)).info.rows != moved.rows


def test_columns_are_no_part_of_what_a_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepare(request_of(tmp_path / "out", write_jsonl(tmp_path))).info
    (tmp_path / "out").rename(tmp_path / "old")
    monkeypatch.setattr(plan, "LOOK_S", 0.0)
    again = prepare(request_of(tmp_path / "out", tmp_path / "texts.jsonl")).info
    assert (again.run, again.rows.columns) == (made.run, ())


def test_a_damaged_first_shard_holds_up_nothing(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path).rename(tmp_path / f"{name}.tar") for name in "ab" if not (tmp_path / name).exists()]
    shards[0].write_bytes(b"\1" * 10_000)
    assert prepare(request_of(tmp_path / "out", *shards)).info.units == 2
    assert named(tmp_path / "out") == FOUND


CHILD = """
from embq.sources.reader_process import server
from embq.sources.formats.tables import TableSource
look = TableSource.first_metadata
def odd(self, unit, most):
    while "spins" in unit.source:
        pass
    if "raises" in unit.source:
        import os
        os.abort()
    return look(self, unit, most)
TableSource.first_metadata = odd
server.serve()
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    process = client.Process("-c", CHILD)
    monkeypatch.setattr(client, "_LOOKS", process)
    yield
    process.close()


def test_a_table_that_ends_its_reader_says_nothing_and_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: None
) -> None:
    monkeypatch.setattr(plan, "LOOK_S", 120.0)  # four processes are started in it
    tables = [write_parquet(tmp_path).rename(tmp_path / f"{name}.parquet") for name in ("a-raises", "b")]
    assert prepare(request_of(tmp_path / "out", *tables, options=OPTIONS)).info.units == 4
    assert named(tmp_path / "out") == FOUND


def test_a_look_that_comes_to_no_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: None) -> None:
    path = write_parquet(tmp_path).rename(tmp_path / "spins.parquet")
    unit = split("parquet", path)[0]
    with pytest.raises(SourceError) as caught:
        client.first_metadata(unit, 1, wait_s=0.5)
    assert caught.value.code == "reader_died"
    monkeypatch.setattr(plan, "LOOK_S", 0.5)
    assert prepare(request_of(tmp_path / "out", path, options=OPTIONS)).info.rows.columns == ()
    assert len(list(read(unit, ()))) == 4


def test_the_answer_of_a_look_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (unit,) = split("jsonl", write_jsonl(tmp_path))[:1]
    texts = first_metadata(unit, 3, wait_s=60.0)
    monkeypatch.setattr(unit_reader, "METADATA_CHARS", len(texts[0]) + len(texts[1]))
    assert first_metadata(unit, 3, wait_s=60.0) == texts[:2]


def test_a_look_ends_with_the_first_text_behind_its_time(tmp_path: Path) -> None:
    unit = split("jsonl", write_jsonl(tmp_path))[0]
    assert len(first_metadata(unit, 3, wait_s=0.0)) == 1
