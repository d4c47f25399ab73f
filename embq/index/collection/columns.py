"""Metadata columns of plain collections: their types across all files, and which of them are key and caption.

Numbers and truth values keep a type that columns of a run have, everything else becomes text, and nested values become
their JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import InputError
from embq.core.formats.base import READ_ROWS
from embq.core.rows.metadata import INDEX_COLUMNS, column_in_file, column_in_index
from embq.core.rows.results import COLUMN_ARROW
from embq.index.collection.listing import rows_of_file
from embq.index.collection.parts import IDENTITY, FileRef
from embq.index.collection.remote import FilePath

KEYS = ("key", "image_path", "url", "id")
"""Columns that can name a row, the best first, in whatever case."""
CAPTIONS = ("caption", "text")
"""Columns that can be the text of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Metadata columns and their roles.

    Attributes:
        types: column as it is called in an index -> its type, a key of `embq.core.rows.results.COLUMN_ARROW`.
        named: "key" and "caption" -> the column that they are.
    """

    types: dict[str, str]
    named: dict[str, str]

    @property
    def in_files(self) -> list[str]:
        """Names of the columns in the files."""
        return list(dict.fromkeys([*self.named.values(), *map(column_in_file, self.types)]))

    def fields(self) -> dict[str, Any]:
        """The columns as fields of the collection."""
        return {"id_types": self.types, "id_columns": tuple(self.types), "named": self.named}


def find_columns(
    schemas: Iterable[tuple[FilePath, pa.Schema]], selected: Sequence[str] | None, vectors: Sequence[str]
) -> Columns:
    """The columns that are taken, with types that hold for all files.

    Args:
        schemas: of each file.
        selected: the columns that become metadata, which all files have; None for all that any file has.
        vectors: columns that are none of it.

    Raises InputError if a wanted column is missing.
    """
    types: dict[str, str] = {}
    for path, schema in schemas:
        if absent := [name for name in selected or () if name not in schema.names]:
            present = [name for name in schema.names if name not in vectors]
            raise InputError(
                f"{path} has no column {absent[0]!r}",
                next_step=f"it has {', '.join(present)}" if present else "it has no columns beside the vectors",
                code="no_column",
            )
        for field in schema:
            if field.name not in vectors:
                types[field.name] = _both(types.get(field.name, ""), _type_of(field.type))
    roles = {"key": _first(KEYS, selected or list(types)), "caption": _first(CAPTIONS, selected or list(types))}
    named = {role: name for role, name in roles.items() if name}
    names = [
        name
        for name in (types if selected is None else selected)
        if name not in INDEX_COLUMNS or named.get(name) != name
    ]
    return Columns(types={column_in_index(name): types[name] or "string" for name in names}, named=named)


def _first(names: Sequence[str], present: Sequence[str]) -> str:
    by_lower = {name.lower(): name for name in reversed(present)}
    return next((by_lower[name] for name in names if name in by_lower), "")


def _type_of(type_: pa.DataType) -> str:
    """ "" for a column without any value, which fits every type."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_null(type_):
        return ""
    if pa.types.is_boolean(type_):
        return "bool"
    if pa.types.is_integer(type_) and type_ != pa.uint64():
        return "int64"
    return "float64" if pa.types.is_floating(type_) else "string"


def _both(first: str, second: str) -> str:
    """A type for the values of both; a whole number in a column that became one of floats is why these are none."""
    if not first or not second or first == second:
        return first or second
    return "float64" if {first, second} == {"int64", "float64"} else "string"


def without_columns(start: int, stop: int) -> Iterator[pa.Table]:
    """Rows of which there are no columns, a bounded number at a time."""
    return (pa.table({"": pa.nulls(min(READ_ROWS, stop - first))}) for first in range(start, stop, READ_ROWS))


def identity(file: FileRef, table: pa.Table, start: int, columns: Columns) -> pa.Table:
    """`IDENTITY` without its id, and metadata, of some rows.

    Args:
        file: in which they stand; names those without a key.
        table: their columns, as far as the file has them.
        start: the first of them in the file.
    """
    plain = rows_of_file(file, start, start + table.num_rows)
    values = {field.name: plain[field.name] for field in IDENTITY[1:]}
    for role, name in columns.named.items():
        if name in table.column_names:
            texts = cast(table[name], "string")
            values[role] = pc.coalesce(texts, values[role]) if role == "key" else texts
    fields = [*IDENTITY[1:], *(pa.field(name, COLUMN_ARROW[type_]) for name, type_ in columns.types.items())]
    for name, type_ in columns.types.items():
        at = table.column_names.index(column_in_file(name)) if column_in_file(name) in table.column_names else None
        values[name] = pa.nulls(table.num_rows, COLUMN_ARROW[type_]) if at is None else cast(table.column(at), type_)
    return pa.Table.from_arrays([values[field.name] for field in fields], schema=pa.schema(fields))


def cast(column: pa.ChunkedArray, type_: str) -> pa.ChunkedArray:
    """A column as one of the types of metadata; what is no number becomes text, what is nested JSON text."""
    target = COLUMN_ARROW[type_]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if target == column.type:
        return column
    if type_ == "float64":  # of whole numbers that no float64 is, the nearest
        return column.cast(target, safe=False)
    if type_ == "string" and (pa.types.is_nested(column.type) or pa.types.is_binary(column.type)):
        return pa.chunked_array([[_text(value) for value in column.to_pylist()]], target)
    return column.cast(target)


def _text(value: object) -> str | None:
    if value is None or isinstance(value, bytes):
        return None if value is None else value.decode("utf-8", "backslashreplace")
    return json.dumps(value, ensure_ascii=False, default=str)
