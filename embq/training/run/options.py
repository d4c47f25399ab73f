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
    **extra: Any,
) -> T:
    """A field with its option.

    Args:
        value: default of the field, and of the option unless `extra` has another.
        kind: type of the option.
        metadata: of the field, beside the option.
        extra: further arguments of `click.option`; `name` and `short` are the flag, if it is not the field's, and -X.
    """
    arguments = {"help": help_, "type": kind, "default": value, **extra}
    declared: T = field(default=value, metadata={**metadata, "option": arguments})
    return declared


def required(help_: str, kind: Any = None, *, metadata: Mapping[str, Any] = _NOTHING, **extra: Any) -> Any:
    """A field without a default, whose option has to be given; arguments as of `option`."""
    return field(metadata={**metadata, "option": {"help": help_, "type": kind, "required": True, **extra}})


def flag(declared: Field[Any]) -> str:
    """The flag of a field: its name, unless the option has another."""
    other: str = declared.metadata["option"].get("name", "")
    return other or "--" + declared.name.replace("_", "-")


def options_of(settings: Any, *, only: str = "", without: str = "", unset: bool = False) -> Callable[[F], F]:
    """Decorator of a command: adds the options of a dataclass, in the order of its fields.

    Args:
        only: the one field whose option to add; "" for all.
        without: a field whose option to leave out; "" for none.
        unset: whether an option that is not given is None in place of its default.
    """
    chosen = [declared for declared in fields(settings) if "option" in declared.metadata and declared.name != without]
    chosen = [declared for declared in chosen if only in ("", declared.name)]

    def decorated(function: F) -> F:
        for declared in reversed(chosen):
            arguments = dict(declared.metadata["option"])
            arguments.pop("name", None)
            names = [flag(declared), declared.name, *([arguments.pop("short")] if "short" in arguments else [])]
            if unset:
                arguments["default"] = None
            function = sections.option(*names, **arguments)(function)
        return function

    return decorated
