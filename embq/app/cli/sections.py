"""Sections of a verb's options in its help."""

from __future__ import annotations

from typing import Any

import click

from embq.core.settings import change_environment
from embq.sources.reader_options import DECLARED

SECTIONS: dict[str, tuple[str, ...]] = {
    "Query": ("--image", "--vector", "--id", "--like", "--unlike", "--where", "-k", "--offset", "--index"),
    "Output": (
        "--output",
        "--add",
        "--keep-going",
        "--output-format",
        "--to",
        "--table",
        "--write-batch-size",
        "--sorted",
        "--rows-per-file",
        "--columns",
        "--ids",
        "--without",
        "--shards",
        "--index-path",
        "--overwrite",
        "--samples-per-shard",
        "--no-shuffle",
        "--no-metadata",
        "--write-sizes",
    ),
    "Model": (
        "--model",
        "--start",
        "--image-size",
        "--prompt-name",
        "--prompt",
        "--modality",
        "--embeddings",
        "--token-ids",
        "--precision",
        "--decode",
        "--no-model",
    ),
    "Vectors": ("--vector-name", "--dtype", "--truncate-dim", "--normalize", "--int8-range", "--similarity"),
    "Inputs": (
        "--input-format",
        "--file-format",
        "--embedding-column-name",
        "--id-columns",
        "--drop-invalid",
        *(one.flag for one in DECLARED),
        "--chunk-tokens",
        "--chunk-overlap",
        "--late-chunking",
        "--unit-size",
        "--texts",
        "--classes",
        "--no-classes",
        "--validation",
        "--epoch-samples",
    ),
    "Selection": ("--include", "--exclude", "--sample", "--limit", "--samples", "--code", "--unit", "--older-than"),
    "Index": (
        "--recall",
        "--max-index-memory-usage",
        "--max-index-query-time-ms",
        "--metric-type",
        "--index-key",
        "--nb-indices-to-keep",
        "--min-nearest-neighbors-to-retrieve",
        "--threshold",
        "--method",
        "--nprobe",
        "--refine",
        "--no-refine",
        "--queries",
    ),
    "Changes": ("--delete", "--delete-from", "--delete-ids", "--compact", "--rebuild"),
    "Training": (
        "--epochs",
        "--lr",
        "--momentum",
        "--weight-decay",
        "--warmup-steps",
        "--label-smoothing",
        "--clip",
        "--shuffle-buffer",
        "--splitshards",
        "--resampled",
        "--exact",
        "--grad-checkpointing",
        "--torchcompile",
        "--checkpoint-minutes",
        "--max-failures",
    ),
    "Machines": (
        "--device",
        "--num-devices",
        "--nodes",
        "--launcher",
        "--hosts",
        "--ray-address",
        "--rendezvous",
        "--ssh-command",
        "--remote-python",
        "--remote-folder",
        "--max-restarts",
        "--cpus",
        "--no-set-device-rank",
    ),
    "Workers": (
        "--devices",
        "--workers",
        "--threads",
        "--batch-size",
        "--current-memory-available",
        "--memory",
        "--prefetch",
        "--transport",
        "--drain-timeout",
    ),
    "Measurement": (
        "--counts",
        "--sizes",
        "--records",
        "--seconds",
        "--replicates",
        "--corpus-size",
        "--scaling",
        "--gpu",
    ),
    "Server": (
        "--name",
        "--host",
        "--port",
        "--follow",
        "--fetch-image-urls",
        "--allow-origin",
        "--allow-host",
        "--allow-actions",
        "--open",
        "--no-serve",
        "--url",
    ),
    "Users and certificates": ("--user", "--remove", "--days", "--owner", "--give"),
    "Checks": ("--quick", "--layout", "--check", "--load", "--allow-missing", "--allow-empty"),
    "Services": ("--broker", "--run", "--takeover", "--metrics", "--priority", "--upload", "--inline"),
    "General": (
        "--seed",
        "--dry-run",
        "--watch",
        "-f",
        "--service",
        "-n",
        "--log",
        "--log-every",
        "--log-keys",
        "--json",
        "--quiet",
        "--verbose",
        "--no-color",
        "--help",
    ),
}
"""Headings of the help -> first names of the options below them."""


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


class SectionedCommand(click.Command):
    """A verb, with the options in its help by section, and --no-color."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters of the verb, --no-color and --help."""
        *own, help_option = super().get_params(ctx)
        return [*own, NO_COLOR, help_option]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options by section."""
        left = {
            name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
            for name in [next(one for one in ("--help", param.opts[0]) if one in param.opts)]
        }
        for heading, names in SECTIONS.items():
            if rows := [left.pop(name) for name in names if name in left]:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        if left:
            with formatter.section("Other options"):
                formatter.write_dl(list(left.values()))
