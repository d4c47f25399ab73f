"""The rows of an index that satisfy conditions, as a bitmap by id."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import InputError
from embq.core.rows.metadata import INT64_MAX, INT64_MIN, column_in_index
from embq.indexer.filter.condition import Condition, bad_filter
from embq.indexer.index_files.identity import Identity

HIDDEN = ("id", "unit_id")
"""Columns of the identity that no condition is about."""

FEW = 10_000
"""Matches up to which their ids are kept, so that they can be compared one by one: 5 ms for vectors of 384 numbers that
are in memory, less than looking at all lists of a million rows."""

MOST_BYTES = 256 << 20
"""Of the selections that are kept; the newest is kept whatever its size. A bitmap of a million rows has 125 KB."""

_CHUNK = 1 << 20
"""Bytes of a bitmap that are looked at together."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows that may be an answer.

    Attributes:
        bits: uint8 (ids / 8,): a bit for each id, that of id 0 the lowest of the first byte.
        count: of the rows.
        ids: int64 (count,), ascending; None if they are more than `FEW`.
    """

    bits: np.ndarray
    count: int
    ids: np.ndarray | None


class Selections:
    """The selections of one open version; those that were used last are kept. For one thread at a time.

    Args:
        identity: of the rows.
        ids: number of ids.
        deleted: uint8 (ids / 8,): bits of deleted rows; None if there are none.
    """

    def __init__(self, identity: Identity, ids: int, deleted: np.ndarray | None) -> None:
        self._identity, self._ids, self._deleted = identity, ids, deleted
        self._cache: OrderedDict[frozenset[Condition], Selection] = OrderedDict()

    def of(self, conditions: Iterable[Condition]) -> Selection:
        """The rows that satisfy all conditions and are not deleted. A null value satisfies none.

        Raises InputError `no_column` for a column that the index does not have, `bad_filter` for a value or an operator
        that is not of the column's type.
        """
        columns = columns_of(self._identity)
        tests = frozenset(typed(_renamed(condition, columns), columns) for condition in conditions)
        if tests not in self._cache:
            self._cache[tests] = self._selected(sorted(tests, key=lambda test: test.column))
            held = sum(selection.bits.nbytes for selection in self._cache.values())
            while held > MOST_BYTES and len(self._cache) > 1:
                held -= self._cache.popitem(last=False)[1].bits.nbytes
        self._cache.move_to_end(tests)
        return self._cache[tests]

    def _selected(self, tests: Sequence[Condition]) -> Selection:
        bits = np.zeros(-(-self._ids // 8), np.uint8)
        for first_id, columns in self._identity.scan([condition.column for condition in tests]):
            matching = matches(columns[0], tests[0])
            for column, test in zip(columns[1:], tests[1:], strict=True):
                matching = pc.and_(matching, matches(column, test))
            # A file of identities may begin within a byte, which it shares with the file before.
            shifted = np.packbits(np.pad(matching.to_numpy(zero_copy_only=False), (first_id % 8, 0)), bitorder="little")
            bits[first_id // 8 : first_id // 8 + len(shifted)] |= shifted
        if self._deleted is not None:
            bits &= ~self._deleted
        count, ids = 0, [np.empty(0, np.int64)]
        for start in range(0, len(bits), _CHUNK):
            chunk = bits[start : start + _CHUNK]
            count += int.from_bytes(chunk.tobytes(), "little").bit_count()
            if count <= FEW:
                ids.append(8 * start + np.flatnonzero(np.unpackbits(chunk, bitorder="little").view(bool)))
        return Selection(bits, count, np.concatenate(ids) if count <= FEW else None)


def _renamed(condition: Condition, columns: Mapping[str, pa.DataType]) -> Condition:
    """The condition by the index's name of its column: `source` is the field of the user's data if there is one."""
    name = column_in_index(condition.column)
    return replace(condition, column=name) if name in columns else condition


def columns_of(identity: Identity) -> dict[str, pa.DataType]:
    """The columns that conditions may be about, with their types."""
    return {field.name: field.type for field in identity.schema if field.name not in HIDDEN}


def matches(column: pa.Array, test: Condition) -> pa.Array:
    """bool (n,), without nulls: which values of a column satisfy a condition of the column's type."""
    if pa.types.is_dictionary(column.type):
        if len(column.dictionary) <= len(column):
            return matches(column.dictionary, test).take(column.indices).fill_null(False)
        used = column.indices.unique().drop_null()  # decoded, a long text that many rows share would take any memory
        return matches(column.dictionary.take(used), test).take(pc.index_in(column.indices, used)).fill_null(False)
    result = _COMPARE[test.op](column, test.value)
    if pa.types.is_floating(column.type) and test.op in ("!=", _ANY):
        result = pc.and_(result, pc.invert(pc.is_nan(column)))  # NaN is no number: it is treated as null
    return result.fill_null(False)


_ANY = "any"
"""Operator of a condition that every value satisfies, such as `< 1e30` for whole numbers of 64 bits."""

_COMPARE: Mapping[str, Callable[[pa.Array, Any], pa.Array]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "contains": lambda column, text: pc.match_substring(column, text),
    "in": lambda column, values: pc.is_in(column, value_set=pa.array(values, column.type)),
    _ANY: lambda column, _: pc.is_valid(column),
}


# --- values as the types of columns ---


def typed(condition: Condition, columns: Mapping[str, pa.DataType]) -> Condition:
    """A condition whose values are of the column's type; InputError if they cannot be."""
    if condition.column not in columns:
        raise InputError(
            f"there is no column {condition.column[:200]!r}",
            next_step=f"it has {', '.join(columns)}",
            code="no_column",
        )
    type_ = columns[condition.column]
    if pa.types.is_string(type_):
        return _of_text(condition)
    if condition.op == "contains":
        raise _unfit(condition, "only texts contain something", "compare it with =, < or >")
    if pa.types.is_boolean(type_):
        return _of_truth(condition)
    if pa.types.is_integer(type_):
        return _of_whole_numbers(condition)
    if pa.types.is_floating(type_):
        return _of_floats(condition)
    raise _unfit(condition, f"a column of type {type_} cannot be compared", "filter by another column")


def _of_text(condition: Condition) -> Condition:
    if not all(isinstance(value, str) for value in _values(condition)):
        raise _unfit(condition, "the column holds text", "put the value in quotes")
    return condition


def _of_truth(condition: Condition) -> Condition:
    if condition.op not in ("=", "!=", "in"):
        raise _unfit(condition, "the column holds true and false", "compare it with = or !=")
    words = {"true": True, "false": False}
    read = [words.get(value.lower(), value) if isinstance(value, str) else value for value in _values(condition)]
    if not all(isinstance(value, bool) for value in read):
        raise _unfit(condition, "the column holds true and false", "give true or false")
    return _with(condition, read)


def _of_floats(condition: Condition) -> Condition:
    try:
        read = [float(_number(value, condition)) for value in _values(condition)]
    except OverflowError as error:
        raise _unfit(condition, "it is out of range", "give a smaller number") from error
    if condition.op == "in" and 0.0 in read:
        read.append(-0.0)  # equal, but not the same for `is_in`
    return _with(condition, read)


def _of_whole_numbers(condition: Condition) -> Condition:
    """Compare whole numbers with whole numbers: a float64 does not tell those beyond 2^53 apart."""
    read = [_number(item, condition) for item in _values(condition)]
    column, op, value = condition.column, condition.op, read[0]
    if op in ("=", "!=", "in"):
        integers = tuple(int(number) for number in read if number == int(number) and _fits(int(number)))
        if op == "in" or not integers:
            return Condition(column, _ANY, 0) if op == "!=" else Condition(column, "in", integers)
        return Condition(column, op, integers[0])
    if value != int(value):  # x < 2.5 is x <= 2, x > 2.5 is x >= 3
        op, value = ("<=", math.floor(value)) if op in ("<", "<=") else (">=", math.ceil(value))
    if _fits(int(value)):
        return Condition(column, op, int(value))
    every = (value > 0) == (op in ("<", "<="))
    return Condition(column, _ANY, 0) if every else Condition(column, "in", ())


_NUMBER = re.compile(r"[+-]?(\d{1,4000}+(\.\d*+)?|\.\d++)([eE][+-]?\d{1,3}+)?", re.ASCII)
"""At most 4,000 digits: Python makes no integer of more than 4,300."""


def _number(value: object, condition: Condition) -> int | float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value) if value.lstrip("+-").isdigit() else float(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _unfit(condition, "the column holds numbers", "give a number")


def _fits(value: int) -> bool:
    return INT64_MIN <= value <= INT64_MAX


def _values(condition: Condition) -> tuple[object, ...]:
    return condition.value if isinstance(condition.value, tuple) else (condition.value,)


def _with(condition: Condition, values: Sequence[Any]) -> Condition:
    return Condition(condition.column, condition.op, tuple(values) if condition.op == "in" else values[0])


def _unfit(condition: Condition, why: str, next_step: str) -> InputError:
    what = " ".join(str(part) for part in condition.describe())
    return bad_filter(f"{what[:200]}: {why}", next_step)
