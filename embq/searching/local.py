"""Asking an index of this machine one question: what `embq search` and `embq.search` do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import InputError, SampleError
from embq.searching.query import IDENTITY, Answer, Question, Result, not_embedded, read_image
from embq.searching.vectors import checked_vector, first_vector, read_vector

if TYPE_CHECKING:
    import pyarrow as pa

    from embq.searching.embedding import QueryEmbedder
    from indexer.searcher import Searcher


def ask(
    index: Path, question: Question, *, output: str | None = None, on_load: Callable[[str], None] | None = None
) -> Answer:
    """Ask the current version of an index.

    Args:
        index: its folder, a version in it, which is asked then, or the output folder of a run.
        output: which of a run's vectors, where it has several indices.
        on_load: called with a model's spec before it is loaded, where that takes long.

    Raises UsageError for a question that is none, InputError for one that cannot be answered and where there is no
    index, ModelError where the query cannot be embedded, OutputError where the index is damaged.
    """
    question.check()
    clock = _Clock()
    vector = read_vector(question.vector) if isinstance(question.vector, Path) else question.vector
    image = read_image(question.image) if isinstance(question.image, Path) else question.image
    searcher = open_index(index, output)
    try:
        embedder = _embedder(searcher, question, on_load)
        clock.lap("load_s", per_s=1)
        query = _query(searcher, question, vector, image, embedder)
        clock.lap("embed_ms")
        found = searcher.search(query[None], _wanted(question), nprobe=question.nprobe, refine=question.refine)
        clock.lap("search_ms")
        results = results_of(found.ids[0], found.scores[0], searcher.rows, k=question.k, but=question.id)
        clock.lap("rows_ms")
    finally:
        searcher.close()
    return Answer(results=results, timing=clock.laps)


def open_index(index: Path, output: str | None) -> Searcher:
    """What a path names, mapped into memory: of an index no more is read than a question looks at."""
    from indexer.index_files.version import RECORD, resolve_index
    from indexer.searcher import Searcher

    folder = resolve_index(index, output)
    version = index.name if folder == index.parent and (index / RECORD).exists() else None
    return Searcher.open(folder, memory="mmap", version=version)


def _embedder(searcher: Searcher, question: Question, on_load: Callable[[str], None] | None) -> QueryEmbedder | None:
    """What embeds the question, loaded; None where it is a vector already."""
    if question.text is None and question.image is None:
        return None
    from embq.searching.embedding import QueryEmbedder

    collection = searcher.version.collection
    embedder = QueryEmbedder.open(
        collection.model,
        collection.rows_spec,
        collection.fingerprint,
        prompt=question.prompt,
        prompt_text=question.prompt_text,
        spec=question.model,
        on_load=on_load,
    )
    embedder.load("text" if question.text is not None else "image")
    return embedder


def _query(
    searcher: Searcher,
    question: Question,
    vector: Any,
    image: bytes | None,
    embedder: QueryEmbedder | None,
) -> np.ndarray:
    """float32 (dim,)."""
    plan = searcher.version.plan
    if question.id is not None:
        if not 0 <= question.id < searcher.version.next_id:
            raise InputError(
                f"the index has no row {question.id}: its ids go from 0 to {searcher.version.next_id - 1}",
                code="no_such_id",
            )
        asked = searcher.vector_of(question.id)
    elif vector is not None:
        try:
            asked = first_vector(np.asarray(vector))
        except (TypeError, ValueError) as error:
            raise InputError(f"the query is no vector: {error}", code="bad_query") from error
    else:
        assert embedder is not None
        try:
            asked = embedder.image(image) if image is not None else embedder.text(question.text or "")
        except SampleError as error:
            raise not_embedded(error) from error
    return checked_vector(asked, plan.dim, plan.metric)


def _wanted(question: Question) -> int:
    return question.k + (question.id is not None)


def results_of(
    ids: np.ndarray, scores: np.ndarray, rows_of: Callable[[np.ndarray], pa.Table], *, k: int, but: int | None = None
) -> list[Result]:
    """The neighbours of one query with their rows, best first.

    Args:
        ids, scores: of the neighbours, int64 and float32 (n,), best first; an id of -1 is none.
        rows_of: the rows with some ids, int64 (n,), in their order.
        k: at most so many.
        but: a row that is left out, for one that is asked for its neighbours is its own nearest.
    """
    kept = [(int(id_), float(score)) for id_, score in zip(ids, scores, strict=True) if id_ >= 0 and id_ != but][:k]
    rows = rows_of(np.array([id_ for id_, _ in kept], np.int64)).to_pylist()
    return [
        Result(
            rank=rank,
            id=id_,
            key=row["key"],
            score=score,
            caption=row.get("caption"),
            source=row.get("source"),
            metadata={name: value for name, value in row.items() if name not in IDENTITY},
        )
        for rank, ((id_, score), row) in enumerate(zip(kept, rows, strict=True), start=1)
    ]


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str, *, per_s: int = 1000) -> None:
        now = time.perf_counter()
        self.laps[name] = round((now - self._since) * per_s, 3)
        self._since = now
