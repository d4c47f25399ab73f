"""`embq run`."""

from __future__ import annotations

from typing import Any

import click

from embq.cli.run_command import RunCommand, inputs_argument
from embq.cli.run_options import run_options
from embq.cli.shared_options import broker_option, json_option, priority_option, quiet_option, worker_options


@click.command(
    "run",
    cls=RunCommand,
    epilog="Examples: embq run photos -o out -m open_clip:ViT-B-32/laion2b_s34b_b79k | "
    "embq run texts.jsonl -o out -m minilm",
)
@inputs_argument
@run_options
@priority_option
@worker_options
@broker_option
@json_option
@quiet_option
def command(inputs: tuple[str, ...], broker: str, as_json: bool, quiet: bool, **options: Any) -> int:
    """Embed INPUT on all devices of this machine, and write the rows to a folder.

    INPUT is a webdataset .tar, a folder of images, or a .parquet, .arrow, .h5, .csv, .jsonl or .txt file; globs and
    {000000..000099} are expanded. After Ctrl-C, `embq resume` or the same command continues the run.
    """
    from core.storage.paths import place
    from embq.cli.precision import precision_of_output, resolve_precision
    from embq.cli.run_options import request_from
    from embq.local.session import own_devices, print_summary, run_locally
    from producer.enqueue import prepare

    request, reason = resolve_precision(
        request_from(inputs, options), there=precision_of_output, devices=lambda: own_devices(options["devices"])
    )
    planned = prepare(request)
    if reason and not (quiet or as_json):
        click.echo(reason, err=True)
    for warning in planned.warnings:
        click.echo(f"warning: {warning}", err=True)
    root = place(options["output"])
    outcome = run_locally(planned.info, root, options, broker=broker, quiet=quiet or as_json, inputs=inputs)
    return print_summary(outcome, root, as_json=as_json)
