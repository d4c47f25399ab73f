"""Parts of a collection: aligned files of rows, in the order of their ids, and the reader interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import pyarrow as pa

from embq.core.errors import EmbqError, InputError
from embq.core.storage.beneath import parts_of
from embq.core.storage.durable import denied
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place, is_url, place
from embq.index.collection.remote import FilePath, RemotePath, RemoteStatus, each

NAMES = pa.dictionary(pa.int32(), pa.string())
"""Type of a column with few different texts, each in many rows."""

IDENTITY = (
    pa.field("id", pa.int64(), nullable=False),
    pa.field("key", pa.string(), nullable=False),
    pa.field("caption", pa.string()),
    pa.field("source", NAMES),
    pa.field("unit_id", NAMES),
)
"""Identity columns of a row of any collection; columns of metadata follow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """A file with rows.

    Attributes:
        path: relative to the collection's root.
        bytes: its size.
        sha256: from the commit record; None for files of plain folders.
        mtime_ns: when it was changed last, or the version (ETag or generation) of a file behind a URL; None for files
            that a commit record names.
        kind: "rows" or "vectors", as in a commit record.
        column: the column that it holds if that is one column of vectors, else "".
    """

    path: str
    bytes: int
    sha256: str | None = None
    mtime_ns: int | str | None = None
    kind: str = "rows"
    column: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """Aligned files: row `i` of each of them is one row of the collection, the one with id `first_id + i`."""

    files: tuple[FileRef, ...]
    rows: int
    first_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A range of rows, small enough for one unit of work."""

    first_id: int
    rows: int

    @property
    def stop_id(self) -> int:
        """The id behind its last one."""
        return self.first_id + self.rows


Piece = tuple[PartRef, int, int]
"""Rows of a part: from the second number up to the third, counted from the part's first row."""


class PartReader(Protocol):
    """Reads the parts of one collection. Rows are counted from the first of the part."""

    def vectors(self, part: PartRef, column: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """float32 (m, dim) of the rows from `start` up to `stop`, a bounded number at a time."""
        ...

    def gap_rows(self, part: PartRef, column: str) -> int:
        """Wanted rows that are at most so far apart are read in one go."""
        ...

    def identity(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """`IDENTITY` without its id, and metadata, of the rows of all pieces, a bounded number at a time."""
        ...


def rows_at(reader: PartReader, part: PartRef, column: str, rows: np.ndarray, dim: int) -> np.ndarray:
    """float32 (len(rows), dim) of these rows of a part, which are ascending."""
    gap = reader.gap_rows(part, column)
    cuts = (np.flatnonzero(np.diff(rows) > gap) + 1).tolist()
    matrix = np.empty((len(rows), dim), np.float32)
    for a, b in pairwise([0, *cuts, len(rows)]):
        first = int(rows[a])
        for vectors in reader.vectors(part, column, first, int(rows[b - 1]) + 1):
            c, d = np.searchsorted(rows[a:b], [first, first + len(vectors)]) + a
            matrix[c:d] = vectors[rows[c:d] - first]
            first += len(vectors)
    return matrix


def blocks_of(parts: Sequence[PartRef], block_rows: int, start_id: int = 0) -> list[Block]:
    """Consecutive ranges of at most `block_rows` rows that cover all from `start_id` on.

    Whole parts stand together where they fit. A part that is larger than a block is cut into equal blocks of its own.
    """
    if block_rows < 1:
        raise ValueError(f"blocks of {block_rows} rows")
    blocks: list[Block] = []
    first, rows = start_id, 0
    for part in parts:
        remaining = part.first_id + part.rows - max(part.first_id, start_id)
        if remaining <= 0:
            continue
        if rows and rows + remaining > block_rows:
            blocks.append(Block(first_id=first, rows=rows))
            first, rows = first + rows, 0
        if remaining > block_rows:
            count = -(-remaining // block_rows)
            cuts = [first + remaining * number // count for number in range(count + 1)]
            blocks += [Block(first_id=a, rows=b - a) for a, b in pairwise(cuts)]
            first = cuts[-1]
        else:
            rows += remaining
    if rows:
        blocks.append(Block(first_id=first, rows=rows))
    return blocks


def check_all(root: str, parts: Sequence[PartRef]) -> None:
    """`check_unchanged` of all parts."""
    for _ in each(partial(check_unchanged, root), parts, remote=is_url(root)):
        pass


def check_unchanged(root: str, part: PartRef) -> None:
    """Raise InputError `part_missing` or `part_changed` if a file is not the one that was listed."""
    for file in part.files:
        path = place_of(root, file)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(
                f"{path} is gone: it holds rows {part.first_id:,} to {part.first_id + part.rows - 1:,}",
                next_step="bring it back" if file.sha256 else "bring it back, or build the index anew",
                code="part_missing",
            ) from error
        except OSError as error:
            raise damaged(path, error) from error
        changed = ""
        if status.st_size != file.bytes:
            changed = f"it has {status.st_size:,} bytes now and had {file.bytes:,}"
        elif file.mtime_ns is not None and getattr(status, "st_mtime_ns", file.mtime_ns) != file.mtime_ns:
            changed = "it was written again"
        if changed:
            raise InputError(
                f"{path} is not what it was when it was listed: {changed}",
                next_step="restore it from a backup" if file.sha256 else "build the index anew",
                code="part_changed",
            )


def place_of(root: str, file: FileRef) -> Place | RemotePath:
    """Path or URL of a file."""
    where = place(root)
    if file.sha256 is None and isinstance(where, ObjectPath):
        return RemotePath(f"{where}/{file.path}", RemoteStatus(file.bytes, str(file.mtime_ns)))
    parts_of(where, file.path)  # the path may come from the record of an index
    return where / file.path


def path_of(root: str, file: FileRef) -> FilePath:
    """Path or URL of a plain file."""
    path = place_of(root, file)
    assert not isinstance(path, ObjectPath), "only commit records name objects"
    return path


def damaged(path: object, why: object) -> EmbqError:
    """The error for a file that cannot be read; `not_readable` if `why` is that its permissions forbid it."""
    if isinstance(why, Exception) and (refused := denied(why, path)) is not None:
        return refused
    return InputError(
        f"{path} cannot be read: {why}",
        next_step="restore it from a backup, or take it away and build the index without it",
        code="part_damaged",
    )


def no_embeddings(what: str, next_step: str) -> InputError:
    """The error for a folder in which there is nothing to index."""
    return InputError(what, next_step=next_step, code="no_embeddings")
