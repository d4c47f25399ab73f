"""The metadata of samples in the columns of their run: what fits goes there, and what does not stays JSON text.

Together they hold each field once, unchanged. Nothing that a source says can fail here, or change the columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from core.run.metadata_columns import FLOAT64_INTEGERS, INT64_MAX, INT64_MIN, MOST_DEPTH
from core.run.rows import Column
from core.units import is_unicode, json_text

Take = Callable[[Any], Any]
"""A value, never None, as a column of one type stores it; None where it does not fit."""


def fill(texts: Sequence[str | None], columns: tuple[Column, ...]) -> tuple[list[list[Any]], list[str | None]]:
    """The values of each column, in their order, and of each sample the JSON text of what is in none of them, or None.

    Args:
        texts: metadata of samples, as `core.units.Sample` has it.
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
            left = _distribute(json.loads(text), tree, cells, row, 1)
            rest[row] = json_text(left) if left else None
        except (ValueError, RecursionError):  # lists in lists beyond what Python can follow
            for cell in cells:
                cell[row] = None
            rest[row] = text
    return cells, rest


class _Node:
    """What becomes of the fields below one name.

    Attributes:
        index: of the column for the field of this name; -1 where it has none.
        take: of that column.
        below: by the next name.
    """

    __slots__ = ("below", "index", "take")

    def __init__(self) -> None:
        self.index = -1
        self.take: Take = _nothing
        self.below: dict[str, _Node] = {}


def _distribute(values: dict[str, Any], node: _Node, cells: list[list[Any]], row: int, depth: int) -> dict[str, Any]:
    """Put the fields of an object into the columns of `row`; those that are left."""
    left: dict[str, Any] = {}
    below = node.below
    for name, value in values.items():
        if value is None:
            continue
        here = below.get(name, _NOWHERE)
        if type(value) is dict:
            if value and depth < MOST_DEPTH:
                value = _distribute(value, here, cells, row, depth + 1)
                if value:
                    left[name] = value
            else:
                left[name] = value
        elif (stored := here.take(value)) is not None:
            cells[here.index][row] = stored
        else:
            left[name] = value
    return left


@lru_cache(maxsize=64)
def _tree(columns: tuple[Column, ...]) -> _Node:
    root = _Node()
    for index, column in enumerate(columns):
        node = root
        for name in column.path:
            node = node.below.setdefault(name, _Node())
        node.index, node.take = index, _TAKE[column.type]
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
