"""Files of plain collections, their shapes, and the identity of rows without metadata."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embq.core.errors import InputError
from embq.index.collection.parts import IDENTITY, FileRef, PartRef, no_embeddings
from embq.index.collection.remote import FilePath, RemotePath, name_below

EMBEDDING = "embedding"
"""The column of vectors, if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimension, type and origin of the vectors of a file.

    Attributes:
        dim: numbers of each.
        dtype: their type.
        fingerprint: of the model that made them, and `model` its spec, where the file is an export of a run; else "".
    """

    path: FilePath
    dim: int
    dtype: str
    fingerprint: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Content of a file of vectors.

    Attributes:
        column: the column of vectors; None if that is open, because the file has no rows.
        shape: of its vectors; None of a file without rows.
        schema: its columns of metadata, which may have columns of vectors among them.
        shows_others: whether it has no rows of its own, and shows those of others.
    """

    rows: int
    column: str | None
    shape: Shape | None = None
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    shows_others: bool = False


class Listing:
    """The parts of a plain collection: rows have ids in the order in which their files are added."""

    def __init__(self) -> None:
        self._parts: list[PartRef] = []
        self._empty: list[str] = []
        self._rows = 0

    def add(self, rows: int, *files: FileRef) -> None:
        """Files that belong together, with this number of rows each. If that is 0, the first is noted as empty."""
        if not rows:
            self._empty.append(files[0].path)
            return
        self._parts.append(PartRef(files=files, rows=rows, first_id=self._rows))
        self._rows += rows

    def fields(self) -> dict[str, Any]:
        """The listing as fields of the collection."""
        return {"parts": tuple(self._parts), "empty": tuple(self._empty)}


def same_shape(previous: Shape | None, this: Shape) -> Shape:
    """`previous`, or `this` if there is none; InputError `mixed_embeddings` if they differ."""
    if previous is None:
        return this
    if (previous.dim, previous.dtype) != (this.dim, this.dtype):
        why = (
            f"{previous.path} holds {previous.dim} numbers of {previous.dtype}, {this.path} {this.dim} of {this.dtype}"
        )
    elif previous.fingerprint != this.fingerprint:
        origins = [f"{shape.path} is from {shape.model or 'no run of embq'}" for shape in (previous, this)]
        why = f"{' and '.join(origins)} (their fingerprints differ)"
    else:
        return previous
    raise InputError(
        f"these are not vectors of one model: {why}",
        next_step="give the files of each model a folder of their own",
        code="mixed_embeddings",
    )


def noted(notes: Mapping[Any, Any]) -> dict[str, str]:
    """The fingerprint and the model of a `Shape`, from the metadata of an exported file."""
    texts = {_text(name): _text(value) for name, value in notes.items()}
    return {name: texts.get(f"embq.{name}", "") for name in ("fingerprint", "model")}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def choose_column(path: FilePath, candidates: Sequence[str], columns: Sequence[str]) -> str:
    """The column of vectors if none is named: "embedding", or the only one; InputError if there is no such.

    Args:
        candidates: columns of vectors.
        columns: all columns, for the error.
    """
    if EMBEDDING in candidates or len(candidates) == 1:
        return EMBEDDING if EMBEDDING in candidates else candidates[0]
    if not candidates:
        raise no_embeddings(
            f"{path} has no column of vectors: it has {', '.join(columns) or 'no columns'}", "name another folder"
        )
    raise InputError(
        f"{path} has {len(candidates)} columns of vectors, and an index holds one of them: {', '.join(candidates)}",
        next_step="name it with --embedding-column-name",
        code="which_output",
    )


def files_below(root: FilePath, suffixes: Sequence[str]) -> list[FilePath]:
    """The files in a folder that end so, at any depth, sorted by their paths.

    Where `root` is such a file itself, it is the only one. Hidden files and folders are passed over, those whose
    names begin with "_", and folders that hold an index. InputError `no_embeddings` if there is none.
    """
    if root.is_file():
        return [root if isinstance(root, Path) else root.resolved()]
    files = [path for path in all_below(root) if path.name.endswith(tuple(suffixes))]
    if not files:
        raise no_embeddings(
            f"{root} holds no files that end in {' or '.join(suffixes)}",
            "name a folder with embeddings, or the output of a run",
        )
    files.sort(key=str)
    return files


def all_below(root: FilePath) -> Iterator[FilePath]:
    """All files below a folder, in any order, but for what `files_below` passes over."""
    if not isinstance(root, Path):
        yield from _all_below_url(root)
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "_")) and not (Path(folder) / name / "CURRENT").is_file()
        ]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def _all_below_url(root: RemotePath) -> Iterator[RemotePath]:
    files = {name_below(root, path): path for path in root.all_below()}
    indices = tuple(name.removesuffix("CURRENT") for name in files if name.endswith("/CURRENT"))
    for relative, path in files.items():
        *folders, name = relative.split("/")
        hidden = name.startswith(".") or any(folder.startswith((".", "_")) for folder in folders)
        if not hidden and not relative.startswith(indices):
            yield path


def file_ref(folder: FilePath, path: FilePath, *, kind: str = "rows", column: str = "") -> FileRef:
    """A file as it is now."""
    status = path.stat() if isinstance(path, Path) else path.status()
    return FileRef(
        path=name_below(folder, path),
        bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        kind=kind,
        column=column,
    )


def rows_of_file(file: FileRef, start: int, stop: int) -> pa.Table:
    """Identity of rows of which nothing is known but where they stand: keys are FILE:ROW."""
    count = stop - start
    keys = pa.array([f"{file.path}:{row}" for row in range(start, stop)], pa.string())
    return pa.Table.from_arrays(
        [keys, pa.nulls(count, pa.string()), same_name(file.path, count), same_name(None, count)],
        schema=pa.schema(IDENTITY[1:]),
    )


def same_name(name: str | None, count: int) -> pa.DictionaryArray:
    """One text, or null, in `count` rows."""
    indices = pa.nulls(count, pa.int32()) if name is None else pa.array(np.zeros(count, np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array([] if name is None else [name], pa.string()))
