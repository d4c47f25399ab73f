"""Inputs with something wrong in them, and what must become of each: rows, one failure each, and the rest goes on."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.session import picture, write_tar, write_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """An input and its end.

    Attributes:
        source: what is enqueued.
        rows: key -> what is embedded.
        failures: key -> code of each sample without a row; "" is the key of an input that failed as a whole.
        units: how many it makes.
        warns: what enqueueing says on stderr.
    """

    source: Path
    rows: Mapping[str, bytes]
    failures: Mapping[str, str] = field(default_factory=dict)
    units: int
    warns: str = ""


def texts(path: Path, **columns: object) -> Path:
    """A parquet file."""
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def column_missing_in_the_700th_file(folder: Path) -> Odd:
    root = folder / "tables"
    for n in range(1, 701):
        texts(
            root / f"{n:03d}.parquet", id=[f"k{n}"], **{"other" if n == 700 else "text": [n if n == 700 else f"t{n}"]}
        )
    rows = {f"k{n}": f"t{n}".encode() for n in range(1, 700)}
    return Odd(
        source=root, rows=rows, failures={"": "missing_column"}, units=700, warns="700.parquet: no column of texts"
    )


def unequal_schemas(folder: Path) -> Odd:
    root = folder / "tables"
    texts(root / "a.parquet", id=["a"], text=["first"], n=[1])
    texts(root / "b.parquet", id=[2], text=pa.array(["second"], pa.large_string()), n=["not a number"])
    texts(root / "c.parquet", text=pa.array(["third"]).dictionary_encode())
    return Odd(source=root, rows={"a": b"first", "2": b"second", "c.parquet:1": b"third"}, units=3)


def paths_in_a_column_that_leave_the_folder(folder: Path) -> Odd:
    (folder / "secret.jpg").write_bytes(picture("secret"))
    names = ["in.jpg", "../secret.jpg", "/etc/passwd", "link.jpg", "file:///etc/passwd"]
    path = texts(folder / "table" / "t.parquet", id=list("abcde"), image_path=names)
    (path.parent / "in.jpg").write_bytes(picture("in"))
    (path.parent / "link.jpg").symlink_to(folder / "secret.jpg")
    return Odd(source=path, rows={"a": picture("in")}, failures=dict.fromkeys("bcde", "outside_root"), units=1)


def a_link_that_leaves_the_folder(folder: Path) -> Odd:
    root = folder / "photos"
    root.mkdir()
    (folder / "secret.jpg").write_bytes(picture("secret"))
    (root / "good.jpg").write_bytes(picture("good"))
    (root / "link.jpg").symlink_to("../secret.jpg")
    (root / "folder").symlink_to(folder, target_is_directory=True)
    return Odd(source=root, rows={"good.jpg": picture("good")}, failures={"link.jpg": "outside_root"}, units=1)


def names_in_a_shard_that_leave_it(folder: Path) -> Odd:
    """They are keys and nothing else: nothing is ever written or opened under them."""
    names = ["../../up", "/etc/passwd", "a/../b", "good"]
    write_tar(folder / "s.tar", {f"{name}.jpg": picture(name) for name in names}.items())
    return Odd(source=folder / "s.tar", rows={name: picture(name) for name in names}, units=1)


def names_with_newlines(folder: Path) -> Odd:
    names = ["a\nb", "c\r\n", "\td", "good"]
    write_tar(folder / "s.tar", {f"{name}.jpg": picture(name) for name in names}.items())
    return Odd(source=folder / "s.tar", rows={name: picture(name) for name in names}, units=1)


def files_with_newlines(folder: Path) -> Odd:
    root = folder / "two\nlines"
    root.mkdir()
    for name in ("a\nb.jpg", "good.jpg"):
        (root / name).write_bytes(picture(name))
    return Odd(source=root, rows={name: picture(name) for name in ("a\nb.jpg", "good.jpg")}, units=1)


def keys_of_4_kb(folder: Path) -> Odd:
    long = "k" * 4092
    write_tar(folder / "s.tar", {f"{long}.jpg": picture("long"), "good.jpg": picture("good")}.items())
    return Odd(source=folder / "s.tar", rows={long: picture("long"), "good": picture("good")}, units=1)


def ids_of_4_kb(folder: Path) -> Odd:
    path, long = folder / "t.jsonl", "k" * 4096
    path.write_text("".join(json.dumps({"id": key, "text": f"of {key[:9]}"}) + "\n" for key in (long, "good")))
    return Odd(source=path, rows={long: b"of kkkkkkkkk", "good": b"of good"}, units=1)


def a_name_longer_than_any_path(folder: Path) -> Odd:
    root = folder / "shards"
    root.mkdir()
    write_tar(root / "long.tar", {f"{'k' * 5000}.jpg": picture("long"), "x.jpg": picture("x")}.items())
    write_tar(root / "good.tar", {"good.jpg": picture("good")}.items())
    return Odd(source=root, rows={"good": picture("good")}, failures={"": "shard_bad_header"}, units=2)


def names_that_are_not_utf8(folder: Path) -> Odd:
    root = folder / os.fsdecode(b"caf\xe9s")
    root.mkdir()
    for name in (b"caf\xe9.jpg", b"good.jpg"):
        (root / os.fsdecode(name)).write_bytes(picture(repr(name)))
    rows = {"caf\\udce9.jpg": picture(repr(b"caf\xe9.jpg")), "good.jpg": picture(repr(b"good.jpg"))}
    return Odd(source=root, rows=rows, units=1)


def members_that_are_not_utf8(folder: Path) -> Odd:
    members = [(os.fsdecode(b"caf\xe9.jpg"), picture("cafe")), ("good.jpg", picture("good"))]
    write_tar(folder / "s.tar", members, tarfile.USTAR_FORMAT)
    return Odd(source=folder / "s.tar", rows={"caf\\udce9": picture("cafe"), "good": picture("good")}, units=1)


def files_of_zero_bytes(folder: Path) -> Odd:
    root = folder / "texts"
    root.mkdir()
    rows = write_texts(root / "good.jsonl", 3)
    for name in ("nothing.jsonl", "nothing.jsonl.gz"):
        (root / name).touch()
    return Odd(source=root, rows=rows, units=1, warns="are empty, left out")


def shards_of_zero_bytes(folder: Path) -> Odd:
    root = folder / "shards"
    root.mkdir()
    write_tar(root / "good.tar", {"good.jpg": picture("good")}.items())
    (root / "nothing.tar").touch()
    return Odd(source=root, rows={"good": picture("good")}, failures={"": "shard_no_end_marker"}, units=2)


def a_cut_table(folder: Path) -> Odd:
    root = folder / "tables"
    good, cut = (texts(root / f"{name}.parquet", id=[name], text=[f"of {name}"]) for name in ("good", "cut"))
    cut.write_bytes(cut.read_bytes()[:-9])
    assert good.exists()
    failures = {"": "table_damaged"}
    return Odd(source=root, rows={"good": b"of good"}, failures=failures, units=2, warns="cut.parquet")


def a_cut_compressed_text(folder: Path) -> Odd:
    root = folder / "texts"
    root.mkdir()
    rows = write_texts(root / "good.jsonl", 3)
    write_texts(folder / "cut", 500)
    (root / "cut.jsonl.gz").write_bytes(gzip.compress((folder / "cut").read_bytes())[:-9])
    return Odd(source=root, rows=rows, failures={"": "source_truncated"}, units=2, warns="cut.jsonl.gz")


ODD: tuple[Callable[[Path], Odd], ...] = (
    column_missing_in_the_700th_file,
    unequal_schemas,
    paths_in_a_column_that_leave_the_folder,
    a_link_that_leaves_the_folder,
    names_in_a_shard_that_leave_it,
    names_with_newlines,
    files_with_newlines,
    keys_of_4_kb,
    ids_of_4_kb,
    a_name_longer_than_any_path,
    names_that_are_not_utf8,
    members_that_are_not_utf8,
    files_of_zero_bytes,
    shards_of_zero_bytes,
    a_cut_table,
    a_cut_compressed_text,
)
