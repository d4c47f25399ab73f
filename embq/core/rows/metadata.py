"""Columns of a run's metadata, found from its first samples, and the distribution of samples' metadata over them.

A field is a value of a sample's metadata that is no object; values of nested objects are fields under the names that
lead to them. A null field counts as absent. A field that fits no column stays in the JSON text of the row, so that each
field is stored once, unchanged. No metadata can fail here, or change the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from embq.core.rows.spec import SIMILARITY, Column
from embq.core.units import is_unicode, json_text, json_value

MOST_COLUMNS = 256
"""Columns of a run; the fields that occur most often get them."""

MOST_DEPTH = 8
"""Names that may lead to a field with a column; what lies deeper stays JSON."""

MOST_NAME_BYTES = 200

RESERVED = frozenset(
    {
        "id",
        "ordinal",
        "key",
        "embedding",
        "caption",
        "metadata",
        "unit_id",
        "document",
        "chunk",
        "chunks",
        "char_start",
        "char_end",
        "image_path",
        SIMILARITY,
        "similarity",
    }
)
"""Columns of rows that are no metadata, and what readers put beside them; what ends like an embedding's or a
similarity's column is reserved as well."""

INDEX_COLUMNS = ("id", "key", "caption", "source", "unit_id")
"""Columns of each row of an index that are no metadata."""

PREFIX = "input_"
"""Stands in an index before the name of a metadata column that is also one of `INDEX_COLUMNS`."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT64_INTEGERS = 2**53
"""Every whole number up to this, and its negative, is a float64."""


def find_columns(texts: Iterable[str]) -> tuple[Column, ...]:
    """The columns for samples whose metadata are `texts`, each the JSON text of an object.

    The same texts in the same order give the same columns: in order of their first occurrence, and typed by all values
    that were seen. Of two fields that would get one name, in whatever case, the first one does.
    """
    kinds: dict[tuple[str, ...], set[str]] = {}
    counts: dict[tuple[str, ...], int] = {}
    for text in texts:
        try:
            values = json_value(text)
        except (ValueError, RecursionError):  # lists in lists beyond what Python can follow
            continue
        for path, value in fields_of(values):
            kinds.setdefault(path, set()).add(_kind(value))
            counts[path] = counts.get(path, 0) + 1
    named: dict[str, Column] = {}
    for path, value_kinds in kinds.items():
        name = column_name(path)
        if name is not None:
            named.setdefault(name.casefold(), Column(name=name, type=_type_of(value_kinds), path=path))
    columns = list(named.values())
    if len(columns) > MOST_COLUMNS:
        frequent = {column.path for column in sorted(columns, key=lambda field: -counts[field.path])[:MOST_COLUMNS]}
        columns = [column for column in columns if column.path in frequent]
    return tuple(columns)


def fields_of(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(the names that lead to it, value) of each field that can have a column."""
    for name, value in values.items():
        if isinstance(value, dict):
            if len(path) + 1 < MOST_DEPTH:
                yield from fields_of(value, (*path, name))
        elif value is not None:
            yield (*path, name), value


def column_name(path: tuple[str, ...]) -> str | None:
    """The name of a field's column, one that every format and reader takes; None if there is no such name."""
    name = ".".join(path)
    if name.lower() in RESERVED or name.lower().endswith(("_embedding", f"_{SIMILARITY}")):
        name = f"json_{name}"
    if not name.strip(". ") or "/" in name or not name.isprintable() or len(name.encode()) > MOST_NAME_BYTES:
        return None
    return name


def renamed(columns: Iterable[Column]) -> tuple[str, ...]:
    """Return one line about the fields that are stored under another name than their own; () if there are none."""
    pairs = [f"{'.'.join(column.path)} as {column.name}" for column in columns if column.name != ".".join(column.path)]
    return (f"metadata fields with names of embq's own columns are stored as: {', '.join(pairs)}",) if pairs else ()


def column_in_index(name: str) -> str:
    """Return the name of a metadata column in an index; `column_in_file` is the inverse."""
    plain = name
    while plain.startswith(PREFIX):
        plain = plain.removeprefix(PREFIX)
    return PREFIX + name if plain in INDEX_COLUMNS else name


def column_in_file(name: str) -> str:
    """Return the name that a metadata column of an index has in the run or folder it was read from."""
    short = name.removeprefix(PREFIX)
    return short if short != name and column_in_index(short) == name else name


def _kind(value: Any) -> str:
    """Kind of a value, from which its column's type follows; "small" is an integer that fits int64 and float64."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "string"
    if isinstance(value, float):
        return "float64"
    if isinstance(value, int) and INT64_MIN <= value <= INT64_MAX:
        return "small" if abs(value) <= FLOAT64_INTEGERS else "int64"
    return "json"


def _type_of(kinds: set[str]) -> str:
    """The type that all values fit that were seen."""
    for type_, fitting in _FITTING.items():
        if kinds <= fitting:
            return type_
    return "json"


_FITTING = {
    "bool": {"bool"},
    "int64": {"small", "int64"},
    "float64": {"small", "float64"},
    "string": {"string"},
}


Take = Callable[[Any], Any]
"""A value, never None, as a column of one type stores it; None if it does not fit."""


def fill_columns(texts: Sequence[str | None], columns: tuple[Column, ...]) -> tuple[list[list[Any]], list[str | None]]:
    """The values of each column, in their order, and of each sample the JSON text of what is in none of them, or None.

    Args:
        texts: metadata of samples, as `embq.core.units.Sample` has it.
    """
    tree = _tree(columns)
    cells: list[list[Any]] = [[None] * len(texts) for _ in columns]
    rest: list[str | None] = [None] * len(texts)
    for row, text in enumerate(texts):
        if text is None:
            continue
        if row and text is texts[row - 1]:  # the chunks of one text
            for cell in cells:
                cell[row] = cell[row - 1]
            rest[row] = rest[row - 1]
            continue
        try:
            remaining = _distribute(json_value(text), tree, cells, row, 1)
            rest[row] = json_text(remaining) if remaining else None
        except (ValueError, RecursionError):  # lists in lists beyond what Python can follow
            for cell in cells:
                cell[row] = None
            rest[row] = text
    return cells, rest


class _Node:
    """Node of the tree of names that lead to columns.

    Attributes:
        index: of the column for the field of this name; -1 if it has none.
        convert: of that column.
        below: by the next name.
    """

    __slots__ = ("below", "convert", "index")

    def __init__(self) -> None:
        self.index = -1
        self.convert: Take = _nothing
        self.below: dict[str, _Node] = {}


def _distribute(values: dict[str, Any], node: _Node, cells: list[list[Any]], row: int, depth: int) -> dict[str, Any]:
    """Put the fields of an object into the columns of `row`; those that are left."""
    remaining: dict[str, Any] = {}
    below = node.below
    for name, value in values.items():
        if value is None:
            continue
        here = below.get(name, _NOWHERE)
        if type(value) is dict:
            if value and depth < MOST_DEPTH:
                value = _distribute(value, here, cells, row, depth + 1)
                if value:
                    remaining[name] = value
            else:
                remaining[name] = value
        elif (stored := here.convert(value)) is not None:
            cells[here.index][row] = stored
        else:
            remaining[name] = value
    return remaining


@lru_cache(maxsize=64)
def _tree(columns: tuple[Column, ...]) -> _Node:
    root = _Node()
    for index, column in enumerate(columns):
        node = root
        for name in column.path:
            node = node.below.setdefault(name, _Node())
        node.index, node.convert = index, _TAKE[column.type]
    return root


def _nothing(_value: Any) -> Any:
    return None


def _string(value: Any) -> str | None:
    return value if type(value) is str and (value.isascii() or is_unicode(value)) else None


def _int64(value: Any) -> int | None:
    return value if type(value) is int and INT64_MIN <= value <= INT64_MAX else None


def _float64(value: Any) -> float | None:
    if type(value) is int:
        return float(value) if -FLOAT64_INTEGERS <= value <= FLOAT64_INTEGERS else None
    return value if type(value) is float else None


def _bool(value: Any) -> bool | None:
    return value if type(value) is bool else None


_NOWHERE = _Node()
_TAKE: dict[str, Take] = {
    "string": _string,
    "int64": _int64,
    "float64": _float64,
    "bool": _bool,
    "json": json_text,
}
