"""Groups of commands that import them when they are called."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from embq.app.cli.sections import no_such_option
from embq.core.extras import missing_extras


class LazyGroup(click.Group):
    """Group of commands in modules of their own.

    Commands that are added in the usual way come first.

    Args:
        later: name -> (module, whose `command` is the command, or module:name for another name in it; line of help).
        unlisted: name -> module, as of `later`; its help is not in the list.
        foreign: name of a command in another tool -> suggestions.
        headings: heading -> the names below it; without them all are below "Commands".
        extras: name -> extras of embq that the command needs; the list says how to install those that are missing.
        default: command that is meant where the first argument is no name of one.
    """

    def __init__(
        self,
        *args: Any,
        later: Mapping[str, tuple[str, str]] | None = None,
        unlisted: Mapping[str, str] | None = None,
        foreign: Mapping[str, list[str]] | None = None,
        headings: Mapping[str, Sequence[str]] | None = None,
        extras: Mapping[str, Sequence[str]] | None = None,
        default: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.later = dict(later or {})
        self.unlisted = dict(unlisted or {})
        self.foreign = dict(foreign or {})
        self.headings = dict(headings or {})
        self.extras = dict(extras or {})
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments as click does, with the default command before those that begin with no name of one."""
        if self.default and args and args[0] not in (*self.list_commands(ctx), *ctx.help_option_names):
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if near and "://" not in args[0] and not os.path.lexists(args[0]):
                raise click.UsageError(f"{args[0]} does not exist. Did you mean the verb {near[0]}?", ctx)
            args = [self.default, *args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise self._behind_the_verb(error, args) or no_such_option(
                error, [name for param in self.get_params(ctx) for name in param.opts]
            ) from None

    def _behind_the_verb(self, error: click.NoSuchOption, args: list[str]) -> click.UsageError | None:
        """The error for an option that stands before the verb that has it; None if no verb does."""
        verb = next((word for word in args if word in (*self.commands, *self.later)), None)
        command = None if verb is None or error.ctx is None else self.get_command(error.ctx, verb)
        if command is None or not any(error.option_name in param.opts for param in command.params):
            return None
        path = error.ctx.command_path if error.ctx is not None else "embq"
        option = error.option_name
        return click.UsageError(f"put {option} behind the verb: {path} {verb} … {option}", error.ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return [*self.commands, *self.later]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None for an unknown one."""
        if cmd_name in self.unlisted:
            return _imported(self.unlisted[cmd_name])
        return _imported(self.later[cmd_name][0]) if cmd_name in self.later else super().get_command(ctx, cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names that begin so, and options and files of the default command; no other command is imported."""
        help_by_name = {name: command.get_short_help_str() for name, command in self.commands.items()}
        help_by_name |= {name: line for name, (_, line) in self.later.items()}
        names = [CompletionItem(name, help=line) for name, line in help_by_name.items() if name.startswith(incomplete)]
        names += click.Command.shell_complete(self, ctx, incomplete)
        if self.default and (command := self.get_command(ctx, self.default)) is not None:
            source = command if incomplete.startswith("-") else command.params[0]
            return [*source.shell_complete(click.Context(command, parent=ctx), incomplete), *names]
        return names

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, with a suggestion for an unknown name."""
        verbs = self.list_commands(ctx)
        if args and args[0] not in (*verbs, *self.unlisted) and not args[0].startswith("-"):
            near = self.foreign.get(args[0]) or difflib.get_close_matches(args[0], verbs, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"there is no verb {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        lines = {name: command.get_short_help_str(100) for name, command in self.commands.items()}
        lines |= {name: line for name, (_, line) in self.later.items()}
        for name in lines.keys() & self.extras.keys():
            if lacking := missing_extras(self.extras[name]):
                lines[name] += f" Needs {lacking}."
        for heading, names in (self.headings or {"Commands": [*lines]}).items():
            with formatter.section(heading):
                formatter.write_dl([(name, lines[name]) for name in names])


def _imported(where: str) -> click.Command:
    """The command at module, or module:name."""
    module, _, name = where.partition(":")
    command: click.Command = getattr(importlib.import_module(module), name or "command")
    return command
