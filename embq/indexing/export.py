"""`embq index export`: writes an index as files of other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from core.errors import Exit
from indexer.collection.opening import open_collection
from indexer.export import FaissExport, write_faiss_file
from indexer.index_files.version import Version, resolve_index


def export(options: Mapping[str, Any]) -> int:
    """Export an index; returns the exit status."""
    source = Path(options["source"]).absolute()
    index = resolve_index(source, options["output"])
    path = Path(options["path"] or index.with_name(f"{index.name}.index"))
    done = write_faiss_file(index, path, shards=options["shards"], overwrite=options["overwrite"])
    _warn_of_growth(source, done.version)
    if options["as_json"]:
        click.echo(json.dumps({"schema": 1, "index": str(index), **export_json(done)}))
    else:
        click.echo(export_text(done))
    return Exit.DONE


def export_json(done: FaissExport) -> dict[str, Any]:
    """An export as it is printed with --json."""
    return {
        "version": done.version.name,
        "files": [{**asdict(one), "path": str(one.path)} for one in done.files],
        "rows": done.version.n,
        "nprobe": done.nprobe,
        "re-ranking": done.k_factor > 1,
        "distance": done.distance,
    }


def export_text(done: FaissExport) -> str:
    """An export as it is printed."""
    plan = done.version.plan
    lines = [f"{one.path}: {one.rows:,} rows, {one.bytes / 1e6:,.1f} MB" for one in done.files]
    distance = "squared distances: cosine = 1 - distance / 2" if plan.metric == "cosine" else f"{done.distance}s"
    lines.append(
        f"{plan.key}, {done.version.name} of {done.version.index}; searches look at {done.nprobe} lists by default"
    )
    lines.append(f"faiss answers with {distance}")
    if done.k_factor > 1:
        lines.append(
            f"not in the file: re-ranking by stored vectors. `embq search` looks at {done.k_factor} times as many "
            "candidates and re-ranks them, so its answers are more exact"
        )
    return "\n".join(lines)


def _warn_of_growth(source: Path, version: Version) -> None:
    """Print a note where the run has rows that are not in the index yet."""
    if not (source / "run.json").exists():
        return
    rows = open_collection(source, output=version.collection.output).n - version.next_id
    if rows > 0:
        click.echo(f"note: {rows:,} rows are not in the index yet; `embq index {source}` adds them", err=True)
