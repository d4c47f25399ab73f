"""Reading an output folder's committed rows and failures. Only what a commit record names is read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import pyarrow as pa

from embq.core.formats.part import opened
from embq.core.run.commit_log import committed_parts
from embq.core.run.commits import CommittedFile
from embq.core.storage.paths import Place


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
