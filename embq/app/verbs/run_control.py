"""`embq pause`, `embq resume`, `embq cancel` and `embq retry`: acts on runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import SectionedCommand, option
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
    from embq.producer.retry import RetryResult


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
    from embq.core.run import checkpoint
    from embq.core.run.control import RunState
    from embq.core.run.layout import Layout
    from embq.producer.announce import hand_over, record_of

    client = authorized_client(settings, "resume")
    done = checkpoint.current(Layout(root), info.units).count
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


@click.command(
    "retry", cls=SectionedCommand, epilog="Examples: embq retry out | embq retry out --code truncated --dry-run"
)
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@option("--code", "codes", multiple=True, metavar="CODE", help="Only failures with this code; repeatable.")
@option("--unit", "units", multiple=True, metavar="ID", help="Only failures of this unit; repeatable.")
@option("--dry-run", is_flag=True, help="Print what would be retried, and do nothing.")
@worker_options
@broker_option
@json_option
@quiet_option
@verbose_option
def retry(
    output: str,
    codes: tuple[str, ...],
    units: tuple[str, ...],
    dry_run: bool,
    broker: str,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Retry the failed samples of OUT, after the cause is fixed in the inputs.

    Nothing else is read or computed again. A new row replaces its failure; a sample that fails again has one more
    attempt. With --broker (or EMBQ_BROKER_URL) the work is handed to the resident services of that broker, and this
    command returns.
    """
    import embq
    from embq.app.local.session import print_summary, run_locally
    from embq.producer.retry import FailureFilter, preview, retry

    root = place(output)
    chosen = FailureFilter(codes=codes, units=units)
    retried = preview(root, chosen) if dry_run else retry(root, chosen, version=embq.__version__)
    for line in (*notes(retried), *_unknown_codes(retried, codes)):
        click.echo(line, err=True)
    to_do = bool(retried.units or retried.under_way) and not dry_run
    url = settings_with(broker).broker_url
    if not to_do or url or _at_work(root):
        if to_do and url:
            _hand_over_retry(retried, root, broker)
        elif to_do:
            click.echo(f"the process that is at work on {root} does them", err=True)
        if as_json:
            click.echo(json.dumps(to_json(retried)))
        return 0
    outcome = run_locally(retried.info, root, options, broker="", quiet=quiet or as_json)
    return print_summary(outcome, root, as_json=as_json)


def _at_work(root: Place) -> bool:
    """True if an `embq run` of this machine works on the output; its writer finds the added units."""
    from embq.core.broker.embedded import kept_off
    from embq.core.run.layout import Layout

    with kept_off(Layout(root).broker) as is_exclusive:
        return not is_exclusive


def _hand_over_retry(retried: RetryResult, root: Place, broker: str) -> None:
    from embq.app.cli.authorization import authorized_client
    from embq.producer.announce import hand_over

    hand_over(authorized_client(settings_with(broker), "retry"), retried.info, root)
    click.echo(f"run {retried.info.run}: handed to the workers", err=True)


def notes(retried: RetryResult) -> list[str]:
    """Lines on what is retried, by code, most frequent first, and what is left out."""
    from embq.core.redaction import printable
    from embq.producer.additions import FirstNames

    counts = [(count, printable(code), "sample") for code, count in retried.samples.items()]
    counts += [(count, printable(code), "whole unit") for code, count in retried.whole_units.items()]
    width = max((len(code) for _, code, _ in counts), default=0)
    lines = [f"{count:>12,}  {code:<{width}}  {_plural(count, what)}" for count, code, what in sorted(counts)[::-1]]
    if retried.failures:
        again = f"{retried.failures:,} {_plural(retried.failures, 'failure')}"
        lines.append(f"to do again: {again}, in {retried.units:,} {_plural(retried.units, 'unit')}")
    else:
        lines.append("nothing to retry" + (" that is not under way" if retried.under_way else ""))
    if retried.under_way:
        lines.append(f"under way already: {retried.under_way:,} {_plural(retried.under_way, 'failure')}")
    if retried.missing:
        lines.append(f"left out, not there any more: {printable(str(FirstNames(retried.missing)))}")
    if retried.chunks:
        lines.append(
            f"left out: {retried.chunks:,} {_plural(retried.chunks, 'failure')} of single chunks, whose texts have "
            "rows that stay; make a new run of these texts"
        )
    return lines


def _unknown_codes(retried: RetryResult, codes: Sequence[str]) -> list[str]:
    """Return a line on those of the chosen codes that no failure has, with the codes that there are."""
    from embq.core.redaction import printable

    unknown = [code for code in codes if code not in retried.standing]
    if not unknown:
        return []
    standing = ", ".join(f"{printable(code)} ({count:,})" for code, count in retried.standing.most_common(20)) or "none"
    return [f"no failure has the code {' or '.join(unknown)}; codes of the failures that stand: {standing}"]


def _plural(count: int, what: str) -> str:
    return what if count == 1 else f"{what}s"


def to_json(retried: RetryResult) -> dict[str, Any]:
    """The shape that `embq retry --dry-run --json` promises."""
    return {
        "schema": 1,
        "run": retried.info.run,
        "failures": retried.failures,
        "units": retried.units,
        "samples": dict(sorted(retried.samples.items())),
        "whole_units": dict(sorted(retried.whole_units.items())),
        "under_way": retried.under_way,
        "chunks_left_out": retried.chunks,
        "gone": list(retried.missing),
    }
