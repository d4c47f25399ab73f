"""Rows in a table of PostgreSQL with the extension pgvector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from embq.app.export.targets.target import OTHER_TOOL, TargetRows, check_columns, client_library, records
from embq.core.errors import ConfigError
from embq.core.formats.base import vectors

PAGE = 100_000
"""Ids of one fetch."""


class PgVector:
    """A table with `id` as its primary key; see `embq.app.export.targets.target.Target`.

    Args:
        destination: postgresql:// URL; the password may stand in PGPASSWORD or ~/.pgpass.
        table: its name, without a schema: that of the server's search_path.
    """

    _rows: TargetRows

    batch_rows = 5_000

    def __init__(self, destination: str, table: str) -> None:
        self.name = f"table {table} of {destination}"
        self._destination, self._table = destination, table
        self._psycopg = client_library("psycopg", "pgvector")
        self._sql = client_library("psycopg.sql", "pgvector")
        self.errors = (self._psycopg.Error, OSError, ValueError, OverflowError)  # the latter for ids of other types
        self._connection: Any = None

    def open(self, rows: TargetRows) -> str | None:
        """See `Target`."""
        self._rows = rows
        self._connection = self._psycopg.connect(self._destination, connect_timeout=30)
        with self._connection.transaction():
            self._require_extension()
            self._run("CREATE TABLE IF NOT EXISTS {table} ({})", self._columns(rows))
            columns = self._run("SELECT * FROM {table} LIMIT 0").description
            check_columns(self.name, [column.name for column in columns], rows)
            (note,) = self._run("SELECT obj_description({}::regclass)", self._quoted()).fetchone()
            empty = self._run("SELECT 1 FROM {table} LIMIT 1").fetchone() is None
            if note is None and empty:
                note = f"embq run {rows.run}, {rows.model}"
                self._run("COMMENT ON TABLE {table} IS {}", self._sql.Literal(note))
        words = (note or "").replace(",", " ").split()
        return words[2] if words[:2] == ["embq", "run"] else OTHER_TOOL

    def ids(self) -> Iterator[np.ndarray]:
        """See `Target`."""
        with self._connection.transaction(), self._connection.cursor("embq_ids") as cursor:
            cursor.execute(self._composed("SELECT id FROM {table}"))
            while page := cursor.fetchmany(PAGE):
                yield np.array(page, np.int64).reshape(-1)

    def write(self, table: pa.Table) -> None:
        """See `Target`; a transaction."""
        rows, payload = self._rows, [field.name for field in self._rows.payload_fields]
        columns = [self._sql.Identifier(name) for name in ("id", *rows.dims, *payload)]
        texts = [_texts(vectors(table, name)) for name in rows.dims]
        with self._connection.transaction():
            self._run("CREATE TEMP TABLE embq_batch (LIKE {table}) ON COMMIT DROP")
            named = self._sql.SQL(", ").join(columns)
            into = self._composed("COPY embq_batch ({}) FROM STDIN", named)
            with self._connection.cursor() as cursor, cursor.copy(into) as copy:
                ids = table["id"].to_pylist()
                for id_, record, *blocks in zip(ids, records(table, rows, json_as_text=True), *texts, strict=True):
                    copy.write_row((id_, *blocks, *(record[name] for name in payload)))
            self._run("INSERT INTO {table} ({}) SELECT {} FROM embq_batch ON CONFLICT (id) DO NOTHING", named, named)

    def finish(self) -> None:
        """Update the planner's statistics."""
        with self._connection.transaction():
            self._run("ANALYZE {table}")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _require_extension(self) -> None:
        if self._run("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone() is None:
            try:
                self._run("CREATE EXTENSION vector")
            except self._psycopg.Error as error:
                raise ConfigError(
                    f"{self.name}: the extension pgvector is missing: {str(error).splitlines()[0]}",
                    next_step="install pgvector on the server; an administrator of the database runs "
                    "`CREATE EXTENSION vector`",
                ) from error

    def _columns(self, rows: TargetRows) -> Any:
        by_arrow = {
            pa.int32(): "integer", pa.int64(): "bigint", pa.float64(): "double precision", pa.float32(): "real",
            pa.bool_(): "boolean",
        }  # fmt: skip
        parts = []
        for field in rows.schema:
            if field.name == "id":
                kind = "bigint PRIMARY KEY"
            elif field.name in rows.dims:
                half = field.type.value_type == pa.float16()
                kind = f"{'halfvec' if half else 'vector'}({rows.dims[field.name]})"
            else:
                kind = "jsonb" if field.name in rows.json else by_arrow.get(field.type, "text")
            parts.append(self._sql.SQL("{} " + kind).format(self._sql.Identifier(field.name)))
        return self._sql.SQL(", ").join(parts)

    def _quoted(self) -> Any:
        """The table's name as a text that `regclass` accepts."""
        return self._sql.Literal(self._sql.Identifier(self._table).as_string(self._connection))

    def _composed(self, query: str, *values: Any) -> Any:
        return self._sql.SQL(query).format(*values, table=self._sql.Identifier(self._table))

    def _run(self, query: str, *values: Any) -> Any:
        return self._connection.execute(self._composed(query, *values))


def _texts(block: np.ndarray) -> list[str]:
    """Vectors in the text form of pgvector, from which every float16 and float32 is read exactly."""
    return [f"[{','.join(map(repr, row))}]" for row in block.astype(np.float32).tolist()]
