"""`embq shards verify`: verify shards."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import json_option, machine_workers_option
from embq.core.errors import Exit

if TYPE_CHECKING:
    from embq.training.shards.verification import Inspected, ShardsReport


SHOWN = 20
"""Violations that are printed; --json has up to 1,000."""


@click.command("verify", cls=SectionedCommand, epilog="Example: embq shards verify ./shards --decode-images")
@click.argument("shards", type=click.Path(), nargs=-1, required=True, metavar="SHARDS...")
@option("--decode-images", is_flag=True, help="Decode every image completely, and report those that fail.")
@option("--allow-missing", is_flag=True, help="Accept samples without the class or the caption that others have.")
@option("--write-sizes", is_flag=True, help="Count the samples, and write sizes.json beside the shards.")
@machine_workers_option()
@json_option
def command(shards: tuple[str, ...], workers: int | None, decode_images: bool, as_json: bool, **options: bool) -> int:
    """Read shards completely, and check their content.

    SHARDS are folders, patterns or expressions, also below http(s)://. Each shard has to be a complete archive whose
    members are grouped by key, without duplicates. Each sample needs an image, readable captions and metadata, and the
    class and the caption that others have. sizes.json and classes.json beside the shards have to agree.

    Exit status: 0 no violations, 65 violations.
    """
    from embq.core.process.limits import cores
    from embq.training.run.progress import Counter
    from embq.training.shards.verification import verify

    began = time.monotonic()
    with Counter("shards", quiet=as_json) as progress:

        def read(shard: Inspected, total: int) -> None:
            progress.expect(total)
            progress.add(1, shard.bytes)

        report = verify(shards, read, decode=decode_images, processes=workers or min(8, cores()), **options)
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": report.ok, **asdict(report)}))
    else:
        _print(report, time.monotonic() - began, write_sizes=options["write_sizes"])
    return Exit.DONE if report.ok else Exit.BAD_INPUT


def _print(report: ShardsReport, seconds: float, *, write_sizes: bool) -> None:
    from embq.core.redaction import printable
    from embq.core.service.progress_line import size_text

    speed = size_text(report.bytes / max(seconds, 1e-3))
    members = ", ".join(f"{name} ({count:,})" for name, count in report.members.items())
    counted = "as sizes.json says" if report.counted else "there is no sizes.json to compare with"
    click.echo(f"{report.shards:,} shards, {report.samples:,} samples, {size_text(report.bytes)}, {speed}/s")
    click.echo(f"members: {members}")
    for violation in report.violations[:SHOWN]:
        click.echo(printable(f"{violation.code:<16} {violation.where}: {violation.message}"))
    if report.violations_total > SHOWN:
        click.echo(f"... and {report.violations_total - SHOWN:,} more violations (--json lists them)")
    if write_sizes:
        click.echo("sizes.json is written" if report.written else "sizes.json is not written: not every shard is whole")
    if report.ok:
        click.echo("ok" if write_sizes else f"ok, {counted}")
    else:
        click.echo(f"not ok: {report.violations_total:,} violations")
