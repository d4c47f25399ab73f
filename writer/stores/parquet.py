"""Parts as parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.run.commits import CommittedFile
from core.run.layout import Layout
from writer.hashing import HashingFile
from writer.stores.base import Draft, PartName, whole_or_none

ROW_GROUP_ROWS = 65_536
"""Rows of one row group: 50 MB of 384-dimensional float16, enough to read fast and small enough to skip."""

CHUNK_ROWS = 1_000
"""Rows that pyarrow is given at once: it makes twelve bytes of levels and pointers for each number of them."""


def encoding(schema: pa.Schema) -> dict[str, Any]:
    """Options of `pyarrow.parquet.write_table`: embeddings plain, because they do not compress; the rest with zstd."""
    embeddings = {field.name for field in schema if pa.types.is_fixed_size_list(field.type)}
    others = [field.name for field in schema if field.name not in embeddings]
    return {
        "row_group_size": ROW_GROUP_ROWS,
        "compression": {
            **dict.fromkeys(others, "zstd"),
            **{f"{name}.list.element": "none" for name in embeddings},
        },
        "use_dictionary": [name for name in others if name in ("unit_id", "code")],
        "write_statistics": others,
    }


def write_parquet(
    table: pa.Table, temporary: Path, options: Mapping[str, Any], *, path: str, kind: str, first_id: int = -1
) -> Draft:
    """Write a table as one closed parquet file, hashing what is written; OSError where that fails.

    Args:
        temporary: name to write under.
        options: of `pyarrow.parquet.write_table`.
        path, kind, first_id: what the record will say of it.
    """
    chunked = pa.Table.from_batches(table.to_batches(max_chunksize=CHUNK_ROWS), table.schema)
    with open(temporary, "wb") as raw:
        file = HashingFile(raw)
        pq.write_table(chunked, pa.PythonFile(file, mode="w"), **options)
    said = CommittedFile(
        path=path, kind=kind, rows=table.num_rows, bytes=file.size, sha256=file.hexdigest(), first_id=first_id
    )
    return Draft(temporary=temporary, file=said)


def with_notes(table: pa.Table, notes: Mapping[str, str]) -> pa.Table:
    """`table` with what its file is to say of the run."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **notes})


class ParquetStore:
    """Rows as `parts/part-N.parquet`; see `writer.stores.base.Store`."""

    def write(self, table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
        """See `writer.stores.base.Store`."""
        temporary, path = name.unfinished("rows"), f"parts/part-{name.number:08d}.parquet"
        noted = with_notes(table, notes)
        with whole_or_none([temporary], name.layout.root / path):
            options = encoding(noted.schema)
            return [write_parquet(noted, temporary, options, path=path, kind="rows", first_id=name.first_id)]

    def join(self, layout: Layout, files: Iterable[CommittedFile]) -> None:
        """See `writer.stores.base.Store`; readers need nothing but the parts."""


def write_failures(table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
    """Failures as `failures/failures-N.parquet`, whatever the format of the rows; OutputError leaves nothing behind."""
    temporary, path = name.unfinished("failures"), f"failures/failures-{name.number:08d}.parquet"
    noted = with_notes(table, notes)
    with whole_or_none([temporary], name.layout.root / path):
        return [write_parquet(noted, temporary, encoding(noted.schema), path=path, kind="failures")]
