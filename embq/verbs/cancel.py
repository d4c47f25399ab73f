"""`embq cancel`."""

from __future__ import annotations

import click

from embq.cli.shared_options import broker_option, json_option


@click.command("cancel", epilog="Examples: embq cancel out | embq cancel 965db513790b38d9")
@click.argument("run")
@broker_option
@json_option
def command(run: str, broker: str, as_json: bool) -> None:
    """Cancel RUN: a run id or its output folder. Units in flight are dropped; committed rows stay.

    `embq resume` continues a cancelled run.
    """
    from embq.status.run_control import control_run

    result = control_run(run, broker, "cancelled")
    over = result.state == "done"
    cancelled = f"is cancelled: {result.how_far} and stay"
    result.print("is done; there is nothing to cancel" if over else cancelled, as_json=as_json)
