"""The options of a machine that works: on which devices, with how many processes and threads, and how it ends."""

from __future__ import annotations

import click

from embq.options import batch_size_option, devices_option, prepare_threads_option, stacked

worker_options = stacked(
    devices_option,
    click.option(
        "--workers-per-device",
        type=click.IntRange(min=0, max=64),
        default=0,
        metavar="N",
        help="Processes on each device, each with a model of its own.  [on a GPU by cores and memory, else 1]",
    ),
    batch_size_option,
    prepare_threads_option,
    click.option(
        "--prefetch",
        type=click.IntRange(min=1, max=64),
        default=2,
        metavar="N",
        show_default=True,
        help="Remote shards fetched before their turn.",
    ),
    click.option(
        "--transport",
        type=click.Choice(["auto", "payload", "staging"]),
        default="auto",
        show_default=True,
        help="How results reach the writer: through the broker, or as files where storage is shared.",
    ),
    click.option(
        "--drain-timeout",
        type=click.FloatRange(min=0),
        default=150.0,
        metavar="SECONDS",
        show_default=True,
        help="To finish begun units in, after a stop was asked for.",
    ),
)
"""What decides how this machine works: never part of a run."""
