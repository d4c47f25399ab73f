"""Conditions on values of Arrow columns: which satisfy one, and conditions whose values are of a column's type."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import InputError
from embq.core.filter.condition import Condition, bad_filter
from embq.core.rows.metadata import INT64_MAX, INT64_MIN


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
