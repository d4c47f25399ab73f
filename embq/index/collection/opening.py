"""Opens the output of a run or a plain folder of embeddings as a collection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from embq.core import wire
from embq.core.errors import EmbqError, InputError, MalformedError, UsageError
from embq.core.rows.metadata import column_in_file
from embq.core.run.layout import part_of_run, run_above
from embq.core.storage.durable import unusable
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place, is_url, place
from embq.core.wire import FileName
from embq.index.collection.clip_retrieval import describe_layout, is_layout
from embq.index.collection.collection import Collection
from embq.index.collection.listing import all_below
from embq.index.collection.parquet import has_vectors
from embq.index.collection.parts import Block, FileRef, PartRef, no_embeddings
from embq.index.collection.plain import FORMATS, describe_files
from embq.index.collection.remote import FilePath, RemotePath, located, name_below
from embq.index.collection.run import describe_run, describe_runs

__all__ = ["Block", "Collection", "FileRef", "PartRef", "open_collection"]

UNIT_LENGTH_PARTS, UNIT_LENGTH_ROWS = 16, 64
"""Sample of parts and rows that shows whether vectors have length 1, where the collection does not say."""
UNIT_LENGTH_WITHIN = 1e-2
"""Tolerance around length 1: float16 is off by 1e-3, bfloat16 by 4e-3, int8 by a little more."""


def open_collection(
    *roots: str | Place,
    output: str | None = None,
    column: str | None = None,
    file_format: str | None = None,
    id_columns: Sequence[str] = (),
) -> Collection:
    """Open outputs of runs or plain folders as one collection.

    Args:
        roots: output folder of a run, here or on an object store; or an export, or a folder of .npy or .parquet files,
            or one such file. Several are all of one kind; rows have ids in the order of their paths.
        output: whose vectors, where a run has several (its "image" or "text", or the name of a model).
        column: name of the column of vectors; "embedding" for plain folders unless it is given.
        file_format: "npy", "parquet" or "hdf5" for plain folders; None finds out.
        id_columns: columns of metadata of plain folders; a run has its own.

    Raises InputError: `no_embeddings`, `which_output`, `mixed_embeddings`, `not_vectors`, `part_damaged`.
    """
    places = sorted({located(root) for root in roots}, key=lambda root: f"{root}/")
    shared = _shared_folder(places) if len(places) > 1 else None
    runs = [where for where in places if _is_run(where)]
    if runs:
        if file_format is not None or id_columns:
            raise UsageError(f"{runs[0]} is the output of a run, which says itself what its files and columns are")
        _all_of_them(places, runs, "outputs of runs")
        folder: Place | RemotePath = runs[0] if shared is None else shared
        described = (
            describe_run(runs[0], output=output, column=column)
            if shared is None
            else describe_runs({name_below(shared, run): run for run in runs}, output=output, column=column)
        )
    else:
        for where in places:
            if isinstance(where, Path) and where.is_dir() and (run := run_above(where)) is not None:
                raise part_of_run(where, run)
        paths = [_plain(where) for where in places]
        base = paths[0].parent if shared is None and paths[0].is_file() else paths[0]
        above = base if shared is None else _plain(shared)
        described = _described_files(
            above, paths, output=output, column=column, file_format=file_format, id_columns=tuple(id_columns)
        )
        folder = above
    if len(places) > 1:
        described["folders"] = tuple(name_below(folder, root) for root in places)
    try:
        wire.convert(FileName, described["output"], what="name of the vectors")
    except MalformedError as error:
        raise InputError(
            f"{described['output'][:200]!r} of {folder} cannot name a folder for an index",
            next_step="add --vector-name with another name",
            code="which_output",
        ) from error
    unit_length = described.pop("unit_length", None)
    collection = Collection(root=str(folder), unit_length=bool(unit_length), **described)
    return collection if unit_length is not None else replace(collection, unit_length=_unit_length(collection))


def _shared_folder(places: Sequence[Place]) -> Place:
    """The folder or bucket that all are in, which paths of parts are relative to."""
    for above, other in pairwise(places):
        if f"{other}/".startswith(f"{above}/"):
            raise InputError(f"{other} is in {above}: its rows would be indexed twice", next_step="leave one out")
    columns = zip(*(str(where).split("/") for where in places), strict=False)
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns)]
    if len(shared) < (1 if isinstance(places[0], Path) else 3):
        raise InputError(
            f"{places[0]} and {places[-1]} are in no folder or bucket together",
            next_step="copy one of them beside the other",
            code="no_embeddings",
        )
    return place("/".join(shared) or "/")


def reopened(built: Collection, *roots: str) -> Collection:
    """The collection as it is now; errors of `open_collection`.

    Args:
        roots: where it is now; those that it was opened from, unless they are given.
    """
    plain, columns = built.kind in ("npy", "parquet", "hdf5"), built.kind in ("parquet", "hdf5")
    return open_collection(
        *(roots or built.roots),
        output=built.output,
        column=built.column if columns else None,
        file_format=built.kind if plain else None,
        id_columns=tuple(map(column_in_file, built.id_columns)) if columns else (),
    )


def rows_now(built: Collection) -> int | None:
    """Rows that the places of a collection have now; None if it is gone, of another kind, or of remote files.

    Each remote file would cost a request.
    """
    if built.kind != "run" and is_url(built.root):
        return None
    try:
        return reopened(built).n
    except (EmbqError, OSError):
        return None


def _plain(where: Place) -> FilePath:
    """A place of plain files, which are read as inputs are."""
    return RemotePath(str(where)) if isinstance(where, ObjectPath) else where


def _described_files(
    folder: FilePath,
    paths: Sequence[FilePath],
    *,
    output: str | None,
    column: str | None,
    file_format: str | None,
    id_columns: tuple[str, ...],
) -> dict[str, Any]:
    for where in paths:
        if not (where.is_file() or where.is_dir()):
            raise InputError(f"{where} is not there", next_step="check the path", code="no_embeddings")
    layouts = [where for where in paths if where.is_dir() and is_layout(where)]
    if layouts and file_format in (None, "npy"):
        _all_of_them(paths, layouts, "folders of clip-retrieval")
        return describe_layout(folder, layouts, output=output, id_columns=id_columns)
    format_ = file_format or _format_of(paths)
    if format_ == "npy" and (id_columns or column is not None):
        raise UsageError(f"{paths[0]}: .npy files have no columns", next_step="leave the names of columns out")
    if format_ not in FORMATS:
        raise UsageError(f"unknown format of files {format_!r}", next_step=f"use one of {', '.join(FORMATS)}")
    if format_ == "hdf5" and not isinstance(folder, Path):
        # The library leaves a file open where a read of a file object fails, and crashes the process at its end.
        raise InputError(
            f"{paths[0]}: HDF5 files are read from folders of this machine",
            next_step="copy them to a folder",
            code="no_embeddings",
        )
    described = describe_files(folder, paths, format_, column=column, id_columns=id_columns)
    return described | ({} if output is None else {"output": output})


def _is_run(where: Place) -> bool:
    try:
        return (where / "run.json").exists()
    except OSError as error:
        raise unusable(error, where) or InputError(
            f"{where} cannot be read: {error.strerror or error}",
            next_step="give read permission, or the credentials of the store",
        ) from error


def _all_of_them(places: Sequence[Place | RemotePath], alike: Sequence[Place | RemotePath], kind: str) -> None:
    """Raise InputError unless all places are of one kind."""
    if other := next((where for where in places if where not in alike), None):
        raise InputError(
            f"{alike[0]} and {other} cannot be one index: only the first is one of the {kind}",
            next_step="index them apart; `embq serve` answers from several indexes",
            code="mixed_embeddings",
        )


def _format_of(paths: Sequence[FilePath]) -> str:
    """The format of plain folders; parquet files without vectors beside others are their metadata."""
    where = ", ".join(map(str, paths))
    below = chain.from_iterable([path] if path.is_file() else all_below(path) for path in paths)
    first: dict[str, FilePath] = {}
    for path in below:
        for kind, format_ in FORMATS.items():
            if path.name.endswith(format_.suffixes):
                first.setdefault(kind, path)
    if len(first) > 1 and "parquet" in first and not has_vectors(first["parquet"]):
        del first["parquet"]
    if len(first) > 1:
        raise InputError(
            f"{where} holds embeddings in files of {len(first)} formats: {' and '.join(map(str, first.values()))}",
            next_step=f"give --file-format {' or '.join(first)}",
            code="mixed_embeddings",
        )
    if not first:
        everything = ", ".join(suffix for format_ in FORMATS.values() for suffix in format_.suffixes)
        raise no_embeddings(
            f"{where} holds no embeddings: it is no output of a run, and there is no file that ends in {everything}",
            "name a folder with embeddings, or the output of a run",
        )
    return next(iter(first))


def largest_number(collection: Collection) -> float:
    """The largest absolute value of a finite number in the first vectors of parts from everywhere in the collection."""
    return max(float(np.abs(vectors[np.isfinite(vectors)]).max(initial=0.0)) for vectors in _some_vectors(collection))


def _unit_length(collection: Collection) -> bool:
    """True if the first vectors of parts from everywhere in the collection have length 1."""
    squares = [np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64) for vectors in _some_vectors(collection)]
    lengths = np.sqrt(np.concatenate(squares))
    looked_at = lengths[np.isfinite(lengths) & (lengths > 0.0)]  # others are counted elsewhere
    return bool(len(looked_at)) and bool((np.abs(looked_at - 1.0) < UNIT_LENGTH_WITHIN).all())


def _some_vectors(collection: Collection) -> Iterator[np.ndarray]:
    numbers = np.unique(np.linspace(0, len(collection.parts) - 1, UNIT_LENGTH_PARTS).astype(int))
    for part in (collection.parts[number] for number in numbers.tolist()):
        stop = part.first_id + min(part.rows, UNIT_LENGTH_ROWS)
        for _, vectors in collection.read_vectors(part.first_id, stop):
            yield vectors
