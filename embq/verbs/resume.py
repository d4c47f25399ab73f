"""`embq resume`: go on with a run from its output folder alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from core.storage.paths import is_folder, place
from embq.cli.options import broker_option, json_option, settings_with, worker_options

if TYPE_CHECKING:
    from core.run.run_info import RunInfo
    from core.storage.paths import Place

RUNNING = {"state": "running"}


@click.command("resume", epilog="Examples: embq resume out | embq resume 965db513790b38d9")
@click.argument("run")
@worker_options
@broker_option
@json_option
@click.option("--quiet", "-q", is_flag=True, help="No progress, only the account at the end.")
def command(run: str, broker: str, as_json: bool, quiet: bool, **options: Any) -> int:
    """Go on with RUN: its output folder, or its id where a broker knows it. The folder says what is left to do.

    Without a broker, the work is done on this machine; where an `embq run` rests there, it goes on. With --broker (or
    EMBQ_BROKER_URL) the run is handed to the resident producer, writer and workers of that broker again, and this
    command returns.
    """
    url = settings_with(broker).broker_url
    if not is_folder(run) and url:
        return _go_on(run, broker, as_json=as_json)

    from core.run.run_info import load_run

    root = place(run)
    info = load_run(root)
    if url:
        return _hand_over(info, root, broker, as_json=as_json)
    if _rests(info.run, root):
        return _go_on(run, "", as_json=as_json)

    from embq.local.session import print_summary, run_locally

    outcome = run_locally(info, root, options, broker="", quiet=quiet or as_json)
    return print_summary(outcome, root, as_json=as_json)


def _go_on(run: str, broker: str, *, as_json: bool) -> int:
    from embq.status.run_control import ask, find, warn_unless_noted

    asked = ask(*find(run, broker), RUNNING)
    if as_json:
        click.echo(json.dumps(asked.to_json()))
    else:
        click.echo(f"run {asked.record.run} goes on: {asked.how_far}")
        warn_unless_noted(asked)
    return 0


def _hand_over(info: RunInfo, root: Place, broker: str, *, as_json: bool) -> int:
    from core.broker.client import check, connect
    from core.run.commit_log import CommitLog
    from core.run.layout import Layout
    from embq.cli.authorization import require
    from producer.announce import hand_over

    settings = settings_with(broker)
    client = connect(settings.broker_url, password=settings.broker_password)
    check(client, settings.broker_url)
    require(client, "resume")
    done = CommitLog(Layout(root)).replay(info.units).count
    hand_over(client, info, root, RUNNING)
    if as_json:
        units = {"done": done, "total": info.units}
        click.echo(json.dumps({"schema": 1, "run": info.run, "state": "running", "noted": False, "units": units}))
    else:
        click.echo(
            f"run {info.run}: {done:,} of {info.units:,} units are done; the rest is handed to the workers again"
        )
    return 0


def _rests(run: str, root: Place) -> bool:
    """Whether an `embq run` is at work on the folder that was paused."""
    from redis.exceptions import RedisError

    from core.broker.client import connect
    from core.broker.embedded import EmbeddedServer
    from core.queue.ledger import Ledger
    from core.run.layout import Layout

    url = EmbeddedServer.find(Layout(root).broker)
    if not url:
        return False
    try:
        with connect(url) as client:
            return Ledger(client, run).meta().get("state") == "paused"
    except RedisError:
        return False
