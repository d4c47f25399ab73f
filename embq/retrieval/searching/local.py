"""`embq search` and `embq.search` on an index of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embq.core.errors import InputError, SampleError
from embq.core.rows.metadata import INDEX_COLUMNS, column_in_file
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import is_url, place
from embq.retrieval.searching.query import Answer, Query, Result, not_embedded

if TYPE_CHECKING:
    import pyarrow as pa

    from embq.index.filter.selection import Selection
    from embq.index.searcher import Searcher, SearchResult
    from embq.retrieval.searching.embedding import QueryEmbedder


def search_local(
    index: str | Path, query: Query, *, output: str | None = None, on_load: Callable[[str], None] | None = None
) -> Answer:
    """Search the current version of an index, as `OpenIndex` opens it.

    Raises as `OpenIndex`, and as its `answer`.
    """
    query = query.loaded()
    since = time.perf_counter()
    with OpenIndex(index, output, on_load=on_load) as opened:
        opened_s = time.perf_counter() - since
        answer = opened.answer(query)
    answer.timing["load_s"] = round(answer.timing["load_s"] + opened_s, 3)
    return answer


class OpenIndex:
    """An index of this machine with the model of its queries, both open for many searches. One thread at a time.

    Args:
        index: its folder, one of its versions, or the output folder of a run; s3:// and gs:// URLs of the first and the
            last are fetched into the cache.
        output: which of a run's vectors, if it has several indexes.
        on_load: called with what is loaded or fetched, such as a model's spec, if that takes long.

    Raises InputError if there is no index, OutputError if it is damaged.
    """

    def __init__(self, index: str | Path, output: str | None, *, on_load: Callable[[str], None] | None = None) -> None:
        self.searcher = open_index(index, output, on_load)
        self._on_load = on_load
        self._embedder: QueryEmbedder | None = None
        self._embedder_options: dict[str, str | None] = {}

    def __enter__(self) -> OpenIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.searcher.close()

    def answer(self, query: Query) -> Answer:
        """The answer to a query that is `loaded`; raises as `answers`."""
        timing = {"load_s": 0.0}
        (results,) = self.answers([query], timing)
        return Answer(results=results, timing=timing)

    def answers(self, queries: Sequence[Query], timing: dict[str, float] | None = None) -> list[list[Result]]:
        """The results of queries that are `loaded` and have all in common but what is searched for.

        Args:
            timing: gets the keys of `Answer.timing`.

        Raises InputError for a query that cannot be answered, ModelError if it cannot be embedded, OutputError if the
        index is damaged.
        """
        if not queries:
            return []
        query, searcher = queries[0], self.searcher
        since = time.perf_counter()

        def lap(name: str, per_s: int = 1000) -> None:
            nonlocal since
            now = time.perf_counter()
            if timing is not None:
                timing[name] = round(timing.get(name, 0.0) + (now - since) * per_s, 3)
            since = now

        # Before the model is loaded, which takes seconds: a wrong condition is an error at once.
        among = searcher.select(query.where) if query.where else None
        lap("filter_ms")
        for each in queries:
            self._load(each)
        lap("load_s", per_s=1)
        vectors = np.stack([self._vector(each) for each in queries])
        lap("embed_ms")
        nearest = nearest_of(searcher, query, vectors, among)
        lap("search_ms")
        results = [
            results_of(ids, scores, searcher.rows, k=query.k, offset=query.offset, excluded=each.excluded)
            for ids, scores, each in zip(nearest.ids, nearest.scores, queries, strict=True)
        ]
        lap("rows_ms")
        return results

    def _load(self, query: Query) -> None:
        """Load the model for a text or an image, unless it is loaded with the same prompt."""
        if query.text is None and query.image is None:
            return
        from embq.retrieval.searching.embedding import QueryEmbedder

        options = {"prompt_name": query.prompt_name, "prompt": query.prompt, "spec": query.model}
        if self._embedder is None or self._embedder_options != options:
            of = self.searcher.version.collection
            self._embedder = QueryEmbedder.open(
                of.model, of.rows_spec, of.fingerprint, on_load=self._on_load, **options
            )
            self._embedder_options = options
        self._embedder.load("text" if query.text is not None else "image")

    def _vector(self, query: Query) -> np.ndarray:
        """float32 (dim,)."""
        check_ids(query, self.searcher.version.next_id)
        vector = None
        if query.text is not None or query.image is not None:
            assert self._embedder is not None
            try:
                vector = embed_query(self._embedder, query)
            except SampleError as error:
                raise not_embedded(error) from error
        return complete_vector(self.searcher, query, vector, self.searcher.version.plan.metric)


def open_index(index: str | Path, output: str | None, on_load: Callable[[str], None] | None = None) -> Searcher:
    """Open an index memory-mapped: only what a query touches is read."""
    from embq.index.index_files.files import asking
    from embq.index.index_files.remote import fetched
    from embq.index.index_files.version import RECORD, resolve_index
    from embq.index.searcher import Searcher

    where = place(index) if is_url(str(index)) else Path(index)
    if isinstance(where, ObjectPath):
        with asking(where):
            source = resolve_index(where, output)
        return Searcher.open(fetched(source, on_load=on_load), memory="mmap")
    folder = resolve_index(where, output)
    version = where.name if folder == where.parent and (where / RECORD).exists() else None
    return Searcher.open(folder, memory="mmap", version=version)


def check_ids(query: Query, ids: int) -> None:
    """Raise InputError `no_such_id` if a query names a row that is not among the `ids` rows of an index."""
    unknown = [id_ for id_ in sorted(query.excluded) if not 0 <= id_ < ids]
    if unknown:
        raise InputError(
            f"the index has no row {unknown[0]}: its ids go from 0 to {ids - 1}",
            code="no_such_id",
            next_step="ask for an id that a search has given: `embq search --json` shows them",
        )


LIKE, UNLIKE = 1.0, 0.5
"""Weights of the means of the examples beside the query, which has 1 (Rocchio). The usual 0.75 and 0.15 (Manning,
Raghavan, Schütze: Introduction to Information Retrieval, 9.1.1) are for many judged texts; for one example of each kind
they are weak: of the 8 best rows for words of two meanings 79 % had the wanted one with minilm, with 1 and 0.5 85 %."""


def complete_vector(searcher: Searcher, query: Query, embedded: np.ndarray | None, metric: str) -> np.ndarray:
    """The vector of a query, of its row or its examples, as the index expects it, float32 (dim,).

    Args:
        embedded: of the text or the image; None if there is neither.

    Raises as `checked_vector`, and InputError `no_vectors` if the vectors of the rows are gone.
    """
    ids = list(query.excluded)
    rows = dict(zip(ids, searcher.vectors_of(np.array(ids, np.int64)), strict=True)) if ids else {}

    def checked(vector: np.ndarray) -> np.ndarray:
        return checked_vector(vector, searcher.dim, metric)

    weighted: list[tuple[float, np.ndarray]] = []
    if query.id is not None:
        weighted.append((1.0, checked(rows[query.id])))
    elif embedded is not None:
        weighted.append((1.0, checked(embedded)))
    elif query.vector is not None:
        weighted.append((1.0, checked(np.array(query.vector, np.float64))))
    if not (query.like or query.unlike):
        return weighted[0][1]
    for weight, examples in ((LIKE, query.like), (-UNLIKE, query.unlike)):
        if examples:
            weighted.append((weight, np.mean([checked(rows[example]) for example in examples], axis=0)))
    # Divided by the sum of the weights, which metric l2 needs: there a vector has a place and not only a direction.
    total = sum(weight for weight, _ in weighted)
    return checked(np.sum([weight / total * vector for weight, vector in weighted], axis=0))


def nearest_of(searcher: Searcher, query: Query, vectors: np.ndarray, among: Selection | None) -> SearchResult:
    """The neighbours of queries, those that `results_of` skips and excludes among them.

    Args:
        query: one of them, for what they have in common.
        vectors: float32 (n, dim).
        among: the rows that satisfy its conditions; None without conditions.
    """
    count = min(query.offset + query.k + len(query.excluded), max(1, searcher.version.next_id))
    return searcher.search(vectors, count, nprobe=query.nprobe, refine=query.refine, among=among, fill=query.offset > 0)


def embed_query(model: QueryEmbedder, query: Query) -> np.ndarray:
    """The vector of a text or an image, float32 (d,)."""
    if query.text is not None:
        return model.text(query.text)
    assert isinstance(query.image, bytes)
    return model.image(query.image)


def checked_vector(vector: np.ndarray, dim: int, metric: str) -> np.ndarray:
    """A query vector as the index expects it, float32 (dim,); of length 1 for metric cosine.

    Raises InputError `wrong_dimension`, and `bad_query` if a number is not finite or all are zero.
    """
    if vector.shape != (dim,):
        raise InputError(
            f"the index holds vectors of {dim} numbers, the query has {vector.shape[-1] if vector.ndim else 0}",
            next_step="embed the query with the model of the index",
            code="wrong_dimension",
        )
    # In float64: the length of a vector of large float32 numbers is finite there.
    vector64 = vector.astype(np.float64)
    with np.errstate(over="ignore"):
        in_range = np.isfinite(vector64.astype(np.float32)).all()
    if not in_range:
        raise InputError("the query has numbers that are not finite", code="bad_query")
    length = float(np.linalg.norm(vector64))
    if length == 0.0 and metric != "l2":
        raise InputError(
            "all numbers of the query are zero: it has no direction",
            next_step="give a vector that the model of the index has made",
            code="bad_query",
        )
    return np.asarray(vector64 / length if metric == "cosine" else vector64, dtype=np.float32)


def results_of(
    ids: np.ndarray,
    scores: np.ndarray,
    rows_of: Callable[[np.ndarray], pa.Table],
    *,
    k: int,
    offset: int = 0,
    excluded: Collection[int] = (),
) -> list[Result]:
    """The neighbours of one query with their rows, best first.

    Args:
        ids, scores: of the neighbours, int64 and float32 (n,), best first; an id of -1 is none.
        rows_of: the rows with some ids, int64 (n,), in their order.
        k: at most this many.
        offset: results to skip.
        excluded: ids of rows that are left out: a row is its own nearest neighbour.
    """
    hits = [
        (int(id_), float(score)) for id_, score in zip(ids, scores, strict=True) if id_ >= 0 and id_ not in excluded
    ]
    hits = hits[offset : offset + k]
    rows = rows_of(np.array([id_ for id_, _ in hits], np.int64)).to_pylist()
    return [
        Result(
            rank=rank,
            id=id_,
            key=row["key"],
            score=score,
            caption=row.get("caption"),
            source=row.get("source"),
            metadata={
                column_in_file(name): value
                for name, value in row.items()
                if name not in INDEX_COLUMNS and (name != "metadata" or value is not None)  # what fits no column
            },
        )
        for rank, ((id_, score), row) in enumerate(zip(hits, rows, strict=True), start=offset + 1)
    ]
