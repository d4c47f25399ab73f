"""Command class of `embq run` and `embq enqueue`: options of clip-retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from embq.app.cli.clip_retrieval import (
    DEFAULT_MODEL,
    INPUTS,
    SECOND_NAMES,
    apply_switches,
    drop_keys_of_shards,
    hidden_options,
    hyphens,
    is_foreign,
    location,
)
from embq.app.cli.sections import SectionedCommand


class InputsArgument(click.Argument):
    """INPUT..., to which values of `--input-dataset` belong."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """The inputs of both, `--input-dataset` first."""
        value, source = super().consume_value(ctx, opts)
        named = (*ctx.meta.get(INPUTS, ()), *(value if isinstance(value, (tuple, list)) else ()))
        return (tuple(map(location, named)) if named else value), source


inputs_argument = click.argument(
    "inputs", cls=InputsArgument, type=click.Path(readable=False), nargs=-1, required=True, metavar="INPUT..."
)


class RunCommand(SectionedCommand):
    """A verb that makes a run: either spelling of options, and names of clip-retrieval."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.context_settings["token_normalize_func"] = hyphens
        own = {option.opts[0]: option for option in self.params if isinstance(option, click.Option)}
        for name, second in SECOND_NAMES.items():
            if name in own:
                own[name].opts.append(second)
        self.params += hidden_options()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, and apply the switches of clip-retrieval."""
        foreign = is_foreign(args)
        if foreign:
            ctx.default_map = {"model": [DEFAULT_MODEL], **(ctx.default_map or {})}
        rest = super().parse_args(ctx, list(args))
        apply_switches(ctx, foreign=foreign)
        drop_keys_of_shards(ctx, args)
        return rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, and a line about clip-retrieval."""
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(
                "The options of `clip-retrieval inference` (--input_dataset, --output_folder, --clip_model, ...) are "
                "accepted as well."
            )
