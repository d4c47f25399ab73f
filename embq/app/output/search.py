"""Searches of many queries in an index that stays open."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from embq.app.output.html import results_html
from embq.app.searching.embedding import QueryEmbedder
from embq.app.searching.local import checked_vector, open_index, results_of
from embq.app.searching.query import Result, not_embedded, read_image
from embq.core.errors import EmbqError, InputError, SampleError, UsageError
from embq.indexer.filter.condition import read_conditions

PICTURE_PX = 160
"""Long side of a thumbnail in a notebook."""


class Results(list[Result]):
    """The results of one query, best first; a notebook shows them with thumbnails if they are images."""

    def __init__(self, results: Iterable[Result], index: Index) -> None:
        super().__init__(results)
        self._index = index

    def _repr_html_(self) -> str:
        return results_html(self, self._index.pictures([result.id for result in self]))


class Index:
    """An index that stays open for many searches; `embq.search` opens one for each.

    Args:
        path: folder of an index, of one of its versions, or the output folder of a run; or its s3:// or gs:// URL.
        vector_name: which of a run's vectors, if several are indexed.

    Raises InputError if there is no index, OutputError if it is damaged.
    """

    def __init__(self, path: str | PathLike[str], vector_name: str | None = None) -> None:
        self._searcher = open_index(str(path), vector_name)
        self._collection = self._searcher.version.collection
        self._embedder: QueryEmbedder | None = None
        self._pictures: _Pictures | None = None

    def __len__(self) -> int:
        return self._searcher.version.next_id

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and end the processes that cut thumbnails."""
        self._searcher.close()
        if self._pictures is not None:
            self._pictures.close()

    def search(self, queries: Any, k: int = 10, *, where: Iterable[Any] = (), nprobe: int | None = None) -> Any:
        """The k nearest rows of each query, best first: a list of `Results`; of one text or image, `Results`.

        Args:
            queries: texts; images as paths (`pathlib.Path`) or encoded bytes; or vectors of shape (n, dim).
            where: conditions that all results satisfy, as `embq.search` takes them.
            nprobe: inverted lists to search; None for the tuned number.

        Raises InputError `no_column`, `bad_filter`, `wrong_dimension`, and if a query cannot be embedded; ModelError
        if the model of the run cannot be loaded.
        """
        if k < 1:
            raise UsageError(f"k is {k}", next_step="ask for one result or more")
        is_single = isinstance(queries, str | bytes | Path)
        matrix = self._matrix([queries] if is_single else queries)
        among = self._searcher.select(read_conditions(where)) if where else None
        neighbours = self._searcher.search(matrix, min(k, max(1, len(self))), nprobe=nprobe, among=among)
        answers = [
            Results(results_of(ids, scores, self._searcher.rows, k=k), self)
            for ids, scores in zip(neighbours.ids, neighbours.scores, strict=True)
        ]
        return answers[0] if is_single else answers

    def pictures(self, ids: Sequence[int]) -> list[str]:
        """Thumbnails of rows as data: URLs; "" if there is none."""
        if self._collection.kind != "run":
            return [""] * len(ids)
        if self._pictures is None:
            self._pictures = _Pictures()
        rows = self._searcher.rows(np.array(ids, np.int64), ["key", "unit_id"]).to_pylist()
        return [self._pictures.of(self._collection, id_, row) for id_, row in zip(ids, rows, strict=True)]

    def _matrix(self, queries: Any) -> np.ndarray:
        metric, dim = self._searcher.version.plan.metric, self._searcher.dim
        items = list(queries)
        if all(isinstance(item, str | bytes | Path) for item in items):
            items = [self._embedded(item) for item in items]
        return (
            np.stack([checked_vector(np.asarray(item), dim, metric) for item in items]) if items else np.empty((0, dim))
        )

    def _embedded(self, item: str | bytes | Path) -> np.ndarray:
        if self._embedder is None:
            of = self._collection
            self._embedder = QueryEmbedder.open(of.model, of.rows_spec, of.fingerprint)
        self._embedder.load("text" if isinstance(item, str) else "image")
        try:
            if isinstance(item, str):
                return self._embedder.text(item)
            return self._embedder.image(read_image(item) if isinstance(item, Path) else item)
        except SampleError as error:
            raise not_embedded(error) from error


class _Pictures:
    """Thumbnails from the inputs of runs, within what the settings of this process allow to be read."""

    def __init__(self) -> None:
        from embq.app.ui.thumbnails.decoder import Decoders
        from embq.app.ui.thumbnails.finder import Finder
        from embq.app.ui.thumbnails.images import Images

        self._images, self._finder, self._decoders = Images(), Finder(), Decoders()

    def of(self, collection: Any, id_: int, row: dict[str, Any]) -> str:
        """The thumbnail of a row; "" if there is none."""
        try:
            origin = self._finder.origin(collection, id_, row["key"], row["unit_id"])
            data = self._images.image(origin.unit, origin.key, origin.ordinal)
            thumbnail = self._decoders.thumbnail(data, PICTURE_PX)
        except (EmbqError, InputError, OSError):
            return ""
        return f"data:image/jpeg;base64,{base64.b64encode(thumbnail).decode()}"

    def close(self) -> None:
        """End the child processes."""
        self._images.close()
        self._decoders.close()
