"""Small files that need large memory, for every reader and decoder.

Each is planned and read as a worker does it, in a process under RLIMIT_AS of `LIMIT`: half of it is what the reader may
hold by the formula of docs/reference/inputs.md (Memory of readers). Each must end as a failure with a code; the process
lives on, and reads a sound file of the same kind after it.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import resource
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import ipc

from embq.core.errors import SourceError
from embq.sources.kinds import SOURCES, kind_of
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.support.archives import tar_of, zstd

MB = 1 << 20
LIMIT = 640 * MB
DECODED = LIMIT // 2
UNIT = LIMIT // 16
BEYOND = DECODED + 100 * MB
"""Content of most bombs in bytes, so that one that is read whole does not fit."""

READER = """
import json, sys
from collections import Counter
from embq.core.errors import SampleError, SourceError
from embq.sources.reader_options import ReadOptions
from embq.sources.kinds import SOURCES, kind_of
from embq.sources.unit_reader import read

def codes_of(path, options):
    found = Counter()
    for unit in SOURCES[kind_of(path)].split(path, ReadOptions(**options)):
        try:
            found += Counter("row" if one.error is None else one.error[0] for one in read(unit, ()))
        except SourceError as error:
            found["unit " + error.code] += 1
    return dict(found)

def code_of_picture(path):
    from embq.worker.embedders.image.decoding import open_image
    try:
        open_image(open(path, "rb").read()).load()
    except SampleError as error:
        return {error.code: 1}
    return {"row": 1}

for line in sys.stdin:
    path, options = json.loads(line)
    found = code_of_picture(path) if kind_of(path) is None else codes_of(path, options)
    print(json.dumps(found), flush=True)
"""


class Reader:
    """The process that reads, under a limit of address space."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def codes_of(self, path: Path, **options: Any) -> dict[str, int]:
        """Number of times that each code came, "row" for none and "unit CODE" for a unit; {} if the process died."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", READER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_AS, (LIMIT, LIMIT)),
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(path), options]) + "\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._process.stdout.readline() or "{}")
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


# --- compressed ---

Pack = Callable[[bytes], bytes]
PACKERS: dict[str, Pack] = {"gz": gzip.compress, "zst": zstd.compress, "bz2": bz2.compress, "xz": lzma.compress}


def packed(form: str, *pieces: tuple[bytes, int]) -> bytes:
    """(content, how often) one behind the other, as members of a compressed file."""
    return b"".join(PACKERS[form](content) * times for content, times in pieces)


def header(name: str, size: int, flag: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, flag
    return info.tobuf(tarfile.GNU_FORMAT)


def large_shard(form: str, path: Path) -> None:
    content = header("a.jpg", BEYOND, b"0")
    path.write_bytes(packed(form, (content, 1), (bytes(4 * MB), BEYOND // (4 * MB) + 1)))


def sparse_shard(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(header("a.jpg", 1 << 36, b"0"))
        file.truncate(1 << 37)


def shard_of_members(path: Path) -> None:
    some = b"".join(header(f"{n}.jpg", 0, b"0") for n in range(5_000))
    path.write_bytes(packed("zst", (some, 60), (bytes(1024), 1)))


def pax(records: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> bytes:
    """Records "length keyword=value newline"."""
    lines = []
    for keyword, value in records:
        rest = len(f" {keyword}={value}\n")
        length = rest + len(str(rest + len(str(rest))))
        lines.append(f"{length} {keyword}={value}\n".encode())
    return b"".join(lines)


def shard_of_records(path: Path) -> None:
    """Records that hold for all members, which were copied for each."""
    content = pax([(f"embq.{n}", "x" * 10) for n in range(30_000)])
    block = header("g", len(content), b"g") + content + bytes(-len(content) % 512)
    path.write_bytes(block + b"".join(header(f"{n}.jpg", 0, b"0") for n in range(2_000)) + bytes(1024))


def shard_of_lies(path: Path) -> None:
    """A PAX size of 9 EB."""
    content = pax([("size", "9" * 19)])
    block = header("x", len(content), b"x") + content + bytes(-len(content) % 512)
    path.write_bytes(block + header("a.jpg", 0, b"0") + bytes(1024))


def shard_with_sparse_map(path: Path) -> None:
    """An old GNU sparse file whose map goes on to the end of the archive."""
    block = bytearray(header("a.jpg", 10, b"S"))
    block[482] = 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    more = bytes(504) + b"\1" + bytes(7)
    path.write_bytes(packed("zst", (bytes(block), 1), (more * 20_000, 20)))


VALUES = b"[" + b"[]," * (8 * MB) + b"0]"


def shard_with_json(path: Path) -> None:
    content = b'{"x":' + VALUES + b"}"
    path.write_bytes(packed("zst", (tar_of([("a.jpg", b"a"), ("a.json", content), ("b.jpg", b"b")], pad=True), 1)))


# --- texts ---


def endless_line(form: str, path: Path) -> None:
    line = b'{"text": "sound"}\n' if ".jsonl" in path.name else b"sound\n"
    path.write_bytes(packed(form, (line, 1), (b"a" * (4 * MB), 20), (b"\n" + line, 1)))


def many_values(path: Path) -> None:
    path.write_bytes(b'{"text": "a"}\n{"text": "b", "x": ' + VALUES + b"}\n" + b'{"text": "c"}\n')


def deep(path: Path) -> None:
    path.write_bytes(b'{"text": "a"}\n{"text": "b", "x": ' + b"[" * (20 * MB) + b"\n" + b'{"text": "c"}\n')


def long_texts(path: Path) -> None:
    path.write_bytes(packed("zst", (b'{"text": "' + b"a" * MB + b'"}\n', UNIT // MB + 10)))


def wide_window(path: Path) -> None:
    wide = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 30})
    path.write_bytes(wide.compress(b'{"text": "a"}\n' * 100) + wide.flush())


def wide_dictionary(path: Path) -> None:
    """A header that asks for a dictionary of 3 GiB."""
    data = bytearray(lzma.compress(b'{"text": "a"}\n', filters=[{"id": lzma.FILTER_LZMA2, "dict_size": MB}]))
    start, size = 12, (data[12] + 1) * 4 - 4
    data[start + 4] = 39
    data[start + size : start + size + 4] = struct.pack("<I", zlib.crc32(data[start : start + size]))
    path.write_bytes(data)


# --- csv ---


def csv_with(*rows: tuple[bytes, int]) -> Callable[[Path], None]:
    """A .csv of one sound row and (piece, how often) behind it."""

    def write(path: Path) -> None:
        path.write_bytes(packed("zst", (b"id,text\n1,sound\n", 1), *rows))

    return write


def wide_header(path: Path) -> None:
    path.write_bytes(packed("zst", (b",".join(b"%d" % n for n in range(1_000_000)) + b"\n1\n", 1)))


# --- tables ---


def parquet(table: Callable[[], pa.Table], **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        pq.write_table(table(), path, **{"compression": "zstd", **options})

    return write


def arrow(table: Callable[[], pa.Table], compression: str | None = "zstd") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        made = table()
        with ipc.new_file(path, made.schema, options=ipc.IpcWriteOptions(compression=compression)) as file:
            file.write_table(made)

    return write


def encoded(size: int, rows: int) -> pa.Array:
    """One value, many times: a dictionary of one."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["a" * size]))


def one_text(size: int) -> pa.Table:
    return pa.table({"text": pa.array(["a" * size], pa.large_string())})


def lists() -> pa.Table:
    values = pa.array(np.zeros(60_000_000, np.int8))
    return pa.table({"text": ["a"], "more": pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)})


def runs() -> pa.Table:
    """Run-end encoded: one value of 4.5 MB for 1,000 rows."""
    column = pa.RunEndEncodedArray.from_arrays(pa.array([1000], pa.int32()), pa.array(["a" * 4_500_000]))
    return pa.table({"text": ["a"] * 1000, "more": column})


def repeated_prefix() -> pa.Table:
    return pa.table({"text": ["a" * 2_000_000] * 400})


# --- pictures ---


def patched(form: str, change: Callable[[bytearray], None], **options: Any) -> Callable[[Path], None]:
    """A picture of 10 x 10 pixels whose header says more."""

    def write(path: Path) -> None:
        data = io.BytesIO()
        Image.new("P" if form == "gif" else "RGB", (10, 10)).save(data, form, **options)
        raw = bytearray(data.getvalue())
        change(raw)
        path.write_bytes(raw)

    return write


def png(raw: bytearray) -> None:
    raw[16:24] = struct.pack(">II", 32_000, 32_000)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))


def gif(raw: bytearray) -> None:
    raw[6:10] = struct.pack("<HH", 32_000, 32_000)


def webp(raw: bytearray) -> None:
    """14 bits each for width and height, less one."""
    raw[21:25] = struct.pack("<I", int.from_bytes(raw[21:25], "little") & 0xF0000000 | 0x0FFFFFFF)


def bmp(raw: bytearray) -> None:
    raw[18:26] = struct.pack("<ii", 32_000, 32_000)


def tiff(path: Path) -> None:
    Image.new("L", (8_000, 8_000)).save(path, "tiff", compression="tiff_deflate")


def tiff_tile(path: Path) -> None:
    """A picture of 10 x 10 in a tile of 65,536 x 65,536."""
    entries = [(256, 3, 10), (257, 3, 10), (258, 3, 8), (259, 3, 1), (262, 3, 1)]
    entries += [(322, 4, 65_536), (323, 4, 65_536), (324, 4, 200), (325, 4, 100)]
    data = b"II*\0" + struct.pack("<IH", 8, len(entries))
    data += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    path.write_bytes(data.ljust(400, b"\0"))


def avif(path: Path) -> None:
    Image.new("RGB", (6_000, 6_000)).save(path, "avif", quality=1, speed=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bomb:
    """A file.

    Attributes:
        name: of the file; its suffix tells the kind.
        write: writes it.
        codes: what comes of it, as `Reader.codes_of` says it.
        options: with which it is planned.
        case: what is odd about it.
    """

    name: str
    write: Callable[[Path], None]
    codes: dict[str, int]
    options: dict[str, Any]
    case: str


def bomb(case: str, name: str, write: Callable[[Path], None], **codes: int) -> Bomb:
    return Bomb(name=name, write=write, codes=codes, options={}, case=case)


def whole(case: str, name: str, write: Callable[[Path], None], code: str = "too_large", **options: Any) -> Bomb:
    """One unit, which fails."""
    return Bomb(name=name, write=write, codes={f"unit {code}": 1}, options=options, case=case)


ALL = {"metadata_columns": ["*"]}
BOMBS = [
    *(whole("content", f"a.tar.{form}", partial(large_shard, form)) for form in PACKERS),
    whole("sparse file of 128 GiB", "a.tar", sparse_shard),
    whole("300,000 empty members", "members.tar.zst", shard_of_members),
    whole("30,000 records for all members", "records.tar", shard_of_records, "shard_bad_header"),
    whole("size of 9 EB", "size.tar", shard_of_lies, "shard_truncated"),
    whole("endless sparse map", "map.tar.zst", shard_with_sparse_map, "shard_truncated"),
    bomb("json of 8 million lists", "json.tar.zst", shard_with_json, row=2),
    *(bomb("endless line", f"a.jsonl.{form}", partial(endless_line, form), row=2, too_large=1) for form in PACKERS),
    bomb("endless line", "a.txt.zst", partial(endless_line, "zst"), row=2, too_large=1),
    bomb("json of 8 million lists", "values.jsonl", many_values, row=2, too_large=1),
    bomb("20 million brackets", "deep.jsonl", deep, row=2, too_large=1),
    whole("long texts in one unit", "texts.jsonl.zst", long_texts),
    whole("window of 1 GiB", "window.jsonl.zst", wide_window),
    whole("dictionary of 3 GiB", "dictionary.jsonl.xz", wide_dictionary),
    bomb("endless field", "field.csv.zst", csv_with((b'2,"', 1), (b"a" * (20 * MB), 30)), row=1, bad_csv=1),
    bomb("millions of fields", "fields.csv.zst", csv_with((b"ab," * (10 * MB), 2), (b"\n3,c\n", 1)), row=2, bad_csv=1),
    whole("a million names", "header.csv.zst", wide_header, "table_damaged"),
    whole(
        "dictionary of 4.5 MB, 1,000 rows", "d.parquet", parquet(lambda: pa.table({"text": encoded(4_500_000, 1000)}))
    ),
    whole(
        "large page", "page.parquet", parquet(lambda: one_text(BEYOND), use_dictionary=False, write_statistics=False)
    ),
    whole("repeated list", "list.parquet", parquet(lists), **ALL),
    whole(
        "repeated prefix",
        "prefix.parquet",
        parquet(repeated_prefix, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}),
    ),
    whole("large body", "body.arrow", arrow(lambda: one_text(BEYOND))),
    whole("large body, lz4", "lz4.arrow", arrow(lambda: one_text(BEYOND), "lz4")),
    whole("dictionary of 4.5 MB, 1,000 rows", "d.arrow", arrow(lambda: pa.table({"text": encoded(4_500_000, 1000)}))),
    whole("runs of 4.5 MB", "runs.arrow", arrow(runs), **ALL),
    bomb("pixels", "a.png", patched("png", png), too_large=1),
    bomb("pixels", "a.gif", patched("gif", gif), too_large=1),
    bomb("pixels", "a.webp", patched("webp", webp, lossless=True), too_large=1),
    bomb("pixels", "a.bmp", patched("bmp", bmp), too_large=1),
    bomb("pixels", "a.tiff", tiff, too_large=1),
    bomb("tile", "tile.tiff", tiff_tile, too_large=1),
    bomb("pixels", "a.avif", avif, too_large=1),
]


def sound(path: Path) -> None:
    """A file of two samples, of the kind that the name says."""
    content = {"text": ["a", "b"]}
    if path.suffix == ".parquet":
        pq.write_table(pa.table(content), path)
    elif path.suffix == ".arrow":
        arrow(lambda: pa.table(content))(path)
    elif ".tar" in path.name:
        path.write_bytes(tar_of([("a.jpg", b"a"), ("b.jpg", b"b")], pad=True))
    elif ".csv" in path.name:
        path.write_text("text\na\nb\n")
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in content["text"]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Bomb], Path]:
    """The file of a bomb, which is written once: some take seconds."""
    folder = tmp_path_factory.mktemp("bombs")

    def write(bomb: Bomb) -> Path:
        path = folder / bomb.name
        if not path.exists():
            bomb.write(path)
        return path

    return write


@pytest.mark.parametrize("bomb", [pytest.param(bomb, id=f"{bomb.name}: {bomb.case}") for bomb in BOMBS])
def test_a_file_that_needs_large_memory_is_a_failure_with_a_code(
    bomb: Bomb, reader: Reader, tmp_path: Path, written: Callable[[Bomb], Path]
) -> None:
    path = written(bomb)
    assert os.stat(path).st_blocks * 512 < 65 * MB
    assert reader.codes_of(path, **bomb.options) == bomb.codes
    if bomb.case not in ("pixels", "tile"):
        path = tmp_path / f"sound{''.join(path.suffixes[:1])}"
        sound(path)
        assert reader.codes_of(path) == {"row": 2}


@pytest.mark.parametrize("name", ["d.parquet", "page.parquet", "body.arrow", "d.arrow", "a.tar.zst"])
def test_the_bound_is_that_of_the_formula_and_no_limit_of_the_system(
    name: str, written: Callable[[Bomb], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 to 7 GB."""
    path = written(next(bomb for bomb in BOMBS if bomb.name == name))
    monkeypatch.setattr("embq.core.process.limits.DECODED_MOST_BYTES", DECODED)
    monkeypatch.setattr("embq.core.process.limits.UNIT_MOST_BYTES", UNIT)
    (unit,) = SOURCES[str(kind_of(str(path)))].split(str(path), ReadOptions())
    with pytest.raises(SourceError) as caught:
        list(read(unit, ()))
    assert caught.value.code == "too_large"


def test_units_of_one_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.sources.formats.text_files.FILE_UNITS_MAX", 100)
    monkeypatch.setattr("embq.sources.formats.tables.FILE_UNITS_MAX", 100)
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(b"\n" * 1_000))
    pq.write_table(pa.table({"text": ["a"] * 1_000}), tmp_path / "a.parquet")
    for kind, name in (("lines", "a.txt.zst"), ("parquet", "a.parquet")):
        (unit,) = SOURCES[kind].split(str(tmp_path / name), ReadOptions(unit_samples=5))
        with pytest.raises(SourceError) as caught:
            list(read(unit, ()))
        assert caught.value.code == "too_large"
