"""The columns of a run's metadata: found from the first samples of its first units, and held from then on.

A field is a value of a sample's metadata that is no object. Of nested objects, each value inside is one, under the
names that lead to it. A field that is null is like one that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from core.run.rows import SIMILARITY, Column

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
            values = json.loads(text)
        except (ValueError, RecursionError):  # lists in lists beyond what Python can follow
            continue
        for path, value in fields_of(values):
            kinds.setdefault(path, set()).add(_kind(value))
            counts[path] = counts.get(path, 0) + 1
    named: dict[str, Column] = {}
    for path, seen in kinds.items():
        name = column_name(path)
        if name is not None:
            named.setdefault(name.casefold(), Column(name=name, type=_type_of(seen), path=path))
    found = list(named.values())
    if len(found) > MOST_COLUMNS:
        kept = {column.path for column in sorted(found, key=lambda one: -counts[one.path])[:MOST_COLUMNS]}
        found = [column for column in found if column.path in kept]
    return tuple(found)


def fields_of(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(the names that lead to it, value) of each field that can have a column."""
    for name, value in values.items():
        if isinstance(value, dict):
            if len(path) + 1 < MOST_DEPTH:
                yield from fields_of(value, (*path, name))
        elif value is not None:
            yield (*path, name), value


def column_name(path: tuple[str, ...]) -> str | None:
    """The name of a field's column, one that every format and reader takes; None where there is no such name."""
    name = ".".join(path)
    if name.lower() in RESERVED or name.lower().endswith(("_embedding", f"_{SIMILARITY}")):
        name = f"json_{name}"
    if not name.strip(". ") or "/" in name or not name.isprintable() or len(name.encode()) > MOST_NAME_BYTES:
        return None
    return name


def _kind(value: Any) -> str:
    """What a value says of its column's type; "small" is a whole number that fits int64 and float64."""
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
