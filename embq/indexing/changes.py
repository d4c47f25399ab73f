"""What `embq index` does with an index that is there: it lets it grow, deletes from it, and compacts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from core.errors import Exit, InputError, UsageError
from embq.indexing.progress import BuildProgress
from indexer.build.runners import Runner
from indexer.change.compaction import Compaction, compact
from indexer.change.deletes import NAMED, Deletion, delete
from indexer.change.growth import Grown, grow
from indexer.collection.opening import Collection
from indexer.index_files.version import resolve_index


def grown(index: Path, collection: Collection, options: Mapping[str, Any], runner: Runner, memory_bytes: int) -> Grown:
    """Add what is new to an index, and say what came of it beside the account."""
    quiet = options["quiet"] or options["as_json"]
    came = grow(
        index,
        collection,
        runner,
        BuildProgress(quiet=quiet),
        drop_invalid=options["drop_invalid"],
        memory_bytes=memory_bytes,
    )
    if not quiet:
        _say_growth(came)
    for warning in came.report.get("warnings", ()):
        click.echo(f"warning: {warning}", err=True)
    return came


def change(options: Mapping[str, Any], runner: AbstractContextManager[Runner]) -> int:
    """Delete or compact; gives the exit status. Only compaction needs the runner."""
    where = Path(options["to"] or options["source"])
    index = resolve_index(where.absolute(), None if options["to"] else options["output"])
    keys = _keys(options)
    if keys and options["compact"]:
        raise UsageError("--delete and --compact are two steps", next_step="delete first, then compact")
    if options["compact"]:
        with runner as opened:
            came = compact(index, opened, BuildProgress(quiet=options["quiet"] or options["as_json"]))
        return _say_compaction(came, options)
    return _say_deletion(delete(index, keys), options)


def _keys(options: Mapping[str, Any]) -> list[str]:
    keys = list(options["delete"])
    for name in options["delete_from"]:
        try:
            with click.open_file(name, encoding="utf-8") as file:
                keys += [line.rstrip("\r\n") for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"the keys in {name} cannot be read: {error}",
                next_step="give a text file in UTF-8 with one key on each line",
                code="bad_keys",
            ) from error
    if not keys and not options["compact"]:
        raise InputError(f"there is no key in {', '.join(options['delete_from'])}", code="bad_keys")
    return keys


def _say_growth(came: Grown) -> None:
    if came.rows:
        measured = came.report["recall_of_new_rows"]
        recall = [
            f"{name} of searches for them {value:.3f}" for name, value in measured.items() if "@" in name and value
        ]
        drift = (
            f"{100 * came.report['drift']['change']:+.1f} % farther from the centres of their lists than at training"
        )
        click.echo(
            "; ".join([f"added {came.rows:,} rows", drift, *recall]),
            err=True,
        )
    if came.compaction is not None:
        click.echo(f"compacted {came.compaction.groups} groups of lists into one", err=True)


def _say_deletion(came: Deletion, options: Mapping[str, Any]) -> int:
    if options["as_json"]:
        told = {"schema": 1, "index": str(came.version.index), "version": came.version.name, "deleted": came.rows}
        click.echo(json.dumps({**told, "already": came.already, "unknown": list(came.unknown), "rows": came.version.n}))
    else:
        again = f", {came.already:,} were deleted before" if came.already else ""
        click.echo(f"deleted {came.rows:,} rows{again}; {came.version.n:,} can be found in {came.version.index}")
    if came.unknown:
        named = ", ".join(came.unknown[:NAMED]) + (", ..." if len(came.unknown) > NAMED else "")
        click.echo(f"warning: no row has {len(came.unknown):,} of the keys: {named}", err=True)
    return Exit.SOME_FAILED if came.unknown else Exit.DONE


def _say_compaction(came: Compaction, options: Mapping[str, Any]) -> int:
    if options["as_json"]:
        told = {"schema": 1, "index": str(came.version.index), "version": came.version.name, "fresh": came.fresh}
        click.echo(json.dumps({**told, "groups": came.groups, "dropped": came.dropped}))
    elif came.fresh:
        click.echo(f"compacted {came.groups} groups of lists into one, without {came.dropped:,} deleted rows")
    else:
        click.echo("there is nothing to compact: no row was added or deleted since")
    return Exit.DONE
