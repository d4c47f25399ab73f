"""What every kind of input promises, checked against every kind."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from core.errors import InputError, SourceError
from core.units import Unit
from sources.base import ReadOptions
from sources.kinds import SOURCES, read
from sources.storage import WatchedFile

OPTIONS = ReadOptions(unit_samples=7)
ROWS = {f"{number:03d}": f"the text of {number}" for number in range(40)}
"""Key -> text of every sample: the listing that is independent of any reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind with an input of it.

    Attributes:
        kind: the kind's name.
        write: writes `ROWS` as this kind below a folder, and gives the input's path.
        change: alters a written input.
        listing: (key, image, text) of each sample that must come out, in order.
    """

    kind: str
    write: Callable[[Path], Path]
    change: Callable[[Path], object]
    listing: list[tuple[str, bytes | None, str | None]]


def write_tar(folder: Path) -> Path:
    path = folder / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for key, text in ROWS.items():
            for extension, content in (("jpg", key.encode()), ("txt", text.encode())):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def write_files(folder: Path) -> Path:
    path = folder / "images"
    for key, text in ROWS.items():
        image = path / key[:2] / f"{key}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(key.encode())
        image.with_suffix(".txt").write_text(text)
    return path


def write_jsonl(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in ROWS.items()))
    return path


def write_lines(folder: Path) -> Path:
    path = folder / "texts.txt"
    path.write_text("\n".join(ROWS.values()))
    return path


def table() -> pa.Table:
    return pa.table({"id": list(ROWS), "image": [key.encode() for key in ROWS], "text": list(ROWS.values())})


def write_parquet(folder: Path) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(table(), path, row_group_size=11)
    return path


def write_arrow(folder: Path) -> Path:
    path = folder / "rows.arrow"
    with ipc.new_stream(path, table().schema) as stream:
        stream.write_table(table(), max_chunksize=11)
    return path


def write_hdf5(folder: Path) -> Path:
    path = folder / "rows.h5"
    keys = list(ROWS)
    with h5py.File(path, "w") as file:
        for batch in range(12):
            some = keys[batch * 4 : batch * 4 + 4]
            group = file.create_group(f"batches/{batch}")
            group.create_dataset("id", data=some, dtype=h5py.string_dtype())
            group.create_dataset("text", data=[ROWS[key] for key in some], dtype=h5py.string_dtype())
    return path


def write_csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows(ROWS.items())
    return path


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x\n")


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


CASES = [
    Case(kind="tar", write=write_tar, change=touch, listing=[(k, k.encode(), t) for k, t in ROWS.items()]),
    Case(
        kind="files",
        write=write_files,
        change=lambda path: append(path / "00" / "003.jpg"),
        listing=[(f"{k[:2]}/{k}.jpg", k.encode(), t) for k, t in ROWS.items()],
    ),
    Case(kind="parquet", write=write_parquet, change=touch, listing=[(k, k.encode(), t) for k, t in ROWS.items()]),
    Case(kind="arrow", write=write_arrow, change=append, listing=[(k, k.encode(), t) for k, t in ROWS.items()]),
    Case(kind="hdf5", write=write_hdf5, change=touch, listing=[(k, None, t) for k, t in ROWS.items()]),
    Case(kind="csv", write=write_csv, change=append, listing=[(k, None, t) for k, t in ROWS.items()]),
    Case(kind="jsonl", write=write_jsonl, change=append, listing=[(k, None, t) for k, t in ROWS.items()]),
    Case(
        kind="lines",
        write=write_lines,
        change=touch,
        listing=[(f"texts.txt:{line}", None, t) for line, t in enumerate(ROWS.values(), 1)],
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: case.kind)
def case(request: pytest.FixtureRequest) -> Case:
    case = request.param
    assert isinstance(case, Case)
    return case


def split(case: Case, path: Path) -> list[Unit]:
    return list(SOURCES[case.kind].split(str(path), OPTIONS))


def test_every_kind_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(SOURCES)
    assert all(source.kind == kind for kind, source in SOURCES.items())


def test_splitting_twice_gives_the_same_units(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    assert split(case, path) == split(case, path)


def test_unit_ids_are_unique_and_survive_json(case: Case, tmp_path: Path) -> None:
    units = split(case, case.write(tmp_path))
    assert len({unit.unit_id for unit in units}) == len(units)
    for unit in units:
        again = Unit.from_description(json.loads(json.dumps(unit.describe())))
        assert again == unit
        assert again.unit_id == unit.unit_id


def test_the_units_together_give_exactly_the_listing(case: Case, tmp_path: Path) -> None:
    units = split(case, case.write(tmp_path))
    samples = [sample for unit in units for sample in SOURCES[case.kind].read(unit)]
    assert [(s.key, s.image, s.text) for s in samples] == case.listing
    assert all(sample.error is None for sample in samples)


def test_ordinals_and_counts_are_as_planned(case: Case, tmp_path: Path) -> None:
    first = 0
    for unit in split(case, case.write(tmp_path)):
        ordinals = [sample.ordinal for sample in SOURCES[case.kind].read(unit)]
        assert ordinals == list(range(len(ordinals)))
        assert unit.samples in (None, len(ordinals))
        assert unit.first == first
        if unit.samples is not None:
            assert unit.samples <= OPTIONS.unit_samples
            first += unit.samples


def test_a_unit_can_be_read_again(case: Case, tmp_path: Path) -> None:
    unit = split(case, case.write(tmp_path))[0]
    assert list(SOURCES[case.kind].read(unit)) == list(SOURCES[case.kind].read(unit))


def test_a_source_that_changed_after_planning_is_never_read_as_if_it_had_not(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    unit = split(case, path)[0]
    case.change(path)
    try:
        codes = {sample.error[0] for sample in SOURCES[case.kind].read(unit) if sample.error}
    except SourceError as error:
        codes = {error.code}
    assert codes <= {"source_changed", "shard_changed"}
    assert codes


def test_a_source_that_vanished_is_named(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    unit = split(case, path)[0]
    path.rename(tmp_path / "moved")
    with pytest.raises(SourceError, match=str(path)) as caught:
        list(SOURCES[case.kind].read(unit))
    assert caught.value.code == "source_missing"
    assert not caught.value.transient
    with pytest.raises(InputError) as planned:
        split(case, path)
    assert planned.value.code == "source_missing"


def test_a_path_of_another_type_is_refused_without_waiting(case: Case, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError):
        split(case, pipe)
    with pytest.raises(SourceError):
        list(SOURCES[case.kind].read(Unit(kind=case.kind, source=str(pipe) + "/x", samples=0)))


def test_storage_that_fails_is_worth_another_try(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = split(case, case.write(tmp_path))[0]

    def stale(*_: object, **__: object) -> object:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("sources.storage.WatchedFile.__init__", stale)
    with pytest.raises(SourceError) as caught:
        list(SOURCES[case.kind].read(unit))
    assert (caught.value.code, caught.value.transient) == ("source_unreadable", True)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_storage_that_fails_while_it_is_read_is_worth_another_try(
    case: Case, good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = split(case, case.write(tmp_path))[-1]
    readinto = WatchedFile.readinto
    reads = 0

    def stale(file: WatchedFile, buffer: object) -> int:
        nonlocal reads
        reads += 1
        if reads > good:
            raise OSError(116, "Stale file handle")
        return readinto(file, buffer)

    monkeypatch.setattr(WatchedFile, "readinto", stale)
    try:
        samples = list(SOURCES[case.kind].read(unit))
    except SourceError as error:
        assert (error.code, error.transient) == ("source_unreadable", True)  # noqa: PT017
    else:  # it needed no more than that
        assert reads <= good
        assert samples


def test_who_watches_is_told_of_what_comes_in(case: Case, tmp_path: Path) -> None:
    (unit, *_) = split(case, case.write(tmp_path))
    told = 0

    def moved() -> None:
        nonlocal told
        told += 1

    list(read(unit, (), moved=moved))
    assert told > 0
