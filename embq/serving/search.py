"""`/knn-service`: a query becomes a vector, the vector ids, the ids rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from core.errors import InputError, OutputError, SampleError
from embq.searching.local import results_of
from embq.searching.query import not_embedded
from embq.searching.vectors import checked_vector
from embq.serving.http_errors import Refusal
from embq.serving.image_url import fetch_image
from embq.serving.indices import Indices
from embq.serving.metrics import Metrics, Steps
from embq.serving.query_models import Models, QueryModel
from embq.serving.requests import KnnRequest, RowsRequest, SearchRequest
from embq.serving.served_index import Open

if TYPE_CHECKING:
    import pyarrow as pa

    from embq.serving.served_index import Open

SCHEMA = 1
"""Of the question and the answer; `/health` says it, so that a client of another version need not guess."""


class Searches:
    """Answers questions."""

    def __init__(self, indices: Indices, models: Models, metrics: Metrics) -> None:
        self._indices, self._models, self._metrics = indices, models, metrics

    async def answer(self, asked: SearchRequest) -> dict[str, Any]:
        """What `embq search --json` prints, with the name and version of the index that answered.

        Raises EmbqError where there is no answer.
        """
        index = self._indices.meant(asked.index, asked.modality)
        began, steps = time.perf_counter(), Steps(self._metrics)
        with index.use() as held:
            query = await self._query(asked, held, steps)
            results = await anyio.to_thread.run_sync(
                partial(_searches_results, asked, held, query, steps), limiter=held.turn
            )
            version = held.version.name
        in_steps = sum(steps.seconds.values())
        timing = {f"{told}_ms": 1000 * steps.seconds.get(name, 0.0) for told, name in _STEPS.items()}
        timing = {"load_s": time.perf_counter() - began - in_steps, **timing}
        return {
            "schema": SCHEMA,
            "results": results,
            "timing": {name: round(value, 3) for name, value in timing.items()},
            "index": index.name,
            "version": version,
        }

    async def _query(self, asked: SearchRequest, held: Open, steps: Steps) -> np.ndarray:
        """float32 (d,)."""
        version, vector = held.version, asked.vector
        if asked.id is not None:
            if not 0 <= asked.id < version.ids:
                raise Refusal(
                    f"the index has no row {asked.id}: its ids go from 0 to {version.ids - 1}",
                    code="no_such_id",
                    next_step="ask for an id that a search has given",
                    status=404,
                )
            vector = await anyio.to_thread.run_sync(held.searchable.vector_of, asked.id, limiter=held.turn)
        elif vector is None:
            try:
                with steps.step("embed"):
                    vector = await self._models.embed(version, partial(embedded, asked.text, asked.image))
            except SampleError as error:
                raise not_embedded(error) from error
        return checked_vector(vector, version.dim, "cosine" if version.cosine else "ip")


_STEPS = {"embed": "embed", "search": "knn", "rows": "rows"}
"""What `embq search` calls a step -> its name in the metrics."""


def _searches_results(asked: SearchRequest, held: Open, query: np.ndarray, steps: Steps) -> list[dict[str, Any]]:
    """The results as `Result.describe` gives them, best first, with values that JSON can hold."""
    with steps.step("knn"):
        wanted = min(asked.k + (asked.id is not None), held.version.ids)
        found = held.searchable.search(query[None], wanted, nprobe=asked.nprobe, refine=asked.refine)
    with steps.step("rows"):
        results = results_of(found.ids[0], found.scores[0], held.searchable.rows, k=asked.k, but=asked.id)
    return [
        replace(one, metadata={name: json_value(value) for name, value in one.metadata.items()}).describe()
        for one in results
    ]


_OWN = ("id", "unit_id")


def rows_of(held: Open, ids: Sequence[int], modality: str) -> list[dict[str, Any]]:
    """The columns of rows, in the order of their ids, without the id itself and without what is embq's own business.

    Rows of images have their key as `image_path` too: so the field is called in clip-retrieval's metadata, whose
    page and users look for it.
    """
    if not ids:
        return []
    table: pa.Table = held.searchable.rows(np.asarray(ids, np.int64))
    if table.num_rows != len(ids):
        raise OutputError(
            f"the index has no record of {len(ids) - table.num_rows} of {len(ids)} rows that it found",
            next_step="build it again: embq index OUT --rebuild",
            code="index_damaged",
        )
    names = [name for name in table.column_names if name not in _OWN]
    columns = [[json_value(value) for value in table.column(name).to_pylist()] for name in names]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    if modality == "image" and "image_path" not in names and "key" in names:
        rows = [{"image_path": row["key"], **row} for row in rows]
    return rows


def json_value(value: object) -> object:
    """A value that JSON can hold: NaN and infinities become null, what JSON has no type for becomes text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    if isinstance(value, dict):
        return {str(name): json_value(one) for name, one in value.items()}
    return str(value)


THRESHOLD = 0.94
"""Cosine from which two vectors count as the same; clip-retrieval's number, so that answers have as many results."""

_BLOCK = 1024
"""Rows that are compared with all others at once: 10,000 results make 40 MB of cosines."""


def first_of_each(vectors: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    """Which rows stay when of each group of near-duplicates only the first one does.

    Args:
        vectors: (n, d), of any length; best result first.

    Returns:
        bool (n,). Two rows are in one group when a chain of rows leads from one to the other, each step of it with a
        cosine of `threshold` or more. A zero vector is alone.
    """
    n = len(vectors)
    vectors = vectors.astype(np.float32, copy=False)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(norms == 0, 1, norms)
    # The group of a row is named after its first row. Rows are compared with those before them only.
    group = np.arange(n)
    for start in range(0, n, _BLOCK):
        alike = units[start : start + _BLOCK] @ units[: start + _BLOCK].T >= threshold
        for row, those in enumerate(alike, start):
            near = group[: row + 1][those[: row + 1]]
            if len(near) and (near != (least := near.min())).any():
                group[np.isin(group, near)] = least
    stay: np.ndarray = group == np.arange(n)
    return stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What goes back: JSON-ready results, and what stands in the headers."""

    results: list[dict[str, Any]]
    version: str
    not_applied: tuple[str, ...] = ()
    server_timing: str = ""


class Knn:
    """Answers queries.

    Args:
        image_urls: whether images may be fetched by their URLs.
    """

    def __init__(self, indices: Indices, models: Models, metrics: Metrics, *, image_urls: bool) -> None:
        self._indices, self._models, self._metrics = indices, models, metrics
        self._image_urls = image_urls
        self._fetches = anyio.CapacityLimiter(8)

    async def nearest(self, asked: KnnRequest) -> Answer:
        """The nearest rows. Raises EmbqError where there is no answer."""
        index, has_modality = self._indices.of(asked.index, asked.modality)
        steps = Steps(self._metrics)
        with index.use() as held:
            vector = await self._vector(asked, held, steps)
            search = partial(_results, asked, held, vector, steps, index.modality)
            results, compared = await anyio.to_thread.run_sync(search, limiter=held.turn)
        not_applied = [*asked.not_applied]
        not_applied += ["modality"] if not has_modality else []
        not_applied += ["deduplicate"] if asked.deduplicate and not compared else []
        return Answer(
            results=results,
            version=held.version.name,
            not_applied=tuple(not_applied),
            server_timing=steps.server_timing(),
        )

    async def rows(self, asked: RowsRequest) -> Answer:
        """Rows by their ids."""
        index, has_modality = self._indices.of(asked.index, asked.modality)
        with index.use() as held:
            unknown = [i for i in asked.ids if i >= held.version.ids]
            if unknown:
                raise Refusal(
                    f"index {index.name!r} has no row {unknown[0]:,}; its ids are 0 to {held.version.ids - 1:,}",
                    code="no_such_id",
                    next_step="ask for ids that /knn-service has given",
                    status=404,
                )
            rows = await anyio.to_thread.run_sync(rows_of, held, asked.ids, index.modality, limiter=held.turn)
        results = [{"id": i, "metadata": row} for i, row in zip(asked.ids, rows, strict=True)]
        return Answer(results=results, version=held.version.name, not_applied=() if has_modality else ("modality",))

    async def _vector(self, asked: KnnRequest, held: Open, steps: Steps) -> np.ndarray:
        """The query as float32 (1, d)."""
        vector = asked.vector
        if vector is None:
            image = asked.image
            if asked.image_url is not None:
                image = await self._fetched(asked.image_url, steps)
            with steps.step("embed"):
                vector = await self._models.embed(held.version, partial(embedded, asked.text, image))
        if vector.shape != (held.version.dim,):
            raise Refusal(
                f"the query has {vector.size:,} numbers, and the vectors of the index have {held.version.dim:,}",
                code="wrong_dimension",
                next_step="send a vector of the index's own model; GET /health names it",
            )
        if held.version.cosine:
            # In float64: the length of a vector of large float32 numbers is finite there.
            vector = vector / np.linalg.norm(vector.astype(np.float64))
        return np.ascontiguousarray(vector, np.float32)[None]

    async def _fetched(self, url: str, steps: Steps) -> bytes:
        if not self._image_urls:
            raise Refusal(
                "this server fetches no images by their URLs",
                code="image_url_off",
                next_step="send the image in base64 as `image`, or start the server with --fetch-image-urls",
                status=403,
            )
        with steps.step("fetch"):
            return await anyio.to_thread.run_sync(fetch_image, url, limiter=self._fetches)


def embedded(text: str | None, image: bytes | None, model: QueryModel) -> np.ndarray:
    """The vector of a text or an image, float32 (d,)."""
    if text is not None:
        return model.text(text)
    assert image is not None
    return model.image(image)


def _results(
    asked: KnnRequest, held: Open, vector: np.ndarray, steps: Steps, modality: str
) -> tuple[list[dict[str, Any]], bool]:
    """Ids and similarities, best first, the first `asked.rows` of them with the columns of their rows.

    Also says whether results could be compared with each other.
    """
    with steps.step("knn"):
        found = held.searchable.search(vector, min(asked.results, held.version.ids))
    there = found.ids[0] >= 0
    ids, scores = found.ids[0][there], found.scores[0][there]
    compared = True
    if asked.deduplicate and len(ids) > 1:
        try:
            with steps.step("duplicates"):
                stay = first_of_each(held.searchable.vectors(ids))
            ids, scores = ids[stay], scores[stay]
        except InputError as error:
            if error.code != "no_vectors":
                raise
            compared = False
    with steps.step("rows"):
        rows = rows_of(held, ids[: asked.rows].tolist(), modality)
    ends = [{"id": i, "similarity": score} for i, score in zip(ids.tolist(), scores.tolist(), strict=True)]
    return [{**row, **end} for row, end in zip(rows, ends, strict=False)] + ends[len(rows) :], compared
