"""Reading an output folder's committed rows and failures. Only what a commit record names is read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import pyarrow as pa

from embq.core.formats.part import opened
from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.commits import CommittedFile
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.storage.paths import Place


def committed(root: Place) -> tuple[RunInfo, LogState]:
    """The run of an output folder and the state of its commit log.

    Raises InputError if the folder holds no run, OutputError if a record is damaged.
    """
    state = CommitLog(Layout(root)).replay(load_run(root).units)
    info = load_run(root)  # after the log, which may name units that were added meanwhile
    state.grow(info.units)
    return info, state


def committed_parts(root: Place) -> Iterator[tuple[CommittedFile, ...]]:
    """The files of each part in the order of their records, one or several of them; raises as `committed` does."""
    log, state = CommitLog(Layout(root)), LogState(units=load_run(root).units)
    for commit in log.read():
        log.advance(state, commit)
        yield from commit.parts
    log.ends_with(state.n)


def row_tables(root: Place, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """All committed rows in the order of their ids, a bounded number at a time; the same whatever the format.

    Args:
        columns: the columns to read; None for all: id, ordinal, key, the embeddings, caption, metadata, unit_id.

    Raises as `committed` does, and OutputError if a file is missing or cannot be read. Hashes are not checked;
    `embq verify` does that.
    """
    for files in committed_parts(root):
        yield from part_tables(root, files, columns)


def part_tables(
    root: Place, files: Sequence[CommittedFile], columns: Sequence[str] | None = None
) -> Generator[pa.Table, None, None]:
    """The rows of one part, or one file of failures, a bounded number at a time.

    Args:
        files: of one record, which are aligned with each other.
        columns: the columns to read; None for all.

    Raises OutputError if a file is missing or cannot be read.
    """
    with opened(root, files) as part:
        yield from part.tables(columns)
