"""Command lines of other tools as python-fire reads them, and the verbs of embq that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from embq.app.cli.sections import Option, SectionedCommand, no_such_option
from embq.core.errors import command_line
from embq.core.redaction import masked


class FireOption(Option):
    """An option that is not given if its value is None.

    Args:
        switch: whether it may stand without a value, as True, and as `--noNAME`, False.
        section: heading of the help.
    """

    def __init__(self, *args: Any, switch: bool = False, section: str = "Arguments", **settings: Any) -> None:
        settings |= {"is_flag": False, "flag_value": "true"} if switch else {}
        super().__init__(*args, **settings)
        self.section = section
        self.off = [f"--no{name[2:]}" for name in self.opts] if switch else []

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """The value, as click finds it."""
        return super().consume_value(ctx, {name: value for name, value in opts.items() if value != "None"})


fire_option = partial(click.option, cls=FireOption)
"""Decorator of a `FireOption`."""


class FireCommand(SectionedCommand):
    """A command of another tool."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, and `--noNAME` as False."""
        switches = [switch for switch in self.params if isinstance(switch, FireOption)]
        off = {hyphens(name): f"{switch.opts[0]}=false" for switch in switches for name in switch.off}
        return super().parse_args(ctx, [off.get(hyphens(argument), argument) for argument in args])


def hyphens(name: str) -> str:
    """embq's spelling of an option."""
    return name.replace("_", "-")


def names_of(value: str) -> list[str]:
    """The names in a list, as Fire takes one; the value itself if it is none."""
    if value[:1] not in ("[", "("):
        return [value]
    return [name.strip(" '\"") for name in value.strip("[]() ").split(",") if name.strip(" '\"")]


def note(text: str) -> None:
    """A line for the user on stderr."""
    click.echo(f"note: {text}", err=True)


def run_verb(ctx: click.Context, verb: str, arguments: Sequence[str]) -> Any:
    """Run a verb of embq, which a note names; returns its exit status."""
    note(f"this is: {masked(command_line(verb, *arguments))}")
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, verb)
    assert command is not None
    try:
        context = command.make_context(verb, list(arguments), parent=root)
    except click.NoSuchOption as error:
        names = [name for param in (*command.params, *ctx.command.params) for name in param.opts]
        raise no_such_option(error, [name for name in names if name.startswith("-")]) from None
    with context:
        return command.invoke(context)
