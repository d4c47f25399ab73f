"""`embq cancel`: stop a run."""

from __future__ import annotations

import json

import click

from embq.cli.options import broker_option, json_option


@click.command("cancel", epilog="Examples: embq cancel out | embq cancel 965db513790b38d9")
@click.argument("run")
@broker_option
@json_option
def command(run: str, broker: str, as_json: bool) -> None:
    """Stop RUN: a run id or its output folder. Begun units are dropped; what is committed stays.

    `embq resume` goes on with it, should you change your mind.
    """
    from embq.status.run_control import ask, find, warn_unless_noted

    asked = ask(*find(run, broker), {"state": "cancelled"})
    if as_json:
        click.echo(json.dumps(asked.to_json()))
    elif asked.state == "done":
        click.echo(f"run {asked.record.run} is done; there is nothing to cancel")
    else:
        click.echo(f"run {asked.record.run} is cancelled: {asked.how_far} and stay")
        warn_unless_noted(asked)
