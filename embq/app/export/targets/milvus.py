"""Rows as entities of a collection of Milvus: a server, or a .db file of Milvus Lite."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from embq.app.export.targets.local_database import check_names, local_folder
from embq.app.export.targets.target import OTHER_TOOL, TargetRows, check_columns, client_library, records
from embq.core.errors import InputError
from embq.core.formats.base import vectors
from embq.core.settings import target_secret
from embq.core.storage.paths import is_url

RUN = "embq_run"
"""Column with the id of the run: Milvus Lite keeps no description of a collection."""

MOST_TEXT_BYTES = 65_535
"""Limit of Milvus for a VARCHAR."""

OF_USERS = ("schema.json", "database_properties.json")
"""Files of Milvus Lite with texts of users; the others hold names of collections and files alone."""

PAGE = 10_000
"""Ids of one request; a server returns at most 16,384."""


class Milvus:
    """A collection; see `embq.app.export.targets.target.Target`.

    Args:
        destination: http:// or https:// URL, or a file that ends with .db. MILVUS_TOKEN holds the token of a server.
        table: name of the collection.
    """

    _rows: TargetRows

    batch_rows = 1_000  # a message has at most 64 MiB

    def __init__(self, destination: str, table: str) -> None:
        self.name = f"collection {table} of {destination}"
        self._table, self._destination = table, destination
        self._module = client_library("pymilvus", "milvus")
        for name in ("pymilvus", "milvus_lite"):  # they log what Milvus Lite lacks, and each error beside raising it
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.errors = (self._module.exceptions.MilvusException, OSError, ValueError)
        self._client: Any = None

    def open(self, rows: TargetRows) -> str | None:
        """See `Target`."""
        if (folder := local_folder(self._destination)) is not None:
            check_names(folder, skipped=OF_USERS)
        self._client = self._module.MilvusClient(self._destination, token=target_secret("MILVUS_TOKEN") or "")
        self._rows = rows
        if not self._client.has_collection(self._table):
            self._create(rows)
        form = self._client.describe_collection(self._table)
        columns = [field["name"] for field in form["fields"]]
        check_columns(self.name, [name for name in columns if name != RUN], rows)
        if RUN not in columns or form.get("functions"):  # which may send texts to a service
            return OTHER_TOOL
        self._client.load_collection(self._table)
        first = self._client.query(self._table, filter="id >= 0", limit=1, output_fields=[RUN])
        return str(first[0][RUN]) if first else None

    def ids(self) -> Iterator[np.ndarray]:
        """See `Target`."""
        pages = self._client.query_iterator(
            self._table, batch_size=PAGE, output_fields=["id"], consistency_level="Strong"
        )
        with closing(pages):
            while page := pages.next():
                yield np.array([row["id"] for row in page], np.int64)

    def write(self, table: pa.Table) -> None:
        """See `Target`."""
        entities = records(table, self._rows, json_as_text=True)  # pymilvus takes a string for a JSON text
        blocks = {name: vectors(table, name).astype(np.float32) for name in self._rows.dims}
        for number, (id_, record) in enumerate(zip(table["id"].to_pylist(), entities, strict=True)):
            self._refuse_unfit(record)
            record.update({"id": id_, RUN: self._rows.run}, **{name: block[number] for name, block in blocks.items()})
        self._client.upsert(self._table, entities)

    def finish(self) -> None:
        """Seal what was written."""
        self._client.flush(self._table)

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def _create(self, rows: TargetRows) -> None:
        kinds = self._module.DataType
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", kinds.INT64, is_primary=True)
        schema.add_field(RUN, kinds.VARCHAR, max_length=64)
        index = self._client.prepare_index_params()
        for name, dim in rows.dims.items():
            schema.add_field(name, kinds.FLOAT_VECTOR, dim=dim)
            index.add_index(name, index_type="AUTOINDEX", metric_type="COSINE")
        by_arrow = {
            pa.int32(): kinds.INT32, pa.int64(): kinds.INT64, pa.float64(): kinds.DOUBLE, pa.float32(): kinds.FLOAT,
            pa.bool_(): kinds.BOOL,
        }  # fmt: skip
        for field in rows.payload_fields:
            kind = kinds.JSON if field.name in rows.json else by_arrow.get(field.type, kinds.VARCHAR)
            length = {"max_length": MOST_TEXT_BYTES} if kind == kinds.VARCHAR else {}
            schema.add_field(field.name, kind, nullable=True, **length)
        self._client.create_collection(self._table, schema=schema, index_params=index)

    def _refuse_unfit(self, record: dict[str, Any]) -> None:
        """InputError for a value that Milvus does not hold, or that Milvus Lite returns as another one."""
        lite = not is_url(self._destination)
        for name, value in record.items():
            leave_out = "leave the column out: name the others with --columns"
            if isinstance(value, str) and len(value) > MOST_TEXT_BYTES // 4 and len(value.encode()) > MOST_TEXT_BYTES:
                what = f"has over {MOST_TEXT_BYTES:,} bytes, the most that Milvus holds"
                code = "text_too_long"
                leave_out = "leave the row out: name the others with --ids" if name == "key" else leave_out
            elif lite and name in self._rows.json and value is not None and value[0] not in "[{":
                what = "is a single value in a column of several types, which Milvus Lite mixes up"
                code = "other_columns"
            else:
                continue
            raise InputError(
                f"{name} of the row with key {record['key'][:200]!r} {what}", next_step=leave_out, code=code
            )
