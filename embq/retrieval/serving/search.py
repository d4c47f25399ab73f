"""Answers queries: `/knn-service` and `/metadata` like clip-retrieval, `/search` like `embq search --json`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from embq.core.errors import InputError, OutputError, SampleError
from embq.retrieval.searching.local import check_ids, complete_vector, embed_query, nearest_of, results_of
from embq.retrieval.searching.query import Query, Result, ServedAnswer, not_embedded
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.image_url import fetch_image
from embq.retrieval.serving.indices import Indices
from embq.retrieval.serving.metrics import Metrics, Steps
from embq.retrieval.serving.query_images import QueryImages
from embq.retrieval.serving.query_models import QueryModels
from embq.retrieval.serving.requests import KnnRequest, RowsRequest
from embq.retrieval.serving.served_index import OpenVersion, VersionInfo

if TYPE_CHECKING:
    import pyarrow as pa

    from embq.index.filter.columns import ColumnValues
    from embq.index.filter.selection import Selection

_FETCHES = 8
"""Images by URL that are fetched at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnAnswer:
    """JSON-ready results, and what stands in the headers."""

    results: list[dict[str, Any]]
    version: str
    not_applied: tuple[str, ...] = ()
    server_timing: str = ""


TIMED = {"filter_ms": "filter", "embed_ms": "embed", "search_ms": "knn", "rows_ms": "rows"}
"""Times in the answer of `/search` -> steps."""


class Search:
    """Answers queries. Each method raises EmbqError if there is no answer.

    Args:
        images: prepares the images of queries for `models`.
        image_urls: whether images may be fetched by their URLs.
    """

    def __init__(
        self, indices: Indices, models: QueryModels, images: QueryImages, metrics: Metrics, *, image_urls: bool
    ) -> None:
        self._indices, self._models, self._images, self._metrics = indices, models, images, metrics
        self._image_urls = image_urls
        self._fetches = anyio.CapacityLimiter(_FETCHES)

    async def knn(self, request: KnnRequest) -> KnnAnswer:
        """The nearest rows, for `/knn-service`."""
        query = request.query
        index, has_modality = self._indices.of(query.index, query.modality)
        steps = Steps(self._metrics)
        with index.use() as version:
            if request.image_url:
                query = replace(query, image=await self._fetch(request.image_url, steps))
            vector = await self._vector(query, version, steps)
            search = partial(_knn_results, request, version, vector, steps, index.modality)
            results, compared = await anyio.to_thread.run_sync(search, limiter=version.turn)
        not_applied = [*request.not_applied]
        not_applied += ["modality"] if not has_modality else []
        not_applied += ["deduplicate"] if request.deduplicate and not compared else []
        return KnnAnswer(
            results=results,
            version=version.info.name,
            not_applied=tuple(not_applied),
            server_timing=steps.server_timing(),
        )

    async def rows(self, request: RowsRequest) -> KnnAnswer:
        """Rows by their ids, for `/metadata`."""
        index, has_modality = self._indices.of(request.index, request.modality)
        with index.use() as version:
            unknown = [i for i in request.ids if i >= version.info.ids]
            if unknown:
                raise HttpError(
                    f"index {index.name!r} has no row {unknown[0]:,}; its ids are 0 to {version.info.ids - 1:,}",
                    code="no_such_id",
                    next_step="ask for ids that /knn-service has given",
                    status=404,
                )
            rows = await anyio.to_thread.run_sync(rows_of, version, request.ids, index.modality, limiter=version.turn)
        results = [{"id": i, "metadata": row} for i, row in zip(request.ids, rows, strict=True)]
        return KnnAnswer(results=results, version=version.info.name, not_applied=() if has_modality else ("modality",))

    async def search(self, query: Query) -> ServedAnswer:
        """The answer of `/search`: that of `embq search --json`, with the name and version of the index."""
        index = self._indices.only(query.index, query.modality)
        began, steps = time.perf_counter(), Steps(self._metrics)
        with index.use() as version:
            among = None
            if query.where:
                # Before the model is waited for: a wrong condition is an error at once.
                select = partial(_selected, query, version, steps)
                among = await anyio.to_thread.run_sync(select, limiter=version.turn)
            try:
                vector = await self._vector(query, version, steps)
            except SampleError as error:
                raise not_embedded(error) from error
            search = partial(_search_results, query, version, vector, among, steps)
            results = await anyio.to_thread.run_sync(search, limiter=version.turn)
        timing = {"load_s": time.perf_counter() - began - sum(steps.seconds.values())}
        for name, step in TIMED.items():
            timing[name] = 1000 * steps.seconds.get(step, 0.0)
        return ServedAnswer(results=results, timing=timing, index=index.name, version=version.info.name)

    async def columns(self, index: str, modality: str) -> tuple[ColumnValues, ...]:
        """The columns that `where` of `/search` may name.

        Args:
            index, modality: as in the body of `/search`.
        """
        with self._indices.only(index, modality).use() as version:
            return await anyio.to_thread.run_sync(version.searcher.columns, limiter=version.turn)

    async def _vector(self, query: Query, version: OpenVersion, steps: Steps) -> np.ndarray:
        """The query as float32 (d,)."""
        info = version.info
        check_ids(query, info.ids)
        embedded = None
        if query.text is not None or query.image is not None:
            with steps.step("embed"):
                embedded = await self._embedded(query, info)
        complete = partial(complete_vector, version.searcher, query, embedded, "cosine" if info.cosine else "ip")
        if not query.excluded:
            return complete()
        return await anyio.to_thread.run_sync(complete, limiter=version.turn)

    async def _embedded(self, query: Query, info: VersionInfo) -> np.ndarray:
        if not isinstance(query.image, bytes):
            return await self._models.embed(info, lambda model: embed_query(model, query))
        prepared = await self._images.prepare(info, query.image)
        return await self._models.embed(info, lambda model: model.prepared_image(prepared))

    async def _fetch(self, url: str, steps: Steps) -> bytes:
        if not self._image_urls:
            raise HttpError(
                "this server fetches no images by their URLs",
                code="image_url_off",
                next_step="send the image in base64 as `image`, or start the server with --fetch-image-urls",
                status=403,
            )
        with steps.step("fetch"):
            return await anyio.to_thread.run_sync(fetch_image, url, limiter=self._fetches)


def _selected(query: Query, version: OpenVersion, steps: Steps) -> Selection:
    with steps.step("filter"):
        return version.searcher.select(query.where)


def _search_results(
    query: Query, version: OpenVersion, vector: np.ndarray, among: Selection | None, steps: Steps
) -> list[Result]:
    """The results, best first, with values that JSON can hold."""
    with steps.step("knn"):
        neighbours = nearest_of(version.searcher, query, vector[None], among)
    with steps.step("rows"):
        ids, scores, rows = neighbours.ids[0], neighbours.scores[0], version.searcher.rows
        results = results_of(ids, scores, rows, k=query.k, offset=query.offset, excluded=query.excluded)
    return [replace(hit, metadata={name: json_value(value) for name, value in hit.metadata.items()}) for hit in results]


def _knn_results(
    request: KnnRequest, version: OpenVersion, vector: np.ndarray, steps: Steps, modality: str
) -> tuple[list[dict[str, Any]], bool]:
    """Ids and similarities, best first, the first `request.rows` of them with the columns of their rows.

    The second value is whether near-duplicates could be looked for.
    """
    with steps.step("knn"):
        neighbours = version.searcher.search(vector[None], min(request.query.k, version.info.ids))
    valid = neighbours.ids[0] >= 0
    ids, scores = neighbours.ids[0][valid], neighbours.scores[0][valid]
    compared = True
    if request.deduplicate and len(ids) > 1:
        try:
            with steps.step("duplicates"):
                stay = first_of_each(version.searcher.vectors(ids))
            ids, scores = ids[stay], scores[stay]
        except InputError as error:
            if error.code != "no_vectors":
                raise
            compared = False
    with steps.step("rows"):
        rows = rows_of(version, ids[: request.rows].tolist(), modality)
    ends = [{"id": i, "similarity": score} for i, score in zip(ids.tolist(), scores.tolist(), strict=True)]
    return [{**row, **end} for row, end in zip(rows, ends, strict=False)] + ends[len(rows) :], compared


_OWN = ("id", "unit_id")
"""Columns that clients of clip-retrieval do not expect in a row."""


def rows_of(version: OpenVersion, ids: Sequence[int], modality: str) -> list[dict[str, Any]]:
    """The columns of rows, in the order of their ids, as flat JSON objects.

    Rows of images have their key as `image_path` too, the field of clip-retrieval's metadata that its page reads.
    """
    if not ids:
        return []
    table: pa.Table = version.searcher.rows(np.asarray(ids, np.int64))
    if table.num_rows != len(ids):
        raise OutputError(
            f"the index has no record of {len(ids) - table.num_rows} of {len(ids)} rows that it found",
            next_step="build it again: embq index build OUT --overwrite",
            code="index_damaged",
        )
    names = [name for name in table.column_names if name not in _OWN]
    columns = [[json_value(value) for value in table.column(name).to_pylist()] for name in names]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    if modality == "image" and "image_path" not in names and "key" in names:
        rows = [{"image_path": row["key"], **row} for row in rows]
    return rows


def json_value(value: object) -> object:
    """A value that JSON can hold: NaN and infinities become null, values of other types become text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(name): json_value(item) for name, item in value.items()}
    return str(value)


THRESHOLD = 0.94
"""Cosine from which two vectors count as the same; clip-retrieval's threshold, so that answers have as many results."""

_BLOCK = 1024
"""Rows that are compared with all others at once: 10,000 results make 40 MB of cosines."""


def first_of_each(vectors: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    """Mask of the rows that stay when only the first of each group of near-duplicates does.

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
