"""The groups of near duplicates among the rows of a run, a parquet file that `embq index dedup` writes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embq.core import wire
from embq.core.errors import InputError, MalformedError

GROUPS = "groups.parquet"
"""Name of the file."""
GROUP_SCHEMA = pa.schema(
    [("id", pa.int64()), ("key", pa.string()), ("group", pa.int64()), ("kept", pa.bool_()), ("cosine", pa.float32())]
)
"""Columns of the groups: `group` is the id of the row that is kept, and `cosine` that to it."""

NOTE = b"embq"
"""Key of the file's own metadata, JSON: which rows the ids mean."""


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """The file's own metadata: which rows its ids mean."""

    build: str
    run: str | None
    threshold: float


def duplicate_ids(path: str | Path, *, build: str | None = None, run: str | None = None) -> np.ndarray:
    """int64 (n,), ascending: the ids of the rows of a groups file that are not kept.

    Args:
        build: of the index whose ids they must be; a grown one has the same.
        run: the run whose ids they must be.

    Raises InputError `bad_groups` if the file is no such file, or of another index or run.
    """
    try:
        with pq.ParquetFile(path) as file:
            note = wire.read(_Note, (file.schema_arrow.metadata or {}).get(NOTE, b""), what="metadata of the groups")
            if not file.schema_arrow.equals(GROUP_SCHEMA):
                raise ValueError(f"its columns are not {', '.join(GROUP_SCHEMA.names)}")
            batches = []
            for batch in file.iter_batches(columns=["id", "kept"]):
                if batch["id"].null_count or batch["kept"].null_count:
                    raise ValueError("there are nulls in its columns id and kept")
                batches.append(batch["id"].filter(pc.invert(batch["kept"])).to_numpy(zero_copy_only=False))
        ids = np.concatenate([*batches, np.empty(0, np.int64)])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException, MalformedError) as error:
        raise _bad_groups(f"{path} cannot be read: {error}") from error
    if (build is not None and note.build != build) or (run is not None and note.run != run):
        raise _bad_groups(f"the ids in {path} are those of another {'run' if build is None else 'index'}")
    return np.unique(ids)


def _bad_groups(message: str) -> InputError:
    return InputError(
        message, next_step=f"give the {GROUPS} that `embq index dedup` wrote for these rows", code="bad_groups"
    )
