"""Runs `embq index add`, `delete` and `compact`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from embq.app.cli.arguments import parsed
from embq.app.cli.id_file import read_ids
from embq.core.errors import Exit, InputError, UsageError
from embq.core.formats.duplicate_groups import duplicate_ids
from embq.index.change.compaction import Compaction, compact
from embq.index.change.deletes import NAMED, NO_IDS, Deletion, delete
from embq.index.change.growth import Grown, grow
from embq.index.collection.opening import Collection, reopened
from embq.index.commands.build import memory_of, print_json, print_result, runner_of
from embq.index.commands.progress import ConsoleProgress
from embq.index.index_files.version import index_path, read_current, resolve_index
from embq.index.stages.build import Built


def add_rows(options: Mapping[str, Any]) -> int:
    """Add the new rows of folders to their index, and print the result; returns the exit status."""
    built, collection = added(options)
    if not options["as_json"] and not built.fresh:
        click.echo("nothing to add: the index has all rows", err=True)
    return print_result(built, collection, options)


def added(options: Mapping[str, Any]) -> tuple[Built, Collection]:
    """The index with the new rows, and its collection as it is now."""
    source = index_path(options["output"] or options["sources"][0])
    index = resolve_index(source.parent if source.is_file() else source, options["vector_name"])
    here = Path(os.path.abspath(options["sources"][0]))
    roots = [] if index in (here, here.parent) else options["sources"]
    collection = reopened(read_current(index).collection, *roots)
    memory_bytes = memory_of(options)
    quiet = options["quiet"] or options["as_json"]
    with runner_of(options, memory_bytes) as runner:
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
    return Built(index, result.version, fresh=result.rows > 0), collection


def added_to(sources: Sequence[str], output: str | None, options: Mapping[str, Any]) -> Path:
    """See `embq.add_to_index`; returns the folder of the index."""
    built, _ = added(parsed("index add", options, sources, "--quiet", *([] if output is None else ["-o", output])))
    return built.version.index


def delete_rows(options: Mapping[str, Any]) -> int:
    """Delete the rows with some keys or ids, and print the result; returns the exit status."""
    index = resolve_index(index_path(options["source"]), options["vector_name"])
    groups = [name for name in options["files"] if _is_parquet(name)]
    keys = [*options["keys"], *_keys(name for name in options["files"] if name not in groups)]
    ids = np.concatenate([NO_IDS, *(read_ids(name) for name in options["id_files"])])
    if not keys and not groups and not len(ids):
        if options["files"]:
            raise InputError(f"there is no key in {', '.join(options['files'])}", code="bad_keys")
        raise UsageError("no rows are named", next_step="give keys, --from FILE or --ids FILE")
    build = read_current(index).build
    ids = np.concatenate([ids, *(duplicate_ids(name, build=build) for name in groups)])
    return _print_deletion(delete(index, keys, ids), options)


def compact_lists(options: Mapping[str, Any]) -> int:
    """Compact an index, and print the result; returns the exit status."""
    index = resolve_index(index_path(options["source"]), options["vector_name"])
    with runner_of(options, memory_of(options)) as runner:
        result = compact(index, runner, ConsoleProgress(quiet=options["quiet"] or options["as_json"]))
    return _print_compaction(result, options)


def _is_parquet(name: str) -> bool:
    if not os.path.isfile(name):  # a pipe, of which no byte may be lost, or "-" for stdin
        return False
    try:
        with open(name, "rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False  # reading its keys says why


def _keys(files: Iterable[str]) -> Iterator[str]:
    for name in files:
        try:
            with click.open_file(name, encoding="utf-8") as file:
                yield from [line.rstrip("\r\n") for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"the keys in {name} cannot be read: {error}",
                next_step="give a text file in UTF-8 with one key on each line",
                code="bad_keys",
            ) from error


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
