"""Searches for a framework's retriever: a local index stays open between them, a server is asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from os import PathLike
from typing import Any

import embq
from embq.core.rows.metadata import PREFIX
from embq.retrieval.searching.query import Result
from embq.retrieval.searching.remote import is_server


class Retrieval:
    """Text queries to one index. Safe to use from any thread.

    Args:
        index: output folder of a run, folder of an index, its s3:// or gs:// URL, or the URL of an `embq serve`.
        vector_name: which of the vectors of a run, if several are indexed.

    The index is opened by the first search, which raises what `embq.search` raises.
    """

    def __init__(self, index: str | PathLike[str], vector_name: str | None = None) -> None:
        self._where, self._vector_name = str(index), vector_name
        self._open: embq.Index | None = None
        self._lock = threading.Lock()

    def search(self, text: str, k: int, where: Sequence[Any]) -> list[Result]:
        """The k nearest rows that satisfy the conditions, best first."""
        if is_server(self._where):
            return embq.search(self._where, text, k=k, where=where, vector_name=self._vector_name)
        with self._lock:
            if self._open is None:
                self._open = embq.Index(self._where, self._vector_name)
            results: list[Result] = self._open.search(text, k, where=where)
            return results


def fields_of(result: Result) -> dict[str, Any]:
    """Metadata of a result: id, key, score and source, and its own columns; `input_score` for a column called score."""
    ours = {"id": result.id, "key": result.key, "score": result.score, "source": result.source}
    return {**{PREFIX + name if name in ours else name: value for name, value in result.metadata.items()}, **ours}


def text_of(result: Result) -> str:
    """The text of a result; of an image without a caption, its key."""
    return result.caption if result.caption is not None else result.key
