"""Conditions on the columns of rows, as objects, as JSON and as text.

Imports neither numpy nor pyarrow: a client of `embq serve` has none.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from embq.core import wire
from embq.core.arguments import refused
from embq.core.errors import InputError, MalformedError, UsageError

OPS = ("=", "!=", "<", "<=", ">", ">=", "contains", "in")

MOST_CONDITIONS = 16

MOST_VALUES = 256
"""Values of one `in`."""

_MOST_FLOAT = (2 - 2**-52) * 2.0**1023

Scalar: Any = (
    bool
    | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    | Annotated[float, Meta(ge=-_MOST_FLOAT, le=_MOST_FLOAT)]
    | wire.ShortText
)
Scalars: Any = Annotated[list[Scalar], Meta(min_length=1, max_length=MOST_VALUES)]
Form: Any = tuple[wire.ShortText, Literal["=", "!=", "<", "<=", ">", ">=", "contains", "in"], Any]
"""A condition in JSON, such as `["year", ">=", 2020]`. Its value, a `Scalar` or `Scalars`, is read by itself: where a
list stands in one union with a text that has a pattern, msgspec 0.22 ends the process."""

Forms: Any = Annotated[list[Form], Meta(max_length=MOST_CONDITIONS)]

Value = str | int | float | bool | tuple[str | int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one column of a row.

    Attributes:
        column: key, caption, source, or a column of metadata.
        op: one of OPS.
        value: what the column is compared with, several values for `in`. A text is read as the column's type, so "2020"
            fits a column of numbers.

    Raises InputError `bad_filter` if the value does not belong to the operator.
    """

    column: str
    op: str
    value: Value

    def __post_init__(self) -> None:
        if isinstance(self.value, tuple) != (self.op == "in"):
            raise bad_filter(
                f"{self.column} {self.op}: {'a list of values' if self.op == 'in' else 'one value'} is needed",
                'such as ["label", "in", ["cat", "dog"]] or ["label", "=", "cat"]',
            )
        if self.op == "contains" and not isinstance(self.value, str):
            raise bad_filter(f"{self.column} contains: the value is not a text", "contains is for columns of text")

    @classmethod
    def from_form(cls, form: tuple[str, str, object]) -> Condition:
        """From a `Form`; MalformedError if its value is none."""
        column, op, value = form
        if isinstance(value, list | tuple):
            return cls(column, op, tuple(wire.convert(Scalars, list(value), what="list of values")))
        return cls(column, op, wire.convert(Scalar, value, what="value of a condition"))

    @classmethod
    def parse(cls, text: str) -> Condition:
        """From text such as `year >= 2020`, `label = cat`, `caption contains a cat`, `label in cat, dog`.

        A column in backquotes may have blanks and operators in its name: `` `a = b` = 1 ``. A value in double quotes is
        a JSON text: `label = ""`; one in single quotes is a text as in SQL: `label = 'it''s'`. A list in brackets is
        JSON: `label in ["a, b", "c"]`; one in parentheses is read as without them.
        Raises UsageError if it is no condition, or several.
        """
        match = _TEXT.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
        if match is None:
            raise _usage(f"{text[:100]!r} is no condition")
        column = match["quoted"] or match["column"]
        op, value = match["word"] or match["sign"].replace("==", "="), match["value"].strip()
        if not _WHOLE.fullmatch(value) and (several := _SEVERAL.search(value)):
            raise UsageError(
                f"{text[:100]!r} has several conditions",
                next_step=(
                    "give --where once for each: all must hold"
                    if (several[1] or several[2]).lower() == "and"
                    else "one of several values is COLUMN in VALUE, VALUE"
                )
                + "; a value in quotes is taken as it is",
            )
        try:
            if op != "in":
                return read_condition((column, op, _unquoted(value)))
            values = json.loads(value) if value.startswith("[") else [_unquoted(item) for item in _items(value)]
            return read_condition((column, op, values))
        except (ValueError, RecursionError, csv.Error) as error:
            listed = '; a list is a, b or ["a", "b"]' if op == "in" else ""
            raise _usage(f"the value of {text[:100]!r} cannot be read: {error}{listed}") from error

    def describe(self) -> list[Any]:
        """As JSON."""
        return [self.column, self.op, list(self.value) if isinstance(self.value, tuple) else self.value]


def read_condition(given: object) -> Condition:
    """A condition in any of its forms: an object, text, or three values. Raises UsageError if it is none."""
    if isinstance(given, Condition):
        return given
    if isinstance(given, str):
        return Condition.parse(given)
    try:
        return Condition.from_form(wire.convert(Form, wire.python_value(given), what="condition"))
    except MalformedError as error:
        raise _usage(error.message) from error


def read_conditions(given: Iterable[object]) -> tuple[Condition, ...]:
    """Conditions in any of their forms; one text is one condition. Raises UsageError if one is none."""
    return tuple(read_condition(item) for item in ((given,) if isinstance(given, str) else given))


def given_conditions(where: Any) -> tuple[Condition, ...]:
    """Conditions in any of their forms, none for None; UsageError if they are no list."""
    if where is None:
        return ()
    if not isinstance(where, Iterable) or isinstance(where, (bytes, Mapping)):
        raise refused("where", where, 'a condition or a list of them, such as ["year >= 2020"]')
    return read_conditions(where)


def conditions_from_json(value: object) -> tuple[Condition, ...]:
    """Conditions as JSON has them, a list of `Form`; MalformedError or InputError `bad_filter` if they are none."""
    return tuple(Condition.from_form(form) for form in wire.convert(Forms, value, what="where"))


def bad_filter(message: str, next_step: str) -> InputError:
    """The error of a condition that cannot be applied."""
    return InputError(message, next_step=next_step, code="bad_filter")


_MOST_CHARACTERS = 100_000
_TEXT = re.compile(
    r"\s*(?:`(?P<quoted>[^`]+)`|(?P<column>\S(?:.*?\S)??))(?:\s+(?P<word>contains|in)\s|\s*(?P<sign>!=|<=|>=|==?|<|>))(?P<value>.*)",
    re.DOTALL,
)

_WHOLE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|\[.*", re.DOTALL)
"""A value in quotes, or a list."""

_COLUMN = r"(?:`[^`]{1,1000}`|\w+)"
_SEVERAL = re.compile(
    rf"\s((?i:and|or))\s+{_COLUMN}\s*(?:[=<>]|!=)|\s(AND|OR)\s+{_COLUMN}\s+(?:contains|in)\s",
)
"""A second condition in a value. In small letters `and` and `in` are words of texts, as in `cat and dog in a park`."""


def _items(text: str) -> list[str]:
    """The values of a list, apart at commas outside of single quotes."""
    text = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    return next(csv.reader([text], quotechar="'", skipinitialspace=True)) if "'" in text else text.split(",")


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == '"':
        parsed = json.loads(text)
        return parsed if isinstance(parsed, str) else text
    if text.startswith("'") and _WHOLE.fullmatch(text):
        return text[1:-1].replace("''", "'")
    if not text:
        raise ValueError('it is missing; "" is the empty text')
    return text


def _usage(message: str) -> UsageError:
    return UsageError(message, next_step=f"write COLUMN OPERATOR VALUE; operators are {' '.join(OPS)}")
