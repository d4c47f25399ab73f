"""`embq gc`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option, json_option, settings_with
from embq.core.service.progress_line import size_text

if TYPE_CHECKING:
    from embq.app.gc.collect import Collected

SHOWN = 20
"""Most files that are printed; --json has all."""
UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


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
def command(output: str, older_than: float, dry_run: bool, broker: str, as_json: bool) -> None:
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
        _print_account(collected, "would remove" if dry_run else "removed")


def _print_account(collected: Collected, removed: str) -> None:
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
