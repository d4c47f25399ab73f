"""Options of a verb, declared once: as the fields of a dataclass, with name, type, default and help text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

import click

from embq.app.cli import sections

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

COUNT = click.IntRange(min=1)
FROM_0 = click.IntRange(min=0)
DEVICE = click.Choice(["cuda", "cpu"])

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def option(
    value: T,
    help_: str,
    kind: Any = None,
    *,
    metadata: Mapping[str, Any] = _NOTHING,
    **more: Any,
) -> T:
    """A field with its option.

    Args:
        value: default of the field, and of the option unless `more` has another.
        kind: type of the option.
        metadata: of the field, beside the option.
        more: further arguments of `click.option`; `name` and `short` are the flag, where it is not the field's, and -X.
    """
    made = {"help": help_, "type": kind, "default": value, **more}
    one: T = field(default=value, metadata={**metadata, "option": made})
    return one


def required(help_: str, kind: Any = None, *, metadata: Mapping[str, Any] = _NOTHING, **more: Any) -> Any:
    """A field without a default, whose option has to be given; arguments as of `option`."""
    return field(metadata={**metadata, "option": {"help": help_, "type": kind, "required": True, **more}})


def flag(one: Field[Any]) -> str:
    """The flag of a field: its name, unless the option has another."""
    other: str = one.metadata["option"].get("name", "")
    return other or "--" + one.name.replace("_", "-")


def options_of(settings: Any, *, only: str = "", without: str = "", unset: bool = False) -> Callable[[F], F]:
    """Decorator of a command: adds the options of a dataclass, in the order of its fields.

    Args:
        only: the one field whose option to add; "" for all.
        without: a field whose option to leave out; "" for none.
        unset: whether an option that is not given is None in place of its default.
    """
    chosen = [one for one in fields(settings) if "option" in one.metadata and one.name != without]
    chosen = [one for one in chosen if only in ("", one.name)]

    def decorated(function: F) -> F:
        for one in reversed(chosen):
            more = dict(one.metadata["option"])
            more.pop("name", None)
            names = [flag(one), one.name, *([more.pop("short")] if "short" in more else [])]
            if unset:
                more["default"] = None
            function = sections.option(*names, **more)(function)
        return function

    return decorated
