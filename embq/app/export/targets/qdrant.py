"""Rows as points of a collection of Qdrant: a server, or a folder of its embedded mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from embq.app.export.targets.local_database import PointsOnly, local_folder
from embq.app.export.targets.target import (
    OTHER_TOOL,
    TargetRows,
    check_columns,
    client_library,
    other_form,
    records,
)
from embq.core.formats.base import vectors
from embq.core.settings import target_secret

PAGE = 10_000
"""Ids of one request."""

ANSWER_BYTES, ANSWER_S = 16 << 20, 60
"""Bounds of an answer, which the client reads into memory: a page of ids has less than 1 MB."""


class Qdrant:
    """A collection; see `embq.app.export.targets.target.Target`. Columns are the payload, JSON parsed.

    Args:
        destination: http:// or https:// URL, or a folder. QDRANT_API_KEY holds the key of a server.
        table: name of the collection.
    """

    _rows: TargetRows

    batch_rows = 500  # a request of 500 vectors of 1,024 numbers as JSON has 10 MB; a server takes 32

    def __init__(self, destination: str, table: str) -> None:
        self.name = f"collection {table} of {destination}"
        self._table = table
        self._client_module = client_library("qdrant_client", "qdrant")
        exceptions = client_library("qdrant_client.http.exceptions", "qdrant")
        self._httpx = client_library("httpx", "qdrant")
        # AssertionError: of the client, for an answer without a result
        self.errors = (exceptions.ApiException, OSError, RuntimeError, ValueError, AssertionError)
        self._destination = destination
        self._client: Any = None

    def open(self, rows: TargetRows) -> str | None:
        """See `Target`."""
        if local_folder(self._destination) is None:
            return self._open(rows)
        records = client_library("qdrant_client.http.models.models", "qdrant")
        stored = client_library("qdrant_client.local.persistence", "qdrant")
        # The library unpickles all points of a folder, of whomever.
        with patch.object(stored, "pickle", PointsOnly(records, self._destination)):
            return self._open(rows)

    def _open(self, rows: TargetRows) -> str | None:
        where: dict[str, Any] = {"path": self._destination}
        if self._destination.startswith(("http://", "https://")):
            where = {
                "url": self._destination,
                "api_key": target_secret("QDRANT_API_KEY"),
                "timeout": ANSWER_S,
                "check_compatibility": False,
                "headers": {"Accept-Encoding": "identity"},
                "event_hooks": {"response": [self._read]},
            }
        self._client = self._client_module.QdrantClient(**where)
        self._rows = rows
        models = self._client_module.models
        if not self._client.collection_exists(self._table):
            sizes = {
                name: models.VectorParams(size=dim, distance=models.Distance.COSINE) for name, dim in rows.dims.items()
            }
            notes = {"embq.run": rows.run, "embq.model": rows.model, "embq.columns": rows.schema.names}
            self._client.create_collection(self._table, vectors_config=sizes, metadata=notes)
        config = self._client.get_collection(self._table).config
        params = config.params.vectors
        named = params if isinstance(params, dict) else {"": params}
        dims = {name: getattr(vector, "size", 0) for name, vector in named.items()}
        if dims != rows.dims:
            raise other_form(self.name, f"vectors {dims}", f"{rows.dims}")
        metadata = config.metadata or {}
        columns = metadata.get("embq.columns")
        check_columns(self.name, [str(name) for name in columns] if isinstance(columns, list) else [], rows)
        return str(metadata.get("embq.run", OTHER_TOOL))

    def ids(self) -> Iterator[np.ndarray]:
        """See `Target`."""
        offset: Any = None
        while True:
            points, offset = self._client.scroll(
                self._table, limit=PAGE, offset=offset, with_payload=False, with_vectors=False
            )
            # A point with a UUID, or with a number beyond int64, is none of ours.
            ids = [point.id if isinstance(point.id, int) and point.id < 1 << 63 else -1 for point in points]
            yield np.array(ids, np.int64)
            if offset is None or not points:
                return

    def write(self, table: pa.Table) -> None:
        """See `Target`."""
        blocks = {name: vectors(table, name).astype(np.float32).tolist() for name in self._rows.dims}
        batch = self._client_module.models.Batch(
            ids=table["id"].to_pylist(), vectors=blocks, payloads=records(table, self._rows)
        )
        self._client.upsert(self._table, batch, wait=True)

    def finish(self) -> None:
        """Qdrant builds its index by itself."""

    def close(self) -> None:
        """Close the client, which unlocks the folder."""
        if self._client is not None:
            self._client.close()

    def _read(self, response: Any) -> None:
        """Read an answer within its bounds; OSError beyond them, or if it is compressed, which was not requested."""
        data, until = bytearray(), time.monotonic() + ANSWER_S
        if "Content-Encoding" in response.headers:
            raise OSError("an answer is compressed, which was not requested")
        for piece in response.stream:
            data += piece
            if len(data) > ANSWER_BYTES or time.monotonic() > until:
                raise OSError(f"an answer has over {ANSWER_BYTES:,} bytes, or takes longer than {ANSWER_S} s")
        response.stream.close()
        response.stream = self._httpx.ByteStream(bytes(data))
