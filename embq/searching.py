"""Asking an index one question: what `embq search` and `embq.search` do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import EmbqError, InputError, SampleError, UsageError
from embq.query_vectors import checked_vector, first_vector, read_vector

if TYPE_CHECKING:
    from embq.query import QueryEmbedder
    from indexer.searcher import Found, Searcher

IDENTITY = ("id", "key", "caption", "source", "unit_id")
"""Columns of a row that are no metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row that an index found.

    Attributes:
        rank: 1 for the best.
        id: of the row.
        key: of its sample.
        score: its cosine with the query; for vectors that have other lengths than 1 the inner product, and with
            metric l2 the squared distance, of which the smallest is the best.
        caption: its text; None without one.
        source: the input that it came from; None where that is not known.
        metadata: its other columns.
    """

    rank: int
    id: int
    key: str
    score: float
    caption: str | None
    source: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values; metadata only where the index has such columns."""
        said = {name: getattr(self, name) for name in ("rank", "id", "key", "score", "caption", "source")}
        return {**said, "metadata": dict(self.metadata)} if self.metadata else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: exactly one of the first four, and how.

    Attributes:
        text: words.
        image: an encoded image, or the path of its file.
        vector: numbers of shape (d,), or (n, d), of which the first row counts; or the path of a file of them.
        id: of a row, which is itself no answer.
        k: most results.
        nprobe: lists of the index that are looked at; None for what its tuning chose.
        refine: False leaves out the second look at the best rows by their full vectors.
        prompt: name of the model's prompt before the text.
        prompt_text: the prompt itself.
        model: spec of the model where it is not where the run had it.
    """

    text: str | None = None
    image: bytes | Path | None = None
    vector: Any = None
    id: int | None = None
    k: int = 10
    nprobe: int | None = None
    refine: bool | None = None
    prompt: str | None = None
    prompt_text: str | None = None
    model: str | None = None

    def check(self) -> None:
        """Raise UsageError where not exactly one thing is asked, or options do not belong to it."""
        asked = [name for name in ("text", "image", "vector", "id") if getattr(self, name) is not None]
        if len(asked) != 1:
            raise UsageError(
                f"asked by {' and by '.join(asked)}" if asked else "nothing is asked",
                next_step="give one of a text, an image, a vector and the id of a row",
            )
        if self.k < 1:
            raise UsageError(f"k is {self.k}", next_step="ask for one result or more")
        prompted = self.prompt is not None or self.prompt_text is not None
        if prompted and self.text is None:
            raise UsageError("a prompt stands before a text, and none is asked", next_step="leave the prompt out")
        if self.prompt is not None and self.prompt_text is not None:
            raise UsageError("a prompt is named, and another one given", next_step="leave out one of the two")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an index found, and how long that took.

    Attributes:
        results: best first.
        timing: load_s: opening the index and the model; embed_ms: the query; search_ms: its neighbours; rows_ms: their
            keys and captions.
    """

    results: list[Result]
    timing: dict[str, float]


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
    image = _read_image(question.image) if isinstance(question.image, Path) else question.image
    searcher = open_index(index, output)
    try:
        embedder = _embedder(searcher, question, on_load)
        clock.lap("load_s", per_s=1)
        query = _query(searcher, question, vector, image, embedder)
        clock.lap("embed_ms")
        found = searcher.search(query[None], _wanted(question), nprobe=question.nprobe, refine=question.refine)
        clock.lap("search_ms")
        results = _results(searcher, found, question)
        clock.lap("rows_ms")
    finally:
        searcher.close()
    return Answer(results=results, timing=clock.laps)


def open_index(index: Path, output: str | None) -> Searcher:
    """What a path names, mapped into memory: of an index no more is read than a question looks at."""
    from indexer.searcher import Searcher
    from indexer.version import RECORD, resolve_index

    folder = resolve_index(index, output)
    version = index.name if folder == index.parent and (index / RECORD).exists() else None
    return Searcher.open(folder, memory="mmap", version=version)


def _embedder(searcher: Searcher, question: Question, on_load: Callable[[str], None] | None) -> QueryEmbedder | None:
    """What embeds the question, loaded; None where it is a vector already."""
    if question.text is None and question.image is None:
        return None
    from embq.query import QueryEmbedder

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
        asked = _row_vector(searcher, question.id)
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
            raise InputError(f"the query cannot be embedded: {error.message}", code="bad_query") from error
    return checked_vector(asked, plan.dim, plan.metric)


def _row_vector(searcher: Searcher, id_: int) -> np.ndarray:
    """The vector of a row, float32 (dim,): of the index where it keeps it, else of what was indexed.

    InputError `no_vectors` where neither has it any more.
    """
    ids = np.array([id_], np.int64)
    try:
        return np.asarray(searcher.vectors(ids)[0])
    except InputError as error:
        if error.code != "no_vectors":
            raise
        try:
            return np.asarray(searcher.version.collection.read_rows_at(ids)[0])
        except EmbqError as missing:
            raise InputError(
                f"the index keeps no vectors of its rows, and they cannot be read where they were: {missing.message}",
                next_step=error.next_step,
                code="no_vectors",
            ) from missing


def _wanted(question: Question) -> int:
    return question.k + (question.id is not None)


def _results(searcher: Searcher, found: Found, question: Question) -> list[Result]:
    kept = [
        (int(id_), float(score))
        for id_, score in zip(found.ids[0], found.scores[0], strict=True)
        if id_ >= 0 and id_ != question.id
    ][: question.k]
    rows = searcher.rows(np.array([id_ for id_, _ in kept], np.int64)).to_pylist()
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


def _read_image(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}", code="bad_query") from error


def path_of(value: Any) -> Path | None:
    """A path that is text or path-like; None for anything else."""
    return Path(value) if isinstance(value, (str, os.PathLike)) else None


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str, *, per_s: int = 1000) -> None:
        now = time.perf_counter()
        self.laps[name] = round((now - self._since) * per_s, 3)
        self._since = now
