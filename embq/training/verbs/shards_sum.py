"""`embq shards sum`: contract names of shards to brace expressions."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from embq.app.cli.sections import SectionedCommand
from embq.app.cli.shared_options import json_option
from embq.core.errors import UsageError


@click.command("sum", cls=SectionedCommand, epilog="Example: ls shards | embq shards sum")
@click.argument("shards", type=click.Path(), nargs=-1, metavar="[SHARDS]...")
@json_option
def command(shards: tuple[str, ...], as_json: bool) -> None:
    """Contract names of shards to few brace expressions, which expand to the same names.

    SHARDS are folders, patterns or expressions, also below http(s)://. Each line has the number of shards, their
    samples by sizes.json, and their bytes. A sizes.json that differs from its folder is an error. Without SHARDS, names
    are read from standard input, one per line, and only the expressions are printed.
    """
    from embq.training.shards.shard_set import named_on, printed, summarized, total_of

    if not shards:
        if sys.stdin.isatty():
            raise UsageError("no shards were named", next_step="name a folder, or `ls FOLDER | embq shards sum`")
        expressions = named_on(sys.stdin)
        click.echo(json.dumps({"schema": 1, "expressions": expressions}) if as_json else "\n".join(expressions))
        return
    runs = summarized(shards)
    if not as_json:
        click.echo("\n".join(printed(runs)))
        return
    total = total_of(runs)
    sums = {"shards": total.shards, "samples": total.samples, "bytes": total.bytes}
    click.echo(json.dumps({"schema": 1, "expressions": [asdict(run) for run in runs], **sums}))
