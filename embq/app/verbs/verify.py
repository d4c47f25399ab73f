"""`embq verify`: checks an output folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import json_option
from embq.core.errors import Exit

if TYPE_CHECKING:
    from embq.app.verify.verification import Mode, Readers, Report

SHOWN = 20
"""Violations that are printed; --json has up to 1,000."""


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
def command(output: str, mode: Mode, readers: Readers | None, as_json: bool) -> int:
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
        _print_account(report)
    return Exit.DONE if report.ok else Exit.BAD_INPUT


def _print_json(report: Report) -> None:
    import json
    from dataclasses import asdict

    click.echo(json.dumps({"schema": 1, "ok": report.ok, **asdict(report)}))


def _print_account(report: Report) -> None:
    from embq.core.redaction import printable
    from embq.core.service.progress_line import size_text

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


def _keys(report: Report) -> str:
    if report.mode == "quick":
        return "not compared with the inputs (--quick)"
    return f"{report.samples_checked:,} compared with a second reading of the inputs"
