"""A disk that is full at any one moment of a change of an index: one error that says so, and nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from embq.core.errors import OutputError
from embq.index.atlas.map_file import MapOptions, make_map
from embq.index.change.compaction import compact
from embq.index.change.deletes import delete
from embq.index.dedup.dedup import dedup, make_spec
from embq.index.faiss_file import write_faiss_file
from embq.index.index_files.files import NO_ROOM_BYTES, disk_error, index_lock, write_current
from embq.index.index_files.identity import write_identity
from embq.index.index_files.version import read_current
from tests.indexer.indexes_that_grow import Quiet, add_part, copy_of, grown, litter, make_index, rows, runner
from tests.support.full_disk import refusals

NEXT_STEP = "make room, then give the same command again: what is done stays"


def _locked(index: Path) -> None:
    with index_lock(index.parent / "new"):
        pass


def _deduplicated(index: Path) -> None:
    version = read_current(index)
    dedup(index, version, make_spec(version, 0.9999, 4), runner(), Quiet())


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lock": (_locked, "open mkdir"),
    "record": (lambda index: write_current(index.parent / "record.json", b"{}"), "open write rename"),
    "delete": (lambda index: delete(index, ["p0.npy:1"]), "open write mkdir rename"),
    "grow": (grown, "open write mkdir rename link"),
    "compact": (lambda index: compact(index, runner(), Quiet()), "open write mkdir rename link"),
    "dedup": (_deduplicated, "open write mkdir rename link"),
    "export": (
        lambda index: write_faiss_file(index, index.parent / "knn.index", shards=2),
        "open write rename",
    ),
    "map": (lambda index: make_map(index, MapOptions(method="pca", sample=50)), "open rename"),
}
"""Change -> what makes it, and the kinds of calls that need room for it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of two parts, the second of which was added, with a third part that is not in it yet."""
    index = make_index(tmp_path_factory.mktemp("base"), parts=1, key="IVF4,SQ8")
    add_part(index.parent / "data", "p1", rows(20, 1))
    grown(index)
    add_part(index.parent / "data", "p2", rows(20, 2))
    return index


def named(folder: Path) -> set[tuple[str, object]]:
    """What a reader may open below a folder: the names without random parts, with the size, or the type of JSON."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    plain = {name: path for name, path in files.items() if not re.search(r"(^|/)[._]", name)}
    return {(re.sub(r"-\w{12}-\w{6}\.", ".", name), _content(path)) for name, path in plain.items()}


def _content(path: Path) -> object:
    return type(json.loads(path.read_bytes())) if path.suffix == ".json" else path.stat().st_size


@pytest.mark.parametrize(
    ("change", "kind"), [(change, kind) for change, (_, kinds) in CHANGES.items() for kind in kinds.split()]
)
def test_a_disk_that_is_full_at_one_moment_is_one_error_and_leaves_one_version_or_the_other(
    base: Path, tmp_path: Path, change: str, kind: str
) -> None:
    do = CHANGES[change][0]
    finished = copy_of(base, tmp_path / "finished")
    before = named(finished.parent)
    do(finished)
    after = named(finished.parent)
    errors = 0
    for index, error in refusals(kind, tmp_path, lambda at: copy_of(base, tmp_path / str(at)), do):
        if error is None:
            assert named(index.parent) == after, "the error was swallowed"
            continue
        errors += 1
        assert (error.code, error.next_step) == ("no_space", NEXT_STEP)
        assert error.message.startswith(f"no space left for {index.parent}/")
        assert named(index.parent) <= before | after, "half of it has a name"
        assert not list(index.parent.rglob(".*")), "what was begun takes room"
        if kind == "write":
            do(index)
            assert (named(index.parent), litter(index)) == (after, litter(finished))
        shutil.rmtree(index.parent)
    assert errors


def test_a_map_that_finds_no_room_leaves_the_one_before(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = copy_of(base, tmp_path)
    make_map(index, MapOptions(method="pca", sample=50))
    before = (index / "map.parquet").read_bytes()
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    (index / ".map.parquet.0").symlink_to("/dev/full")
    with pytest.raises(OutputError) as caught:
        make_map(index, MapOptions(method="pca", sample=60))
    assert (caught.value.code, caught.value.next_step) == ("no_space", NEXT_STEP)
    assert caught.value.message == f"no space left for {index / 'map.parquet'}"
    assert (index / "map.parquet").read_bytes() == before
    assert not (index / ".map.parquet.0").is_symlink()


def test_identities_that_find_no_room_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OutputError) as caught:
        write_identity([], tmp_path / "full")
    assert (caught.value.code, caught.value.next_step) == ("no_space", NEXT_STEP)
    assert caught.value.message == f"no space left for {tmp_path / 'full'}"


@pytest.mark.parametrize(("free", "code"), [(NO_ROOM_BYTES - 1, "no_space"), (NO_ROOM_BYTES, "output")])
def test_an_error_without_a_number_is_that_of_a_full_disk_only_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, code: str
) -> None:
    disk = SimpleNamespace(f_bavail=free, f_frsize=1, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda path: disk if os.stat(path) else None)
    for path in (tmp_path, tmp_path / "file"):
        error = disk_error(OSError("4096 requested and 0 written"), path)
        assert (error.code, str(path) in error.message) == (code, True)
