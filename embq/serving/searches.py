"""`/search`: a question of `embq search`, answered as an index on the asker's own disk would answer it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import numpy as np

from core.errors import SampleError
from embq.query_vectors import checked_vector
from embq.question import not_embedded
from embq.searching import results_of
from embq.serving.indices import Indices
from embq.serving.knn import embedded
from embq.serving.metrics import Metrics, Steps
from embq.serving.models import Models
from embq.serving.refusals import Refusal
from embq.serving.rows import json_value
from embq.serving.search_request import SearchRequest
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
            results = await anyio.to_thread.run_sync(partial(_results, asked, held, query, steps), limiter=held.turn)
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


def _results(asked: SearchRequest, held: Open, query: np.ndarray, steps: Steps) -> list[dict[str, Any]]:
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
