"""`embq export --to`: committed rows in a vector database, a dataset for Hugging Face, or the Embedding Projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embq.app.export.targets.target import Target

TABLES = ("lance", "qdrant", "milvus", "pgvector")
"""Targets with tables that have names."""

FOLDERS = ("hf", "tsv")
"""Targets that are a folder."""


def target_of(kind: str, destination: str, table: str) -> Target:
    """A target, not yet opened; ConfigError if its client library is not installed.

    Args:
        kind: one of `TABLES` and `FOLDERS`.
        table: its name; folders have none.
    """
    if kind == "lance":
        from embq.app.export.targets.lance import Lance

        return Lance(destination, table)
    if kind == "qdrant":
        from embq.app.export.targets.qdrant import Qdrant

        return Qdrant(destination, table)
    if kind == "milvus":
        from embq.app.export.targets.milvus import Milvus

        return Milvus(destination, table)
    if kind == "pgvector":
        from embq.app.export.targets.pgvector import PgVector

        return PgVector(destination, table)
    from embq.app.export.targets.files import HuggingFace, Tsv
    from embq.core.errors import UsageError
    from embq.core.storage.paths import is_url

    if is_url(destination):
        raise UsageError(f"--to {kind} writes a folder of this machine", next_step="name one, and copy it afterwards")

    return HuggingFace(destination) if kind == "hf" else Tsv(destination)
