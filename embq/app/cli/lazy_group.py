"""Commands with further commands: a group that imports them when they are called, a command that is one itself."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from embq.app.cli.sections import SectionedCommand


class LazyGroup(click.Group):
    """Group of commands in modules of their own.

    Commands that are added in the usual way come first.

    Args:
        later: name -> (module, whose `command` is the command, or module:name for another name in it; line of help).
        unlisted: name -> module, as of `later`; its help is not in the list.
        foreign: name of a command in another tool -> suggestions.
        headings: heading -> the names below it; without them all are below "Commands".
    """

    def __init__(
        self,
        *args: Any,
        later: Mapping[str, tuple[str, str]],
        unlisted: Mapping[str, str] | None = None,
        foreign: Mapping[str, list[str]] | None = None,
        headings: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.later = dict(later)
        self.unlisted = dict(unlisted or {})
        self.foreign = dict(foreign or {})
        self.headings = dict(headings or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return [*self.commands, *self.later]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None for an unknown one."""
        if cmd_name in self.unlisted:
            return _imported(self.unlisted[cmd_name])
        return _imported(self.later[cmd_name][0]) if cmd_name in self.later else super().get_command(ctx, cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and options that begin so, without importing any command."""
        found = {name: command.get_short_help_str() for name, command in self.commands.items()}
        found |= {name: line for name, (_, line) in self.later.items()}
        names = [CompletionItem(name, help=line) for name, line in found.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, with a suggestion for an unknown name."""
        known = self.list_commands(ctx)
        if args and args[0] not in (*known, *self.unlisted) and not args[0].startswith("-"):
            near = self.foreign.get(args[0]) or difflib.get_close_matches(args[0], known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"there is no verb {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        lines = {name: command.get_short_help_str(100) for name, command in self.commands.items()}
        lines |= {name: line for name, (_, line) in self.later.items()}
        for heading, names in (self.headings or {"Commands": [*lines]}).items():
            with formatter.section(heading):
                formatter.write_dl([(name, lines[name]) for name in names])


class CommandWithVerbs(SectionedCommand):
    """Command whose first argument may name a further one, as `embq index export OUT`; a folder is `./export` then.

    Args:
        later: as of `LazyGroup`.
    """

    def __init__(self, *args: Any, later: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.later = dict(later)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command, or of the one that the first argument names."""
        command = self.get_command(None, args[0]) if args else None
        if command is not None:
            return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """The further command of a name; None for any other word."""
        return _imported(self.later[cmd_name][0]) if cmd_name in self.later else None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, then the further commands."""
        super().format_options(ctx, formatter)
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in self.later.items()])


def _imported(where: str) -> click.Command:
    """The command at module, or module:name."""
    module, _, name = where.partition(":")
    command: click.Command = getattr(importlib.import_module(module), name or "command")
    return command
