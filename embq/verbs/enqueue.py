"""`embq enqueue`: plan a run, write its manifest, and tell the resident services."""

from __future__ import annotations

import json
from pathlib import Path

import click

from embq.options import broker_option, json_option, required_url, run_options, settings_with
from embq.request import request_from


@click.command("enqueue", epilog="Example: embq enqueue 'shards/{00..99}.tar' -o out -m open_clip:ViT-B-32/openai")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@run_options
@broker_option
@json_option
def command(inputs: tuple[str, ...], broker: str, as_json: bool, **options: object) -> None:
    """Plan a run and hand it to resident workers. The same command again adds nothing.

    INPUT is a webdataset .tar, a folder of images, a .jsonl or .txt file; globs and {000000..000099} are expanded.
    """
    from core.broker import check, connect
    from core.commits import CommitLog
    from core.layout import Layout
    from producer.enqueue import hand_over, prepare

    settings = settings_with(broker)
    url = required_url(settings)
    client = connect(url, password=settings.broker_password)
    check(client, url)
    request = request_from(inputs, options)
    planned = prepare(request)
    info = planned.info
    output = Path(request.output).absolute()
    hand_over(client, info, output)
    for warning in planned.warnings:
        click.echo(f"warning: {warning}", err=True)
    done = 0 if planned.new else CommitLog(Layout(output)).replay(info.units).count
    if as_json:
        click.echo(json.dumps({"schema": 1, "run": info.run, "new": planned.new, "units": info.units, "done": done}))
    elif planned.new:
        samples = f", {info.samples:,} samples" if info.samples is not None else ""
        click.echo(f"run {info.run}: {info.units:,} units{samples} enqueued for {info.model.spec}")
        click.echo(f"watch it with: embq status {output} --watch", err=True)
    else:
        click.echo(f"run {info.run} is already enqueued: {done:,} of {info.units:,} units are done; nothing was added")
