"""Searches of many queries in an index that stays open."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_type_hints, overload

import numpy as np

from embq.core.arguments import check, listed, path_text, python_errors, whole_number
from embq.core.errors import EmbqError, InputError, UsageError
from embq.retrieval.results_html import results_html
from embq.retrieval.searching.local import OpenIndex
from embq.retrieval.searching.query import Query, Result, split

PICTURE_PX = 160
"""Long side of a thumbnail in a notebook."""


class Results(list[Result]):
    """The results of one query, best first; a notebook shows them with thumbnails if they are images."""

    def __init__(self, results: Iterable[Result], index: Index) -> None:
        super().__init__(results)
        self._index = index

    def _repr_html_(self) -> str:
        return results_html(self, self._index.pictures([result.id for result in self]))


class BatchOptions(TypedDict, total=False):
    """Options of a search by many queries; see `embq.search`."""

    where: Iterable[Any]
    like: Iterable[int]
    unlike: Iterable[int]
    offset: int
    nprobe: int | None
    refine: bool | None
    prompt_name: str | None
    prompt: str | None
    model: str | None


class SearchOptions(BatchOptions, total=False):
    """Options of a search by one query; see `embq.search`."""

    image: bytes | str | PathLike[str] | None
    vector: Any
    id: int | None


SEARCH_OPTIONS = tuple(get_type_hints(SearchOptions))
"""Names of options of a search."""


class Index:
    """An index that stays open for many searches; `embq.search` opens it for one.

    Args:
        path: folder of an index, of one of its versions, or the output folder of a run; or its s3:// or gs:// URL.
        vector_name: which of a run's vectors, if several are indexed.

    Raises InputError if there is no index, OutputError if it is damaged.
    """

    @python_errors()
    def __init__(self, path: str | PathLike[str], vector_name: str | None = None) -> None:
        at = path_text("path", path)
        check(vector_name=vector_name)
        self._opened = OpenIndex(at, vector_name)
        self._is_closed = False
        self._pictures: _Pictures | None = None

    def __len__(self) -> int:
        return self._opened.searcher.version.next_id

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and end the processes that cut thumbnails."""
        self._is_closed = True
        self._opened.searcher.close()
        if self._pictures is not None:
            self._pictures.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError("the index is closed", next_step="open it again: embq.Index(...)")

    @overload
    def search(
        self, queries: str | bytes | Path | None = None, k: int = 10, **options: Unpack[SearchOptions]
    ) -> Results: ...

    @overload
    def search(self, queries: Sequence[Any], k: int = 10, **options: Unpack[BatchOptions]) -> list[Results]: ...

    @overload
    def search(self, queries: np.ndarray, k: int = 10, **options: Unpack[BatchOptions]) -> Any: ...

    @python_errors()
    def search(self, queries: Any = None, k: int = 10, **options: Any) -> Any:
        """The k nearest rows of each query, best first: a list of `Results`; of one query, `Results`.

        Args:
            queries: a text, an image as a path (`pathlib.Path`) or encoded bytes, or a vector of shape (dim,); several
                of them, or vectors of shape (n, dim). None if `image`, `vector` or `id` is given, or `like` alone.
            options: those of `embq.search` but `name` and `vector_name`.

        The model stays loaded for queries with the same prompt. Raises as `embq.search`.
        """
        self._require_open()
        if unknown := options.keys() - SEARCH_OPTIONS:
            raise UsageError(
                f"searches have no option {min(unknown)}", next_step=f"they have {', '.join(SEARCH_OPTIONS)}"
            )
        base = Query.given(k=k, **options)
        items, is_single = ([], True) if queries is None else split(queries)
        loaded = [base.loaded()] if queries is None else [_loaded(base.of(item)) for item in items]
        answers = [Results(results, self) for results in self._opened.answers(loaded)]
        return answers[0] if is_single else answers

    def pictures(self, ids: Sequence[int]) -> list[str]:
        """Thumbnails of rows as data: URLs; "" if there is none."""
        self._require_open()
        ids = [whole_number(f"ids[{place}]", id_, 0) for place, id_ in enumerate(listed("ids", ids, "ids of rows"))]
        searcher = self._opened.searcher
        collection = searcher.version.collection
        if collection.kind != "run":
            return [""] * len(ids)
        if self._pictures is None:
            self._pictures = _Pictures()
        rows = searcher.rows(np.array(ids, np.int64), ["key", "unit_id"]).to_pylist()
        return [self._pictures.of(collection, id_, row) for id_, row in zip(ids, rows, strict=True)]


def _loaded(query: Query) -> Query:
    if query.vector is None:
        return query.loaded()
    query.check()
    return replace(query, vector=np.asarray(query.vector))  # not a list: there may be many


class _Pictures:
    """Thumbnails from the inputs of runs, within what the settings of this process allow to be read."""

    def __init__(self) -> None:
        from embq.retrieval.ui.thumbnails.decoder import Decoders
        from embq.retrieval.ui.thumbnails.finder import Finder
        from embq.retrieval.ui.thumbnails.images import Images

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
