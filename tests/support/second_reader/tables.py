"""Second reader of tables: parquet and Arrow through pyarrow, csv by the standard library.

As in `samples`, the readers in `sources` are not used.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from embq.core.units import Unit
from tests.support.second_reader.files import KEPT

CSV_FIELD_MAX_BYTES = 64_000_000


def csv_rows(unit: Unit, _images: bool) -> Iterator[Row]:
    """The rows of a slice of a .csv or .tsv, counted from the beginning of the file."""
    csv.field_size_limit(CSV_FIELD_MAX_BYTES)
    file = KEPT.open(unit)
    if KEPT.rows is None or KEPT.rows[0] > unit.first:
        file.seek(0)
        lines = (line.decode("latin-1") for line in file)
        first = next(lines).removeprefix("\xef\xbb\xbf")  # the bytes of a byte order mark
        if re.fullmatch(r'"?sep=."?\s*', first, re.IGNORECASE):
            first = next(lines)
        delimiter = dict(unit.options).get("delimiter", ",")  # recorded when the run was planned
        reader = csv.reader(
            itertools.chain([first], lines),
            delimiter=delimiter,
            strict=True,
            quoting=csv.QUOTE_NONE if dict(unit.options).get("quotes") == "none" else csv.QUOTE_MINIMAL,
        )
        head = [(key_of(name.encode("latin-1"))) for name in next(reader)]
        KEPT.rows = (0, _records(reader, len(head)), head)
    position, records, head = KEPT.rows
    text, image, key = pick(dict.fromkeys(head, "text"), dict(unit.options))
    others = _other_columns(head, dict(unit.options), (text, image, key))
    folder = os.path.dirname(unit.source)
    rows = itertools.islice(records, unit.first - position, unit.first - position + (unit.samples or 0))
    for number, fields in enumerate(rows, start=unit.first + 1):
        KEPT.rows = (number, records, head)
        row = {} if fields is None else {n: f.encode("latin-1") for n, f in zip(head, fields, strict=True)}
        link = row.get(image) if image else None
        yield (
            key_of(row.get(key) if key else None) or f"{file_name(unit)}:{number}",
            linked(folder, os.fsdecode(link)) if link else None,
            row.get(text) if text else None,
            {name: _field(row[name]) for name in others if name in row},
        )


def _field(value: bytes) -> str | None:
    """A field as metadata; None for one that is not UTF-8."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _other_columns(head: list[str], named: dict[str, str], taken: tuple[str, ...]) -> list[str]:
    wanted = named.get("metadata_columns", "*").split(",")
    return [name for name in head if not name or name not in taken] if "*" in wanted else wanted


def _records(reader: Any, columns: int) -> Iterator[list[str] | None]:
    """The rows; None for one that does not fit the header."""
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield None
            continue
        if fields or columns == 1:
            fields = fields or [""]
            yield fields if len(fields) == columns else None


TEXTS = ("text", "caption", "content", "document", "passage", "body")
IDS = ("id", "key", "_id", "doc_id")
IMAGES = ("image", "img", "image_bytes", "jpg", "jpeg", "png", "webp", "bytes")
LINKS = ("image_path", "image_file", "image")

Row = tuple[str, bytes | None, bytes | None, dict[str, Any] | None]
"""Key, image, text and metadata of a row."""


# --- parquet and arrow ---


def file_name(unit: Unit) -> str:
    """The name of a unit's file in its keys."""
    return dict(unit.options).get("file_name") or os.path.basename(unit.source)


def table_rows(unit: Unit, images: bool) -> Iterator[Row]:
    """The rows of a slice of a parquet or Arrow file."""
    table = _table(unit.kind, unit.source, unit.etag)
    text, image, key = pick({field.name: _role(field.type) for field in table.schema}, dict(unit.options))
    rows = table.slice(unit.first, min(unit.samples or 0, table.num_rows))
    nothing = [None] * rows.num_rows
    texts = _as_bytes(rows[text]) if text else nothing
    pictures = _pictures(rows[image], os.path.dirname(unit.source)) if image and images else nothing
    keys = nothing
    if key:
        keys = _json_values(rows[key]) if _role(rows[key].type) == "exact" else _as_bytes(rows[key])
    others = {name: _json_values(rows[name]) for name in kept(table.schema, dict(unit.options), (text, image, key))}
    for number, row in enumerate(zip(keys, pictures, texts, strict=True), start=unit.first + 1):
        metadata = {name: values[number - unit.first - 1] for name, values in others.items()}
        yield key_of(row[0]) or f"{file_name(unit)}:{number}", row[1], row[2], metadata


def kept(schema: pa.Schema, named: dict[str, str], taken: tuple[str, ...]) -> list[str]:
    """The columns that are metadata."""
    wanted = named.get("metadata_columns", "")
    if "*" not in wanted.split(","):
        return wanted.split(",") if wanted else []
    free = (field for field in schema if not field.name or field.name not in taken)
    return [field.name for field in free if not _has_bytes(field.type)]


def _has_bytes(kind: pa.DataType) -> bool:
    kind = _plain_type(kind)
    return _role(kind) == "bytes" or any(_has_bytes(kind.field(at).type) for at in range(kind.num_fields))


def _json_values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column as JSON has them."""
    if not _has_times(column.type):
        with suppress(ValueError, OverflowError):
            return [_json_value(value) for value in column.to_pylist()]
    return [_json_scalar(value) for chunk in column.chunks for value in chunk]


def _has_times(kind: pa.DataType) -> bool:
    kind = _plain_type(kind)
    return pa.types.is_temporal(kind) or any(_has_times(kind.field(at).type) for at in range(kind.num_fields))


def _json_scalar(scalar: pa.Scalar) -> Any:
    try:
        if not scalar.is_valid:
            return None
        if pa.types.is_dictionary(scalar.type):
            return _json_scalar(scalar.value)
        if pa.types.is_struct(scalar.type):
            return {name: _json_scalar(scalar[name]) for name in scalar}
        if hasattr(scalar, "values") and not pa.types.is_map(scalar.type):
            return [_json_scalar(one) for one in scalar.values]
        if pa.types.is_duration(scalar.type):
            return _duration(Decimal(scalar.value).scaleb(-_PLACES[scalar.type.unit]))
        if pa.types.is_interval(scalar.type):
            months, days, nanoseconds = scalar.as_py()
            return f"P{months}M{days}D" + _duration(Decimal(nanoseconds).scaleb(-9)).removeprefix("P")
        if pa.types.is_temporal(scalar.type):
            return scalar.cast(pa.string()).as_py()
        return _json_value(scalar.as_py())
    except (ValueError, OverflowError, LookupError):  # a sample with such a value has no row
        return None


_PLACES = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def _duration(seconds: Decimal) -> str:
    return f"PT{seconds:f}S"


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _json_value(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, bool, int)) else str(value)


@lru_cache(maxsize=1)
def _table(kind: str, path: str, _version: str) -> pa.Table:
    if kind == "parquet":
        return pq.ParquetFile(path).read(use_threads=False)  # read_table refuses columns of one name
    with pa.memory_map(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary and extension, which only a UUID keeps."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind.storage_type if hasattr(kind, "storage_type") and "arrow.uuid" not in str(kind) else kind


def _role(kind: pa.DataType) -> str:
    kind = _plain_type(kind)
    name = str(kind)
    if name in ("string", "large_string", "string_view"):
        return "text"
    if name in ("binary", "large_binary", "binary_view") or name.startswith("fixed_size_binary"):
        return "bytes"
    if pa.types.is_struct(kind) and any(field.name == "bytes" and "binary" in str(field.type) for field in kind):
        return "image"
    if name.startswith("decimal") or "arrow.uuid" in name or pa.types.is_temporal(kind):
        return "exact"
    return "integer" if pa.types.is_integer(kind) else ""


def _as_bytes(column: pa.ChunkedArray) -> list[Any]:
    return [value for chunk in column.chunks for value in _bytes_of(chunk)]


def _bytes_of(column: Any) -> list[Any]:
    if hasattr(column, "storage"):
        column = column.storage
    if hasattr(column, "dictionary"):
        values = _bytes_of(column.dictionary)
        return [None if index is None else values[index] for index in column.indices.to_pylist()]
    plain: list[Any] = (column if pa.types.is_integer(column.type) else column.cast(pa.large_binary())).to_pylist()
    return plain


def _pictures(column: pa.ChunkedArray, folder: str) -> list[bytes | None]:
    role = _role(column.type)
    if role == "bytes":
        return _as_bytes(column)
    if role == "text":
        return [None if link is None else linked(folder, os.fsdecode(link)) for link in _as_bytes(column)]
    found: list[bytes | None] = []
    for value in column.to_pylist():
        data = (value or {}).get("bytes")
        link = (value or {}).get("path")
        found.append(data if data is not None or not link else linked(folder, link))
    return found


def linked(folder: str, link: str) -> bytes | None:
    path = os.path.join(folder, link)
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def key_of(value: Any) -> str:
    """The key from an id; "" where the row number is the key."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return ""
    return "" if value is None else str(value)


def pick(roles: dict[str, str], named: dict[str, str]) -> tuple[str, str, str]:
    """The columns of text, image and key, each "" where there is none; the unit has rows, so nothing is ambiguous."""
    for name, role in roles.items():
        if role == "bytes" and (
            name == named.get("text_column") or (name.lower() in TEXTS and name != named.get("image_column"))
        ):
            roles = {**roles, name: "text"}
    texts = [name for name, role in roles.items() if role == "text"]
    blobs = [name for name, role in roles.items() if role in ("bytes", "image")]
    structs = [name for name in blobs if roles[name] == "image"]
    text, image = named.get("text_column", ""), named.get("image_column", "")
    if not image:
        image = _called([b for b in blobs if b != text], IMAGES) or _called([t for t in texts if t != text], LINKS)
        if not image and len(structs) == 1:
            image = structs[0]
        if not image and not text and not _called(texts, TEXTS) and len(blobs) == 1:
            image = blobs[0]
    if not text:
        free = [name for name in texts if name not in (image, named.get("id_column"))]
        text = _called(free, TEXTS)
        if not text and not image:
            others = [name for name in free if name.lower() not in IDS] or free
            text = others[0]
    key = named.get("id_column") or _called(
        [name for name, role in roles.items() if role in ("text", "integer", "exact") and name != text], IDS
    )
    return text, image, key


def _called(names: list[str], wanted: tuple[str, ...]) -> str:
    return next((name for want in wanted for name in names if name.lower() == want), "")
