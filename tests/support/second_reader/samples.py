"""A second, independent reader of inputs: standard library and pyarrow only, none of the readers in `sources`.

It shares with `sources` only what the documentation promises about keys, so that a mistake in the readers of `sources`
shows up as a difference. Remote inputs are copied first; only their version is read by embq's own code.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import IO, Any, cast

import pyarrow.parquet as pq

from embq.core.errors import InputError
from embq.core.storage.paths import is_url
from embq.core.units import Unit
from embq.sources.access.listings import stat
from tests.support.second_reader.files import COPIES, KEPT, compression_of, opened
from tests.support.second_reader.files import ERRORS as COMPRESSION_ERRORS
from tests.support.second_reader.tables import Row, csv_rows, file_name, table_rows

IMAGES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
"""Extensions of images; where a key has several, the first in this order is embedded."""

LINE_MAX_BYTES = 32_000_000
"""A longer line is a failure with its line number as the key."""

TEXT_COLUMNS = ("text", "caption", "content", "document", "passage", "body")
ID_COLUMNS = ("id", "key", "_id", "doc_id")

# webdataset's own expression for "key.extension": the first dot behind the last slash.
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)

_ABOUT_SHARD = re.compile(
    r"__[^./]*__([./].*)?|(.*/)?([.]_.*|(@eaDir|#recycle|__MACOSX|lost[+]found|System Volume Information"
    r"|[$]RECYCLE[.]BIN|[$]Recycle[.]Bin|[Tt]humbs[.]db|[Dd]esktop[.]ini|[.]DS_Store)(/.*)?)",
    re.DOTALL,
)
"""Members that are no part of a sample: webdataset's own, and those of macOS, Windows and file servers."""


ERRORS: tuple[type[Exception], ...] = (*COMPRESSION_ERRORS, tarfile.TarError, LookupError)
"""Raised for a source that cannot be read as its kind."""


class SourceChangedError(Exception):
    """The source changed since planning, so the unit cannot be checked against it."""


class SourceUnreadableError(Exception):
    """The source is unchanged, and the second reader cannot read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """One sample of the source.

    Attributes:
        key: its key.
        image: encoded bytes; None where there is none, or where images were not asked for.
        text: caption or text; None where there is none that is UTF-8.
        metadata: further fields; None where there are none, or they are not an object.
        changed: why this one sample cannot be checked, or "".
    """

    key: str
    image: bytes | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = None
    changed: str = ""


def reread(unit: Unit, *, images: bool) -> Iterator[SourceSample]:
    """The samples of a unit in order of their ordinals; `images` says whether to read the bytes of images.

    Raises SourceChangedError where the source is missing or of another version, SourceUnreadableError where it cannot
    be read as its kind.
    """
    if unit.kind not in READERS:
        raise SourceUnreadableError(f"units of kind {unit.kind!r} cannot be read a second time")
    if unit.kind != "files":
        _check_version(unit)
    partition = json.loads(dict(unit.options).get("partition", "{}"))
    try:
        for sample in READERS[unit.kind](COPIES.of(unit) if is_url(unit.source) else unit, images):
            yield replace(sample, metadata={**partition, **(sample.metadata or {})}) if partition else sample
    except ERRORS as error:
        raise SourceUnreadableError(f"{unit.source}: {error}") from error


def _check_version(unit: Unit) -> None:
    try:
        if is_url(unit.source):
            version = stat(unit.source).version
        else:
            status = os.stat(unit.source)
            version = f"{status.st_mtime_ns}-{status.st_size}"
    except InputError as error:
        raise SourceChangedError(f"cannot be checked: {error.message}") from error
    except OSError as error:
        raise SourceChangedError(f"cannot be checked: {unit.source}: {error.strerror}") from error
    if version != unit.etag:
        raise SourceChangedError(
            f"cannot be checked: changed: {unit.source} was {unit.etag} when planned and is {version} "
            f"({'ETag' if is_url(unit.source) else 'modification time in ns'}, size in bytes)"
        )


def _stored(text: str) -> str:
    """`text` as an output can hold it: half surrogate pairs as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _decoded(data: bytes | None) -> str | None:
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _of_file(data: bytes | None) -> str | None:
    """The text of a whole file, which may begin with a byte order mark."""
    return _decoded(None if data is None else data.removeprefix(b"\xef\xbb\xbf"))


class _Member(tarfile.TarInfo):
    """A tar member by POSIX rules: only ustar headers have a prefix, an empty PAX record removes the name."""

    stored = ""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """The member of a header block."""
        member = super().frombuf(buf, encoding, errors)
        if buf[257:263] != b"ustar\0":  # GNU tar keeps times there
            name = bytes(buf[:100]).partition(b"\0")[0].decode(encoding, errors)
            member.name = name.rstrip("/") if member.isdir() else name
        member.stored = member.name
        return member

    def _apply_pax_info(self, pax_headers: Mapping[str, str], encoding: str, errors: str) -> None:
        given = {keyword: value for keyword, value in pax_headers.items() if value}
        if pax_headers.get("path") == "":
            self.name = self.stored  # a global record may have named it
        super()._apply_pax_info(given, encoding, errors)  # type: ignore[misc]


def _tar(unit: Unit, images: bool) -> Iterator[SourceSample]:
    """Members by key. A repeated image is a sample of its own, and so is a repeated text of a key without image."""
    named = dict(unit.options)
    images_of = tuple(named.get("image_keys", ";".join(IMAGES)).split(";"))
    captions = tuple(named.get("caption_keys", "txt").split(";"))
    keeps = named.get("damaged") == "keep"
    with (
        _archive(unit.source, to_cut=keeps) as file,
        tarfile.open(fileobj=file, mode="r:", tarinfo=_Member, encoding="utf-8", errors="surrogateescape") as tar,
    ):
        parts: dict[str, dict[str, tarfile.TarInfo]] = {}
        order: list[tuple[str, str]] = []
        for member in _members(tar, to_damage=keeps):
            # tarfile takes a slash off the end of names from PAX headers, of plain files too.
            headers = member.pax_headers
            name = headers.get("GNU.sparse.name") or headers.get("path") or member.name
            match = None if member.isdir() or _ABOUT_SHARD.fullmatch(name) else _MEMBER.fullmatch(name)
            if match is None:
                continue
            key, extension = match[1], match[2].lower()
            of_key = parts.setdefault(key, {})
            if not of_key:
                order.append((key, ""))
            if extension not in of_key:
                of_key[extension] = member
            elif extension in captions or extension in images_of:
                order.append((key, extension))
        for key, again in order:
            of_key = parts[key]
            image = next((of_key[extension] for extension in images_of if extension in of_key), None)
            caption = next((of_key[extension] for extension in captions if extension in of_key), None)
            if again in captions and image is not None:
                continue
            yield SourceSample(
                key=_stored(key),
                image=_content(tar, image) if images and not again else None,
                text=None if again else _of_file(_content(tar, caption)),
                metadata=_object(None if again else _of_file(_content(tar, of_key.get("json")))),
            )


def _members(tar: tarfile.TarFile, *, to_damage: bool) -> Iterator[tarfile.TarInfo]:
    """The members; `to_damage`: those before the damage, where there is any."""
    try:
        yield from tar
    except tarfile.TarError:
        if not to_damage:
            raise


@contextmanager
def _archive(path: str, *, to_cut: bool) -> Iterator[IO[bytes]]:
    """A shard, decompressed into a temporary file, since members are not read in order.

    Args:
        to_cut: of a compressed file that is cut, take what comes out before the cut.
    """
    compression = compression_of(path)
    with opened(path, compression) as file:
        if not compression:
            yield file
            return
        with tempfile.TemporaryFile(prefix="embq-verify-") as whole:
            try:
                while piece := cast(io.BufferedIOBase, file).read1(1 << 20):  # read() drops what comes before a cut
                    whole.write(piece)
            except EOFError:
                if not to_cut:
                    raise
            whole.seek(0)
            yield whole


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo | None) -> bytes | None:
    if member is None or not member.isreg():
        return None
    file = tar.extractfile(member)
    return None if file is None else file.read()


def _files(unit: Unit, images: bool) -> Iterator[SourceSample]:
    """The planned files, each checked for its planned size."""
    named = dict(unit.options)
    captions = named.get("caption_keys", "txt").split(";")
    endings = sorted(named.get("image_keys", "").split(";"), key=len, reverse=True) if "image_keys" in named else []
    for relative, size in unit.items:
        path = os.path.join(unit.source, relative)
        key = _stored(relative)
        try:
            now = os.stat(path).st_size
        except OSError as error:
            yield SourceSample(key=key, changed=f"cannot be checked: {path}: {error.strerror}")
            continue
        if now != size:
            yield SourceSample(
                key=key, changed=f"cannot be checked: changed: {path} had {size} bytes when planned, now {now}"
            )
            continue
        ending = next((f".{one}" for one in endings if path.lower().endswith(f".{one}")), os.path.splitext(path)[1])
        stem = path.removesuffix(path[len(path) - len(ending) :])
        text = _beside(stem, *captions)
        caption, fields = _listed(unit.source, relative)
        metadata = _object(_of_file(_beside(stem, "json")))
        metadata = {**fields, **(metadata or {})} if fields else metadata
        caption = caption if text is None else _of_file(text)
        yield SourceSample(key=key, image=_whole(path) if images else None, text=caption, metadata=metadata)


def _beside(stem: str, *extensions: str) -> bytes | None:
    names = (f"{stem}.{form}" for one in extensions for form in (one, one.upper(), one.capitalize()))
    return next((data for name in names if (data := _whole(name)) is not None), None)


def _listed(root: str, relative: str) -> tuple[str | None, dict[str, Any]]:
    """Caption and other fields of an image in the metadata.csv or metadata.jsonl nearest to it."""
    folder = relative
    while folder:
        folder = os.path.dirname(folder)
        for ending in ("csv", "jsonl", "parquet"):
            path = os.path.join(root, folder, f"metadata.{ending}")
            if os.path.isfile(path):
                rows, name = _metadata_file(path, os.stat(path).st_mtime_ns), os.path.relpath(relative, folder or ".")
                row = rows.get(name) or rows.get(_plain(name), {})
                name = next((one for one in TEXT_COLUMNS if isinstance(row.get(one), str)), "")
                return row.get(name), {key: one for key, one in row.items() if key != name}
    return None, {}


@lru_cache(maxsize=2)
def _metadata_file(path: str, _version: int) -> dict[str, dict[str, Any]]:
    rows: list[Any]
    if path.endswith(".parquet"):
        rows = pq.read_table(path).to_pylist()
    else:
        with open(path, encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            delimiter = next((one for one in ",;\t|" if "file_name" in head.strip().split(one)), ",")
            reader = csv.DictReader(file, restkey="rest", delimiter=delimiter)
            rows = list(reader if path.endswith("csv") else filter(None, map(_object, file)))
    named = {row.pop("file_name"): row for row in map(dict, rows) if "file_name" in row}
    return {**{_plain(name): row for name, row in named.items()}, **named}


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", os.path.normpath(name.replace("\\", "/")))


def _whole(path: str) -> bytes | None:
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def _rows_of(read: Callable[[Unit, bool], Iterator[Row]]) -> Callable[[Unit, bool], Iterator[SourceSample]]:
    def rows(unit: Unit, images: bool) -> Iterator[SourceSample]:
        for key, image, text, metadata in read(unit, images):
            yield SourceSample(key=_stored(key), image=image, text=_decoded(text), metadata=metadata)

    return rows


@contextmanager
def _text_of(unit: Unit) -> Iterator[IO[bytes]]:
    """The unit's file, decompressed."""
    if "compression" in dict(unit.options):
        yield KEPT.open(unit)
        return
    with open(unit.source, "rb") as file:
        yield file


def _lines(unit: Unit, _images: bool) -> Iterator[SourceSample]:
    name = file_name(unit)
    with _text_of(unit) as file:
        for number, line in enumerate(_cut(file, unit.start, unit.stop), start=unit.first + 1):
            yield SourceSample(key=_stored(f"{name}:{number}"), text=_decoded(line))


def _jsonl(unit: Unit, _images: bool) -> Iterator[SourceSample]:
    name = file_name(unit)
    named = dict(unit.options)
    with _text_of(unit) as file:
        for number, line in enumerate(_cut(file, unit.start, unit.stop), start=unit.first + 1):
            key, text, metadata = _parts_of(_object(_decoded(line)) or {}, named)
            yield SourceSample(key=_stored(key or f"{name}:{number}"), text=text, metadata=metadata)


def _object(text: str | None) -> dict[str, Any] | None:
    """The JSON object in a text, or None; NaN, infinity and numbers beyond float64 are null."""
    try:
        fields = json.loads(text or "", parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _parts_of(fields: dict[str, Any], named: dict[str, str]) -> tuple[str, str | None, dict[str, Any]]:
    """The id of a line ("" where its number stands for it), its text, and what else is kept of it."""
    id_column, text_column = named.get("id_column", ""), named.get("text_column", "")
    text_name = text_column or next((name for name in TEXT_COLUMNS if name in fields), "")
    id_name = id_column or next((name for name in ID_COLUMNS if name in fields and name != text_name), "")
    identity, text = (fields.get(name) if name else None for name in (id_name, text_name))
    usable = isinstance(identity, (str, int)) and not isinstance(identity, bool) and identity != ""
    kept = named.get("metadata_columns", "*").split(",")
    taken = {text_name, id_name} if usable else {text_name}
    rest = {name: one for name, one in fields.items() if (name not in taken if "*" in kept else name in kept)}
    return str(identity) if usable else "", text if isinstance(text, str) else None, rest


def _cut(file: IO[bytes], start: int, stop: int) -> Iterator[bytes | None]:
    """The lines between two offsets without their ends, LF or CRLF; None for one that is too long."""
    file.seek(start)
    at = start
    while at < stop:
        line = file.readline(min(LINE_MAX_BYTES + 1, stop - at))
        if not line:
            return
        at += len(line)
        too_long = len(line) > LINE_MAX_BYTES
        while not line.endswith(b"\n") and at < stop:
            line = file.readline(min(1 << 20, stop - at))
            if not line:
                return
            at += len(line)
        if at == len(line):
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark begins a file, and no other line
        yield None if too_long else line.removesuffix(b"\n").removesuffix(b"\r")


READERS: dict[str, Callable[[Unit, bool], Iterator[SourceSample]]] = {
    "tar": _tar,
    "files": _files,
    "jsonl": _jsonl,
    "lines": _lines,
    "parquet": _rows_of(table_rows),
    "arrow": _rows_of(table_rows),
    "csv": _rows_of(csv_rows),
}
"""Kind of input -> its second reader; kinds of plug-ins have none."""
