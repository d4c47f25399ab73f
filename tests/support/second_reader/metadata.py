"""Compares stored metadata, columns and JSON text together, with the source.

embq's code for columns is not used: expected values come from the source alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from embq.app.verify.metadata import StoredMetadata, shown

Path = tuple[str, ...]


class SecondMetadata(StoredMetadata):
    """The stored metadata of some rows."""

    def differs(self, position: int, source: str | None) -> str:
        try:
            return self._differs(position, None if source is None else json.loads(source))
        except RecursionError:  # lists in lists beyond what Python can follow, and so beyond what can be checked
            return ""

    def _differs(self, position: int, source: dict[str, Any] | None) -> str:
        text = self._texts[position]
        try:
            there = dict(leaves({} if text is None else json.loads(text)))
        except (ValueError, AttributeError):
            return "its metadata are no JSON object"
        for column, cells in zip(self._columns, self._cells, strict=True):
            cell = cells[position]
            left = there.get(column.path)
            if cell is None:
                if left is not None and _fits(left, column.type):
                    return f"{column.name!r} is empty, though {shown(left)} fits it"
            elif left is not None:
                return f"{column.name!r} is in its column and in metadata"
            else:
                try:
                    there[column.path] = json.loads(cell) if column.type == "json" else cell
                except ValueError:
                    return f"{column.name!r} holds no JSON text"
        wanted = dict(leaves(source or {}))
        for path in (*wanted, *there):
            if path not in there or path not in wanted or not _same(there[path], wanted[path]):
                return f"{'.'.join(path)!r} is {shown(there.get(path))}, in the source {shown(wanted.get(path))}"
        return ""


def leaves(values: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """(path, value) of all values in an object and nested objects, without nulls."""
    waiting: list[tuple[Path, Any]] = [((name,), value) for name, value in values.items()]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [((*path, name), one) for name, one in value.items()]
        elif value is not None:
            yield path, value


def _fits(value: Any, type_: str) -> bool:
    match type_:
        case "bool":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str) and not any("\ud800" <= one <= "\udfff" for one in value)
        case "int64":
            return type(value) is int and value.bit_length() < 64
        case "float64":
            return type(value) is float or (type(value) is int and abs(value) <= 1 << 53)
        case _:
            return not isinstance(value, dict)


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, true is not a number, and objects have no order."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    return bool(one == other)
