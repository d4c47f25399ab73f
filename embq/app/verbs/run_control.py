"""`embq pause`, `embq resume` and `embq cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import SectionedCommand
from embq.app.cli.shared_options import (
    broker_option,
    json_option,
    log_option,
    quiet_option,
    settings_with,
    verbose_option,
    worker_options,
)
from embq.core.errors import UsageError, command_line
from embq.core.storage.paths import is_folder, place

if TYPE_CHECKING:
    from embq.core.run.run_info import RunInfo
    from embq.core.settings import Settings
    from embq.core.storage.paths import Place


@click.command("pause", cls=SectionedCommand, epilog="Examples: embq pause out | embq pause 965db513790b38d9")
@click.argument("run", type=click.Path(readable=False))
@broker_option
@json_option
def pause(run: str, broker: str, as_json: bool) -> None:
    """Pause RUN: a run id or its output folder. Units in flight are finished, no other is started.

    The run stays paused until `embq resume`, also when services are restarted.
    """
    from embq.app.status.run_control import control_run

    result = control_run(run, broker, "pause")
    sentence = f"is paused: {result.how_far}; go on with: {command_line('resume', run)}"
    result.print("pause", sentence, as_json=as_json)


@click.command("resume", cls=SectionedCommand, epilog="Examples: embq resume out | embq resume 965db513790b38d9")
@click.argument("run", type=click.Path(readable=False))
@worker_options
@broker_option
@log_option
@json_option
@quiet_option
@verbose_option
def resume(run: str, broker: str, as_json: bool, quiet: bool, **options: Any) -> int:
    """Continue RUN: its output folder, or its id if a broker knows it. The folder tells what is left to do.

    Without a broker, the work is done on this machine, with the devices, workers and other options of workers that the
    run was started with, unless others are given; a paused `embq run` there continues. With --broker (or
    EMBQ_BROKER_URL) the run is handed to the resident producer, writer and workers of that broker again, and this
    command returns.
    """
    from embq.app.status.run_control import control_run

    settings = settings_with(broker)
    in_folder = is_folder(run) or not settings.broker_url
    if in_folder:
        from embq.core.run.run_info import load_run

        root = place(run)
        info = load_run(root)
        if settings.broker_url:
            _refuse_log(run, options["log"])
            return _hand_over(info, root, settings, as_json=as_json)
        if not _is_paused(info.run, root):
            from embq.app.local.session import print_summary, run_locally

            outcome = run_locally(info, root, options, broker="", quiet=quiet or as_json, resumed=True)
            return print_summary(outcome, root, as_json=as_json)
    _refuse_log(run, options["log"])
    result = control_run(run, broker, "resume")
    result.print("resume", f"goes on: {result.how_far}", as_json=as_json)
    return 0


def _refuse_log(run: str, targets: tuple[str, ...]) -> None:
    if targets:
        raise UsageError(
            "--log is for a run that goes on in this command, and this one goes on elsewhere",
            next_step=f"leave it out, then: {command_line('status', run, '--watch', '--log', targets[0])}",
        )


def _hand_over(info: RunInfo, root: Place, settings: Settings, *, as_json: bool) -> int:
    """Announce the run of a folder to the services of a broker."""
    from embq.app.cli.authorization import authorized_client
    from embq.app.status.run_control import ControlResult
    from embq.core.run.commit_log import CommitLog
    from embq.core.run.control import RunState
    from embq.core.run.layout import Layout
    from embq.producer.announce import hand_over, record_of

    client = authorized_client(settings, "resume")
    done = CommitLog(Layout(root)).replay(info.units).count
    hand_over(client, info, root, {"state": RunState.RUNNING})
    result = ControlResult(record_of(info, root), RunState.RUNNING, False, done)
    result.print("resume", f"is handed to the workers again: {result.how_far}", as_json=as_json, warn=False)
    return 0


def _is_paused(run: str, root: Place) -> bool:
    """True if an `embq run` is at work on the folder, and its run is paused."""
    from redis.exceptions import RedisError

    from embq.core.broker.client import connect
    from embq.core.broker.embedded import EmbeddedServer
    from embq.core.queue.ledger import Ledger
    from embq.core.run.control import RunState
    from embq.core.run.layout import Layout

    url = EmbeddedServer.find(Layout(root).broker)
    if not url:
        return False
    try:
        with connect(url) as client:
            return Ledger(client, run).meta().get("state") == RunState.PAUSED
    except RedisError:
        return False


@click.command("cancel", cls=SectionedCommand, epilog="Examples: embq cancel out | embq cancel 965db513790b38d9")
@click.argument("run", type=click.Path(readable=False))
@broker_option
@json_option
def cancel(run: str, broker: str, as_json: bool) -> None:
    """Cancel RUN: a run id or its output folder. Units in flight are dropped; committed rows stay.

    `embq resume` continues a cancelled run.
    """
    from embq.app.status.run_control import control_run

    result = control_run(run, broker, "cancel")
    result.print("cancel", f"is cancelled: {result.how_far} and stay", as_json=as_json)
