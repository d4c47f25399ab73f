"""`embq failures` and `embq retry`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import (
    broker_option,
    json_option,
    quiet_option,
    settings_with,
    verbose_option,
    worker_options,
)

if TYPE_CHECKING:
    from embq.core.storage.paths import Place
    from embq.producer.retry import RetryResult


@click.command("failures", cls=SectionedCommand, epilog="Example: embq failures ./out")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@json_option
def failures(output: str, as_json: bool) -> int:
    """List the samples of OUT without an embedding, grouped by cause, most frequent first.

    Failures are listed once committed, and of a retried sample the last one. A unit that failed as a whole counts
    once.
    """
    from embq.app.status.failure_causes import cause_lines, described, grouped
    from embq.core.storage.paths import place

    root = place(output)
    groups = described(root, grouped(root))
    if as_json:
        click.echo(json.dumps({"schema": 1, "groups": groups}))
        return 0
    if not groups:
        click.echo("no failures")
    width = max((len(group["code"]) for group in groups), default=0)
    for group in groups:
        click.echo("\n".join(cause_lines(group, width)))
    return 0


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
    from embq.core.storage.paths import place
    from embq.producer.retry import FailureFilter, preview, retry

    root = place(output)
    chosen = FailureFilter(codes=codes, units=units)
    retried = preview(root, chosen) if dry_run else retry(root, chosen, version=embq.__version__)
    for line in notes(retried):
        click.echo(line, err=True)
    to_do = bool(retried.units or retried.under_way) and not dry_run
    url = settings_with(broker).broker_url
    if not to_do or url or _at_work(root):
        if to_do and url:
            _hand_over(retried, root, broker)
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


def _hand_over(retried: RetryResult, root: Place, broker: str) -> None:
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
