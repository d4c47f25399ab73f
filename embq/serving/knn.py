"""`/knn-service`: a query becomes a vector, the vector ids, the ids rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import numpy as np

from core.errors import InputError
from embq.serving.duplicates import first_of_each
from embq.serving.image_url import fetch_image
from embq.serving.indices import Indices
from embq.serving.knn_request import KnnRequest, RowsRequest
from embq.serving.metrics import Metrics, Steps
from embq.serving.models import Models, QueryModel
from embq.serving.refusals import Refusal
from embq.serving.rows import rows_of
from embq.serving.served_index import Open


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
