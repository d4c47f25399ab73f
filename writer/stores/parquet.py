"""Parts as parquet files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.durable import drop, output_error, publish
from writer.stores.base import Stored

ROW_GROUP_ROWS = 65_536
"""Rows of one row group: 50 MB of 384-dimensional float16, enough to read fast and small enough to skip."""


class _HashingFile:
    """A file object for pyarrow that hashes what it writes, so that a part is read by nobody to be hashed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        written = self._file.write(data)
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


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


class ParquetStore:
    """Writes tables as parquet, hashing what it writes."""

    suffix = ".parquet"

    def write(self, table: pa.Table, path: Path, *, temporary: Path, metadata: Mapping[str, str]) -> Stored:
        """Write `table` to `path`, complete and durable; OutputError where that fails, leaving nothing behind.

        Args:
            table: the rows, with their final columns.
            path: final name; an orphan of that name from a dead writer is replaced.
            temporary: name to write under, on the same file system.
            metadata: footer entries, such as the run id and the fingerprint.
        """
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
        try:
            with open(temporary, "wb") as raw:
                file = _HashingFile(raw)
                pq.write_table(table, pa.PythonFile(file, mode="w"), **encoding(table.schema))
            publish(temporary, path)
        except OSError as error:
            drop(temporary)
            raise output_error(error, path) from error
        return Stored(rows=table.num_rows, bytes=file.size, sha256=file.hexdigest())
