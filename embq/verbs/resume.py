"""`embq resume`: go on with a run from its output folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from embq.options import broker_option, json_option, settings_with, worker_options


@click.command("resume", epilog="Example: embq resume out")
@click.argument("output", type=click.Path(path_type=Path))
@worker_options
@broker_option
@json_option
@click.option("--quiet", "-q", is_flag=True, help="No progress, only the account at the end.")
def command(output: Path, broker: str, as_json: bool, quiet: bool, **options: Any) -> int:
    """Go on with the run in OUTPUT, whatever has become of the broker: the folder says what is left to do.

    Without a broker, the work is done on this machine. With --broker (or EMBQ_BROKER_URL) the run is handed to the
    resident producer, writer and workers of that broker again, and this command returns.
    """
    from core.layout import load_run
    from embq.local import account, work

    root = output.absolute()
    info = load_run(root)
    url = settings_with(broker).broker_url
    if not url:
        outcome = work(info, root, options, broker="", quiet=quiet or as_json)
        return account(outcome, root, as_json=as_json)

    from core.broker import check, connect
    from core.commits import CommitLog
    from core.layout import Layout
    from producer.enqueue import hand_over

    client = connect(url, password=settings_with(broker).broker_password)
    check(client, url)
    done = CommitLog(Layout(root)).replay(info.units).count
    hand_over(client, info, root)
    click.echo(f"run {info.run}: {done:,} of {info.units:,} units are done; the rest is handed to the workers again")
    return 0
