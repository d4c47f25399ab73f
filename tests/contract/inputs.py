"""Inputs of every kind, written without embq, with the samples that must come out: what the contract suites run on."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather, ipc

from embq.testing.sources import ROWS, Case
from tests.support.archives import zstd
from tests.support.outputs.build import write_tar


def write_shard(folder: Path) -> Path:
    members = [[(f"{key}.jpg", key.encode()), (f"{key}.txt", text.encode())] for key, text in ROWS.items()]
    return write_tar(folder / "shard.tar", chain(*members))


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


def write_feather(folder: Path) -> Path:
    path = folder / "rows.feather"
    feather.write_feather(table(), str(path), compression="zstd", chunksize=11)
    return path


def write_csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows(ROWS.items())
    return path


def packed(write: Callable[[Path], Path], suffix: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    """`write`, and the file compressed."""

    def write_packed(folder: Path) -> Path:
        plain = write(folder)
        path = plain.with_name(plain.name + suffix)
        path.write_bytes(pack(plain.read_bytes()))
        plain.unlink()
        return path

    return write_packed


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x\n")


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


IMAGES_AND_TEXTS: list[tuple[str, bytes | None, str | None]] = [(k, k.encode(), t) for k, t in ROWS.items()]
TEXTS: list[tuple[str, bytes | None, str | None]] = [(k, None, t) for k, t in ROWS.items()]


def _zstd(data: bytes) -> bytes:
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


CASES = [
    Case(kind="tar", write=write_shard, change=touch, listing=IMAGES_AND_TEXTS),
    Case(
        kind="files",
        write=write_files,
        change=lambda path: append(path / "00" / "003.jpg"),
        listing=[(f"{k[:2]}/{k}.jpg", k.encode(), t) for k, t in ROWS.items()],
    ),
    Case(kind="parquet", write=write_parquet, change=touch, listing=IMAGES_AND_TEXTS),
    Case(kind="arrow", write=write_arrow, change=append, listing=IMAGES_AND_TEXTS),
    Case(kind="arrow", form="feather", write=write_feather, change=touch, listing=IMAGES_AND_TEXTS),
    Case(kind="csv", write=write_csv, change=append, listing=TEXTS),
    Case(kind="jsonl", write=write_jsonl, change=append, listing=TEXTS),
    Case(
        kind="lines",
        write=write_lines,
        change=touch,
        listing=[(f"texts.txt:{line}", None, t) for line, t in enumerate(ROWS.values(), 1)],
    ),
    Case(
        kind="tar",
        form="gz",
        write=packed(write_shard, ".gz", gzip.compress),
        change=touch,
        listing=IMAGES_AND_TEXTS,
    ),
    Case(kind="jsonl", form="gz", write=packed(write_jsonl, ".gz", gzip.compress), change=append, listing=TEXTS),
    Case(kind="csv", form="zst", write=packed(write_csv, ".zst", _zstd), change=append, listing=TEXTS),
    Case(
        kind="lines",
        form="xz",
        write=packed(write_lines, ".xz", lzma.compress),
        change=touch,
        listing=[(f"texts.txt.xz:{line}", None, t) for line, t in enumerate(ROWS.values(), 1)],
    ),
    Case(
        kind="lines",
        form="bz2",
        write=packed(write_lines, ".bz2", bz2.compress),
        change=touch,
        listing=[(f"texts.txt.bz2:{line}", None, t) for line, t in enumerate(ROWS.values(), 1)],
    ),
]
"""Every kind, and every form of a kind that is read in another way."""
