"""`embq index export`: writes indexes as files of other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from embq.core.errors import Exit, UsageError
from embq.core.service.progress_line import size_text
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import place
from embq.index.collection.opening import rows_now
from embq.index.commands.clip_back import write_clip_back
from embq.index.faiss_file import FaissExport, write_faiss_file
from embq.index.index_files.version import index_path, resolve_index


def export(options: Mapping[str, Any]) -> int:
    """Export an index; returns the exit status."""
    source = index_path(options["source"])
    if options["form"] == "clip-back":
        if options["shards"] > 1 or options["overwrite"]:
            raise UsageError(
                "--shards and --overwrite are for --output-format faiss", next_step="leave them out; name a new DIR"
            )
        folder = file_path(options["path"] or f"{source}.clip-back").absolute()
        done, notes = write_clip_back(source, folder, output=options["vector_name"], refine=options["refine"])
    else:
        index = resolve_index(source, options["vector_name"])
        path = file_path(options["path"] or f"{index}.index")
        file = write_faiss_file(
            index, path, shards=options["shards"], overwrite=options["overwrite"], refine=bool(options["refine"])
        )
        done, notes = [file], []
    for exported in done:
        now = rows_now(exported.version.collection)
        if now is not None and now > exported.version.next_id:
            notes.append(
                f"{now - exported.version.next_id:,} rows of {exported.version.collection.root} are not in the index "
                "yet; `embq index add` adds them"
            )
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if options["as_json"]:
        click.echo(json.dumps({"schema": 1, "indexes": [export_json(exported) for exported in done], "notes": notes}))
    else:
        click.echo("\n".join(map(export_text, done)))
    return Exit.DONE


def file_path(text: str) -> Path:
    """The path of an export; UsageError if it is on an object store."""
    where = place(text)
    if isinstance(where, ObjectPath):
        raise UsageError(f"{where}: exports are written on this machine", next_step="write it here, and copy it")
    return where


def export_json(done: FaissExport) -> dict[str, Any]:
    """An export as it is printed with --json."""
    return {
        "index": str(done.version.index),
        "version": done.version.name,
        "files": [{**asdict(file), "path": str(file.path)} for file in done.files],
        "rows": done.version.n,
        "nprobe": done.nprobe,
        "k_factor": done.k_factor,
        "refine": done.refine,
        "distance": done.distance,
        "read_since": done.read_since,
    }


def export_text(done: FaissExport) -> str:
    """An export as it is printed."""
    version, cosine = done.version, done.version.plan.metric == "cosine"
    lines = [f"{file.path}: {file.rows:,} rows, {size_text(file.bytes)}" for file in done.files]
    lines.append(f"{version.plan.key}, {version.name} of {version.index}; searches look at {done.nprobe} lists")
    squared = cosine and done.distance == "squared distance"
    lines.append(
        f"faiss {done.read_since} and later answer with {done.distance}s"
        + (": cosine = 1 - distance / 2" if squared else "")
    )
    if done.refine:
        lines.append(f"faiss re-ranks {done.k_factor} times k candidates by vectors in the file, as `embq search` does")
    elif done.k_factor > 1:
        lines.append(
            f"not in the file: `embq search` re-ranks {done.k_factor} times k candidates by stored vectors, so its "
            "answers are more exact; --refine writes them into the file"
        )
    return "\n".join(lines)
