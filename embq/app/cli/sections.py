"""Options of verbs, and the sections of the help in which they stand."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from embq.core.settings import change_environment, check_settings

F = TypeVar("F", bound=Callable[..., Any])

GENERAL = "General"
"""The last section, of options that stand in no other."""


class Option(click.Option):
    """An option whose help shows a default that it has, unless the help text names one in brackets; numbers are N."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        shown = str(settings.get("default")) not in ("", "None", "False") and "  [" not in settings.get("help", "")
        super().__init__(*args, **{"show_default": shown, **settings})
        if isinstance(self.type, click.types.IntParamType):
            self.metavar = self.metavar or "N"


option = partial(click.option, cls=Option)
"""`click.option` of an `Option`."""


def section(heading: str) -> Callable[[F], F]:
    """Decorator: the options below it, down to the next one, stand under this heading of the help."""

    def decorate(function: F) -> F:
        for parameter in getattr(function, "__click_params__", ()):
            vars(parameter).setdefault("section", heading)
        return function

    return decorate


def _no_color(_context: click.Context, _option: click.Parameter, given: Any) -> None:
    if given:
        change_environment({"NO_COLOR": "1"})


NO_COLOR = click.Option(
    ["--no-color"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_no_color,
    help="Print without colors, as with NO_COLOR=1.",
)
"""--no-color, before or behind the verb."""


FOREIGN_OPTIONS = {
    **dict.fromkeys(("--gpu", "--gpus", "--num-gpus", "--num_gpus", "--tensor-parallel-size"), "--devices"),
    **dict.fromkeys(("--out", "--output-folder", "--output_folder", "--output-dir"), "--output"),
    **dict.fromkeys(("--num-threads", "--prepare-threads", "--decode-threads", "--nb-cores"), "--threads"),
    **dict.fromkeys(("--num-workers", "--num-proc", "--processes"), "--workers"),
    **dict.fromkeys(("--model-name", "--model_name", "--model-id", "--clip-model", "--clip_model"), "--model"),
    **dict.fromkeys(("--limit", "--top-k", "--top_k", "--topk", "--num-results", "--num_results", "-n"), "-k|--limit"),
    "--format": "--output-format|--to|--json",
}
"""Option of another tool -> ours, separated by "|", of which the first is suggested that a verb has."""

INSTEAD = {
    **dict.fromkeys(("--overwrite", "--force"), "Nothing is overwritten: remove the folder first, or name another."),
    "--resume": "`embq resume OUT` or the same command continues a run.",
}
"""Option of another tool -> what to do, as no verb has one like it."""


def no_such_option(error: click.NoSuchOption, names: Sequence[str]) -> click.NoSuchOption:
    """The error for an option that a verb does not have, with that of its `names` that was meant, if one is near."""
    unknown = error.option_name
    ours = [name for name in FOREIGN_OPTIONS.get(unknown, "").split("|") if name in names]
    spelt = {name.lstrip("-").replace("_", "-"): name for name in names}  # hyphens at the start make all alike
    word = unknown.lstrip("-").replace("_", "-")
    beginnings = [name for name in spelt if len(name) > 2 and (f"{word}-").startswith(f"{name}-")]
    near = (
        [spelt[close] for close in beginnings or difflib.get_close_matches(word, spelt, 1, 0.7)]
        if len(word) > 2
        else []
    )
    hint = f" Did you mean {(ours or near)[0]!r}?" if ours or near else ""
    hint = f" {INSTEAD[unknown]}" if unknown in INSTEAD and not ours else hint
    return click.NoSuchOption(unknown, f"No such option {unknown!r}.{hint}", ctx=error.ctx)


SAME_OPTIONS = {"--device": "--devices", "--devices": "--device", "--index": "--name", "--index-name": "--name"}
"""Earlier name of an option, or that of another verb -> the name in the verbs that do not have the former."""

HELP_ALL = "--help-all"


def _help_all(context: click.Context, _option: click.Parameter, given: Any) -> None:
    if given:
        context.meta[HELP_ALL] = True
        click.echo(context.get_help())
        context.exit()


def _is_empty(value: object, args: Sequence[str]) -> bool:
    """True if a path, or one of several, was given as an empty argument; pathlib makes it the current folder."""
    texts = map(str, value if isinstance(value, tuple) else (value,))
    has_empty = any(argument == "" or argument.endswith("=") for argument in args)
    return has_empty and any(text == "" or (text == "." and "." not in args) for text in texts)


_HELP_ALL = click.Option(
    [HELP_ALL], is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Show all options and exit."
)
HELPS = ("--help", HELP_ALL)
_KINDS_OF_NUMBER = {
    "integer range": "a whole number",
    "integer": "a whole number",
    "float range": "a number",
    "float": "a number",
}
"""Click's name of a type -> ours."""


class SectionedCommand(click.Command):
    """A verb, with the options in its help by `section`, and --no-color.

    Args:
        first: names of the options that --help shows; --help-all shows the others as well. Empty for all.
    """

    def __init__(self, *args: Any, first: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._first = first

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments as click does, take other names of options, and name ours for those of other tools."""
        own = {name for param in self.params for name in param.opts}
        end = args.index("--") if "--" in args else len(args)
        for place, argument in enumerate(args[:end]):
            name, is_with_value, value = argument.partition("=")
            if name not in own and SAME_OPTIONS.get(name) in own:
                args = [*args[:place], f"{SAME_OPTIONS[name]}{is_with_value}{value}", *args[place + 1 :]]
        typed = tuple(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            message = error.message
            for theirs, ours in _KINDS_OF_NUMBER.items():
                message = message.replace(f"is not a valid {theirs}", f"is not {ours}")
            if message == error.message:
                raise
            raise click.BadParameter(message, error.ctx, error.param, error.param_hint) from None
        except click.NoSuchOption as error:
            names = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
            raise no_such_option(error, [name for name in names if name.startswith("-")]) from None
        for param in self.params:
            is_typed = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
            if is_typed and isinstance(param.type, click.Path) and _is_empty(ctx.params.get(param.name or ""), typed):
                why = "it is empty, and would be the current folder: check the variable that holds it, or write ."
                raise click.BadParameter(why, ctx, param)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, if every setting of the environment has a value that can be used."""
        check_settings()
        return super().invoke(ctx)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters of the verb, --no-color, --help and --help-all."""
        *own, help_option = super().get_params(ctx)
        return [*own, NO_COLOR, help_option, *([_HELP_ALL] if self._first else [])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options by section, in the order in which they are declared."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            is_left_out = self._first and HELP_ALL not in ctx.meta and not {*self._first, *HELPS} & {*param.opts}
            if is_left_out or not isinstance(param, click.Option):
                continue
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(vars(param).get("section", GENERAL), []).append(record)
        general = sections.pop(GENERAL)
        for heading, rows in [*sections.items(), (GENERAL if sections else "Options", general)]:
            with formatter.section(heading):
                formatter.write_dl(rows)
