"""The command class of `embq run` and `embq enqueue`: options in sections, also under clip-retrieval's names."""

from __future__ import annotations

import click

from core.errors import UsageError
from embq.cli.clip_retrieval import OPENAI_MODELS, translate
from sources.options import DECLARED

SECTIONS: dict[str, tuple[str, ...]] = {
    "The run": (
        "output",
        "model",
        "prompt",
        "prompt_text",
        "modality",
        "precision",
        "decode",
        "output_format",
        "write_batch_size",
    ),
    "What is stored of a vector": ("dtype", "truncate_dim", "normalize", "int8_range", "similarity"),
    "How inputs are read": (
        "input_format",
        *(one.parameter for one in DECLARED),
        "chunk_tokens",
        "chunk_overlap",
        "unit_size",
    ),
    "A part of the inputs": ("include", "exclude", "sample", "limit"),
    "This machine": (
        "devices",
        "workers_per_device",
        "batch_size",
        "prepare_threads",
        "prefetch",
        "transport",
        "drain_timeout",
    ),
    "Services and reports": ("broker", "priority", "upload", "inline", "dry_run", "as_json", "quiet"),
}
"""Headings of the help, in order -> parameters below them."""


class RunCommand(click.Command):
    """A verb that makes a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it, after clip-retrieval's names have become embq's."""
        options = {
            name: not param.is_flag
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
        }
        translated = translate(args, options)
        for note in translated.notes:
            click.echo(f"note: {note}", err=True)
        try:
            return super().parse_args(ctx, translated.arguments)
        except click.MissingParameter as error:
            if translated.foreign and error.param is not None and error.param.name == "model":
                raise UsageError(
                    "no model is named",
                    next_step=f"clip-retrieval's default is ViT-B/32: --model {OPENAI_MODELS['ViT-B/32']}",
                ) from error
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options by sections; what stands in none comes last."""
        left = {
            param.name or "": record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
        }
        for heading, names in SECTIONS.items():
            if rows := [left.pop(name) for name in names if name in left]:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        if left:
            with formatter.section("Other options"):
                formatter.write_dl(list(left.values()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, and the one line about names of another tool."""
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(
                "The options of `clip-retrieval inference` (--input_dataset, --output_folder, --clip_model, ...) are "
                "understood as well."
            )
