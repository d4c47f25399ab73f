"""Reading an output folder's committed rows and failures. Only what a commit record names is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from core.commits import CommitLog, CommittedFile, LogState
from core.errors import OutputError
from core.layout import Layout, RunInfo, load_run

if TYPE_CHECKING:
    import numpy as np


def committed(root: Path) -> tuple[RunInfo, LogState]:
    """The run of an output folder and what its commit log says so far.

    Raises InputError where the folder holds no run, OutputError where a record is damaged.
    """
    state = CommitLog(Layout(root)).replay(load_run(root).units)
    info = load_run(root)  # after the log, which may name units that were added meanwhile
    state.grow(info.units)
    return info, state


def committed_files(root: Path, kind: str) -> Iterator[CommittedFile]:
    """The files of `kind` ("rows" or "failures") in the order of their records; raises as `committed` does."""
    log, state = CommitLog(Layout(root)), LogState(units=load_run(root).units)
    for commit in log.read():
        log.advance(state, commit)
        yield from (file for file in commit.files if file.kind == kind)


def row_tables(root: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """All committed rows in the order of their ids, one row group at a time.

    Args:
        columns: the columns to read; None for all: id, ordinal, key, the embeddings, caption, metadata, unit_id.

    Raises as `committed` does, and OutputError where a file is missing or cannot be read. Hashes are not checked;
    `embq verify` does that.
    """
    for file in committed_files(root, "rows"):
        yield from file_tables(root, file, columns)


def failure_tables(root: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """All committed failures in commit order: ordinal (null for a whole unit), key, code, message, unit_id, u."""
    for file in committed_files(root, "failures"):
        yield from file_tables(root, file, columns)


def file_tables(root: Path, file: CommittedFile, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """One committed file, one row group at a time; OutputError where it is missing or cannot be read."""
    path = root / file.path
    try:
        with pq.ParquetFile(path) as parquet:
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, columns=None if columns is None else list(columns))
    except FileNotFoundError as error:
        raise OutputError(
            f"{path} is named by a commit record and is not there",
            next_step="restore it from a backup; `embq verify` lists everything that is missing",
            code="part_missing",
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise OutputError(
            f"{path} cannot be read: {error}", next_step="restore it from a backup", code="part_damaged"
        ) from error


def vectors(table: pa.Table, column: str = "embedding") -> np.ndarray:
    """A column of embeddings as an array of shape (rows, dim) in the stored dtype.

    Raises OutputError where a row has no vector: every committed row has one.
    """
    array = table[column].combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    values = array.flatten()
    dim = array.type.list_size
    if len(values) != dim * len(array) or values.null_count:
        raise OutputError(f"a row without a vector in column {column!r}", code="part_damaged")
    matrix: np.ndarray = values.to_numpy(zero_copy_only=False).reshape(len(array), dim)
    return matrix
