"""`embq verify` and `embq gc`: an output folder is checked, and rid of orphaned files."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option, json_option, settings_with
from embq.core.errors import Exit
from embq.core.service.progress_line import size_text

if TYPE_CHECKING:
    from embq.app.gc.collect import Collected
    from embq.app.verify.verification import Mode, Readers, VerificationReport

SHOWN = 20
"""Most violations, and most files, that are printed; --json has up to 1,000 violations, and all files."""
UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command("verify", cls=SectionedCommand, epilog="Example: embq verify ./out")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@option(
    "--quick",
    "mode",
    flag_value="quick",
    default="full",
    show_default=False,
    help="Check only the commit log, the manifest's digest, sizes and footers of the files, and orphaned files.",
)
@option(
    "--layout",
    "readers",
    type=click.Choice(["clip-retrieval"]),
    help="Also check that these programs read an npy output correctly.",
)
@json_option
def verify(output: str, mode: Mode, readers: Readers | None, as_json: bool) -> int:
    """Verify the output OUT against its inputs.

    Checks the commit log, the hash of every file, that each sample of each committed unit is stored exactly once as a
    row or as a failure, with the text and the metadata of its source, and that vectors are finite and of length 1 if
    the model gives such. Of an unfinished run, the committed part is checked. With --quick, rows and inputs are not
    read.

    Exit status: 0 no violations, 65 violations found, 74 a commit record is damaged.
    """
    from embq.app.verify.verification import verify
    from embq.core.service.progress_line import ProgressLine
    from embq.core.storage.paths import place

    with ProgressLine() as line:

        def show(done: int, total: int) -> None:
            line.show(f"{done:,} of {total:,} units checked")

        report = verify(place(output), mode=mode, readers=readers, on_record=show)
    if as_json:
        _print_json(report)
    else:
        _print_report(report)
    return Exit.DONE if report.ok else Exit.BAD_INPUT


def _print_json(report: VerificationReport) -> None:
    click.echo(json.dumps({"schema": 1, "ok": report.ok, **asdict(report)}))


def _print_report(report: VerificationReport) -> None:
    from embq.core.redaction import printable

    units = f"{report.units:,} of {report.units_total:,} committed"
    units += f", {report.quarantined:,} failed whole" if report.quarantined else ""
    checked = "whole" if report.mode == "full" else "of the right size, their rows not read"
    lines = [
        ("units", units),
        ("samples", f"{report.rows + report.failures:,} in = {report.rows:,} rows + {report.failures:,} failures"),
        ("keys", _keys(report)),
        ("files", f"{report.files:,} {checked} ({size_text(report.bytes)}), {report.records:,} commit records"),
    ]
    lines.append(("seconds", ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in report.seconds.items())))
    lines += [("note", note) for note in report.notes]
    for name, text in lines:
        click.echo(f"{name:<9} {printable(text)}")
    for violation in report.violations[:SHOWN]:
        click.echo(printable(f"{violation.invariant:<14} {violation.where}: {violation.message}"))
    if report.violations_total > SHOWN:
        click.echo(f"... and {report.violations_total - SHOWN:,} more violations (--json lists them)")
    if not report.ok:
        click.echo(f"not ok: {report.violations_total:,} violations")
    elif report.state == "incomplete":
        click.echo(f"ok so far: incomplete, {report.units:,} of {report.units_total:,} units")
    else:
        click.echo("ok")


def _keys(report: VerificationReport) -> str:
    if report.mode == "quick":
        return "not compared with the inputs (--quick)"
    return f"{report.samples_checked:,} compared with a second reading of the inputs"


class Age(click.ParamType[float]):
    """A time span such as 90m, 24h or 7d; in seconds if it has no unit."""

    name = "age"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
        if match is None:
            self.fail(f"{value!r} is not a time such as 90m, 24h or 7d", param, ctx)
        return float(match[1]) * UNITS_S[match[2]]


@click.command("gc", cls=SectionedCommand, epilog="Example: embq gc ./out --older-than 1h")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@option("--older-than", type=Age(), default="24h", metavar="AGE", help="Least age of a file to delete.")
@option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@broker_option
@json_option
def gc(output: str, older_than: float, dry_run: bool, broker: str, as_json: bool) -> None:
    """Delete orphaned files in OUT, which no commit record names, and a finished run's keys in the broker.

    Safe while the run is at work: files that a live worker or writer may still need stay. Ages are by the clock of
    the storage.
    """
    from embq.app.gc.collect import collect
    from embq.core.storage.paths import place

    collected = collect(
        place(output), settings_with(broker), must_answer=bool(broker), older_than_s=older_than, dry_run=dry_run
    )
    orphans = collected.orphans
    if as_json:
        shape = {
            "schema": 1,
            "run": collected.run,
            "dry_run": dry_run,
            "files": [asdict(item) for item in orphans.files],
            "bytes": orphans.bytes,
            "young": orphans.young,
            "in_use": orphans.in_use,
            "broker": None if collected.broker is None else asdict(collected.broker),
            "notes": list(collected.notes),
        }
        click.echo(json.dumps(shape))
    else:
        _print_collected(collected, "would remove" if dry_run else "removed")


def _print_collected(collected: Collected, removed: str) -> None:
    orphans, keys = collected.orphans, collected.broker
    click.echo(f"{removed} {len(orphans.files):,} files, {size_text(orphans.bytes)}")
    for item in orphans.files[:SHOWN]:
        click.echo(f"  {item.path}  {size_text(item.bytes)}, {item.age_s / 3600:,.1f} h old")
    if len(orphans.files) > SHOWN:
        click.echo(f"  ... and {len(orphans.files) - SHOWN:,} more (--json lists them)")
    if keys is not None:
        click.echo(f"{removed} {keys.keys:,} keys and {keys.hints:,} hints from the broker")
    if orphans.young or orphans.in_use:
        click.echo(f"left {orphans.young:,} younger files, and {orphans.in_use:,} that may be in use")
    for note in collected.notes:
        click.echo(f"note: {note}", err=True)
