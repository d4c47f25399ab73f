"""`embq index` on an existing index: adds rows, deletes rows, compacts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import numpy as np

from embq.app.cli.id_file import read_ids
from embq.app.indexing.progress import ConsoleProgress
from embq.core.errors import Exit, InputError, UsageError
from embq.core.storage.paths import Place
from embq.indexer.build.runners import Runner
from embq.indexer.change.compaction import Compaction, compact
from embq.indexer.change.deletes import NAMED, NO_IDS, Deletion, delete
from embq.indexer.change.growth import Grown, grow
from embq.indexer.collection.opening import Collection
from embq.indexer.dedup.dedup import duplicate_ids
from embq.indexer.index_files.version import Version, index_path, read_current, resolve_index


def grown(index: Path, collection: Collection, options: Mapping[str, Any], runner: Runner, memory_bytes: int) -> Grown:
    """Add new rows to an index, and print a summary to stderr."""
    quiet = options["quiet"] or options["as_json"]
    result = grow(
        index,
        collection,
        runner,
        ConsoleProgress(quiet=quiet),
        drop_invalid=options["drop_invalid"],
        memory_bytes=memory_bytes,
    )
    if not quiet:
        _print_growth(result)
    for warning in result.report.get("warnings", ()):
        click.echo(f"warning: {warning}", err=True)
    return result


def change(options: Mapping[str, Any], runner: AbstractContextManager[Runner]) -> int:
    """Delete or compact; returns the exit status. Only compaction uses the runner."""
    if len(options["sources"]) > 1:
        raise UsageError("rows are deleted from one index, not from folders", next_step="name the index alone")
    where = index_path(options["output"] or options["sources"][0])
    index = resolve_index(where, None if options["output"] else options["vector_name"])
    groups = [name for name in options["delete_from"] if _is_parquet(name)]
    keys = _keys(options, [name for name in options["delete_from"] if name not in groups])
    ids = np.concatenate([NO_IDS, *(read_ids(name) for name in options["delete_ids"])])
    if (keys or groups or len(ids)) and options["compact"]:
        raise UsageError("--delete and --compact cannot be combined", next_step="delete first, then compact")
    if options["compact"]:
        with runner as opened:
            result = compact(index, opened, ConsoleProgress(quiet=options["quiet"] or options["as_json"]))
        return _print_compaction(result, options)
    if not keys and not groups and not len(ids):
        raise InputError(f"there is no key in {', '.join(options['delete_from'])}", code="bad_keys")
    build = read_current(index).build
    ids = np.concatenate([ids, *(duplicate_ids(name, build=build) for name in groups)])
    return _print_deletion(delete(index, keys, ids), options)


def _is_parquet(name: str) -> bool:
    if not os.path.isfile(name):  # a pipe, of which no byte may be lost, or "-" for stdin
        return False
    try:
        with open(name, "rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False  # reading its keys says why


def _keys(options: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    keys = list(options["delete"])
    for name in files:
        try:
            with click.open_file(name, encoding="utf-8") as file:
                keys += [line.rstrip("\r\n") for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"the keys in {name} cannot be read: {error}",
                next_step="give a text file in UTF-8 with one key on each line",
                code="bad_keys",
            ) from error
    return keys


def _print_growth(result: Grown) -> None:
    if result.rows:
        measured = result.report["recall_of_new_rows"]
        recall = [
            f"{name} of searches for them {value:.3f}" for name, value in measured.items() if "@" in name and value
        ]
        drift = f"{100 * result.report['drift']['change']:+.1f} % farther from their centroids than at training"
        click.echo("; ".join([f"added {result.rows:,} rows", drift, *recall]), err=True)
    if result.compaction is not None:
        click.echo(f"compacted {result.compaction.groups} groups of lists into one", err=True)


def _print_deletion(result: Deletion, options: Mapping[str, Any]) -> int:
    if options["as_json"]:
        counts: dict[str, Any] = {"deleted": result.rows, "already": result.already}
        print_json(result.version, **counts, unknown=list(result.unknown), rows=result.version.n)
    else:
        again = f", {result.already:,} were deleted earlier" if result.already else ""
        click.echo(f"deleted {result.rows:,} rows{again}; {result.version.n:,} can be found in {result.version.index}")
    if result.unknown:
        named = ", ".join(result.unknown[:NAMED]) + (", ..." if len(result.unknown) > NAMED else "")
        click.echo(f"warning: no row has {len(result.unknown):,} of the keys: {named}", err=True)
    return Exit.SOME_FAILED if result.unknown else Exit.DONE


def _print_compaction(result: Compaction, options: Mapping[str, Any]) -> int:
    if options["as_json"]:
        print_json(result.version, fresh=result.fresh, groups=result.groups, dropped=result.dropped)
    elif result.fresh:
        click.echo(f"compacted {result.groups} groups of lists into one, without {result.dropped:,} deleted rows")
    else:
        click.echo("nothing to compact: no row was added or deleted")
    return Exit.DONE


def print_json(version: Version, *, index: Place | None = None, **fields: Any) -> None:
    """Print a result as JSON: index (None for that of the version), version, and further fields."""
    click.echo(json.dumps({"schema": 1, "index": str(index or version.index), "version": version.name, **fields}))
