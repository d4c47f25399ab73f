"""`embq pause`."""

from __future__ import annotations

import click

from embq.cli.shared_options import broker_option, json_option


@click.command("pause", epilog="Examples: embq pause out | embq pause 965db513790b38d9")
@click.argument("run")
@broker_option
@json_option
def command(run: str, broker: str, as_json: bool) -> None:
    """Pause RUN: a run id or its output folder. Units in flight are finished, no other is started.

    The run stays paused until `embq resume`, also when services are restarted.
    """
    from embq.status.run_control import control_run

    result = control_run(run, broker, "paused")
    over = result.state == "done"
    paused = f"is paused: {result.how_far}; go on with: embq resume {run}"
    result.print("is done; there is nothing to pause" if over else paused, as_json=as_json)
