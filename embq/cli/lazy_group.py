"""Command group that imports a command when it is called."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Group of commands in modules of their own.

    Commands that are added in the usual way come first.

    Args:
        later: name -> (module, whose `command` is the command, or module:name for another name in it; line of help).
        foreign: name of a command in another tool -> suggestions.
        heading: of the list of commands.
    """

    def __init__(
        self,
        *args: Any,
        later: Mapping[str, tuple[str, str]],
        foreign: Mapping[str, list[str]] | None = None,
        heading: str = "Commands",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.later = dict(later)
        self.foreign = dict(foreign or {})
        self.heading = heading

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return [*self.commands, *self.later]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None for an unknown one."""
        if cmd_name not in self.later:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.later[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, with a suggestion for an unknown name."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = self.foreign.get(args[0]) or difflib.get_close_matches(args[0], known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"there is no verb {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        eager = [(name, command.get_short_help_str(100)) for name, command in self.commands.items()]
        with formatter.section(self.heading):
            formatter.write_dl([*eager, *((name, line) for name, (_, line) in self.later.items())])
