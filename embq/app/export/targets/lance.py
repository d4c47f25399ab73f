"""Rows in a table of LanceDB: a folder, or a URL of an object store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from embq.app.export.targets.local_database import local_folder
from embq.app.export.targets.target import OTHER_TOOL, RUN, TargetRows, client_library, other_form, run_in

MODEL = b"embq.model"
"""Key of a schema's metadata with the run's model."""


class Lance:
    """A table of LanceDB; see `embq.app.export.targets.target.Target`.

    Args:
        destination: folder or URL of the database.
        table: its name.
    """

    batch_rows = 65_536  # each write is a fragment of its own, and a version
    errors = (OSError, RuntimeError, ValueError)  # lancedb has no class of its own

    def __init__(self, destination: str, table: str) -> None:
        self.name = f"table {table} of {destination}"
        self._destination, self._table_name = destination, table
        self._table: Any = None

    def open(self, rows: TargetRows) -> str | None:
        """See `Target`."""
        local_folder(self._destination)
        database = client_library("lancedb", "lance").connect(self._destination)
        schema = rows.schema.with_metadata({RUN: rows.run.encode(), MODEL: rows.model.encode()})
        try:
            self._table = database.open_table(self._table_name)
        except ValueError:  # there is none
            self._table = database.create_table(self._table_name, schema=schema)
        schema = self._table.schema
        if not schema.remove_metadata().equals(rows.schema):
            raise other_form(self.name, _types(schema), _types(rows.schema))
        # Other notes may name models, which the library loads with their own code when rows are added.
        return run_in(schema) if set(schema.metadata or ()) <= {RUN, MODEL} else OTHER_TOOL

    def ids(self) -> Iterator[np.ndarray]:
        """See `Target`."""
        for batch in self._table.search().select(["id"]).to_batches():
            yield batch["id"].to_numpy()

    def write(self, table: pa.Table) -> None:
        """See `Target`."""
        self._table.add(table)

    def finish(self) -> None:
        """Merge small fragments."""
        self._table.optimize()

    def close(self) -> None:
        """Nothing is held."""


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
