"""Options of a program as those of a verb: the names are those of the command line, with underscores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import click

from embq.core.arguments import refused
from embq.core.errors import UsageError
from embq.core.wire import python_value


def parsed(verb: str, options: Mapping[str, Any], values: Sequence[str], *flags: str) -> dict[str, Any]:
    """The parameters that a verb is called with for the options of a program.

    Args:
        values: those of its arguments.
        flags: further ones of the command line.

    Raises UsageError if the command line would.
    """
    arguments = [*arguments_of(verb, options), *flags, "--", *values]
    try:
        with _command(verb).make_context(verb, arguments) as context:
            return context.params
    except click.ClickException as error:
        raise UsageError(error.format_message()) from error


def arguments_of(verb: str, options: Mapping[str, Any]) -> list[str]:
    """Options of a program as arguments of a verb: the names are those of the command line, with underscores.

    True and False are for options without a value, lists for those that are given several times or take a list, and
    None leaves an option out. UsageError for a name that the verb does not have.
    """
    command = _command(verb)
    params = {
        opt.lstrip("-").replace("-", "_"): param
        for param in command.params
        if isinstance(param, click.Option)
        for opt in (*param.opts, *param.secondary_opts)
        if opt.startswith("--")
    }
    arguments: list[str] = []
    for name, value in options.items():
        param = params.get(name)
        if param is None or name in ("json", "quiet", "verbose", "output", "dry_run"):
            raise UsageError(
                f"embq {verb} has no option {name}", next_step=f"the options are those of `embq {verb} --help`"
            )
        flag = f"--{name.replace('_', '-')}"
        value = python_value(value)
        values = value if isinstance(value, list | tuple | set) else [value]
        if odd := next((item for item in values if not isinstance(item, str | int | float | PathLike | None)), None):
            raise refused(name, odd, "a text, a number, True, False or a list")
        if value is None or (value is False and not param.secondary_opts):
            continue
        if param.is_flag:
            arguments.append(flag if value else param.secondary_opts[0])
        elif isinstance(value, list | tuple | set):
            one_by_one = [str(item) for item in value]
            arguments += [f"{flag}={item}" for item in (one_by_one if param.multiple else [",".join(one_by_one)])]
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def _command(verb: str) -> click.Command:
    from embq.app.cli.entry_point import cli

    command: click.Command | None = cli
    for word in verb.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return command
