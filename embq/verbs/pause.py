"""`embq pause`: let a run rest."""

from __future__ import annotations

import json

import click

from embq.cli.options import broker_option, json_option


@click.command("pause", epilog="Examples: embq pause out | embq pause 965db513790b38d9")
@click.argument("run")
@broker_option
@json_option
def command(run: str, broker: str, as_json: bool) -> None:
    """Let RUN rest: a run id or its output folder. Begun units are finished, and no other is begun.

    It rests until `embq resume`, whatever is restarted meanwhile.
    """
    from embq.status.run_control import ask, find, warn_unless_noted

    asked = ask(*find(run, broker), {"state": "paused"})
    if as_json:
        click.echo(json.dumps(asked.to_json()))
    elif asked.state == "done":
        click.echo(f"run {asked.record.run} is done; there is nothing to pause")
    else:
        click.echo(f"run {asked.record.run} is paused: {asked.how_far}; go on with: embq resume {run}")
        warn_unless_noted(asked)
