"""What `/knn-service` and `/metadata` are asked: clip-retrieval's fields, checked and bounded.

The fields are those that its client and its page send. What cannot be done here is never
an error (its client asks for every filter unless told otherwise): it is named in `not_applied`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embq.serving.fields import (
    MOST_RESULTS,
    count_of,
    image_of,
    is_int,
    modality_of,
    object_of,
    query_text,
    text_of,
    vector_of,
)
from embq.serving.refusals import Refusal

DEFAULT_RESULTS = 40
"""As clip-retrieval's client asks for."""

FILTERS = ("use_mclip", "use_safety_model", "use_violence_detector")
QUERIES = ("text", "image", "image_url", "embedding_input")
"""In the order in which clip-retrieval's back end looks for a query; it takes the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnRequest:
    """One query, of one kind: exactly one of `text`, `image`, `image_url` and `vector` is not None.

    Attributes:
        image: bytes of an image file.
        vector: float32, finite, one row; its length is not checked yet.
        index: name of the index; "" for the first one.
        modality: "image" or "text": which index of that name; "" for whichever there is.
        rows: how many results come with their columns.
        results: how many results there are at most; those after the first `rows` are ids with similarities.
        not_applied: names of fields that have no effect here.
    """

    text: str | None = None
    image: bytes | None = None
    image_url: str | None = None
    vector: np.ndarray | None = None
    index: str
    modality: str
    rows: int
    results: int
    deduplicate: bool
    not_applied: tuple[str, ...]


def knn_request(body: object) -> KnnRequest:
    """What a body asks for; Refusal where it cannot be understood."""
    fields = object_of(body)
    given = [name for name in QUERIES if fields.get(name) not in (None, "")]
    if not given:
        raise Refusal("the request has no query", code="no_query", next_step=f"send one of {', '.join(QUERIES)}")
    ignored = [*given[1:], *(name for name in FILTERS if fields.get(name))]
    ignored += [name for name in ("aesthetic_score",) if fields.get(name) not in (None, "")]
    rows = count_of(fields, "num_images", DEFAULT_RESULTS, least=0)
    return KnnRequest(
        **_query(given[0], fields[given[0]]),
        index=text_of(fields, "indice_name"),
        modality=modality_of(fields),
        rows=rows,
        results=count_of(fields, "num_result_ids", max(rows, 1), least=1),
        deduplicate=bool(fields.get("deduplicate")),
        not_applied=tuple(ignored),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """Rows that are asked for by their ids, in this order."""

    ids: tuple[int, ...]
    index: str
    modality: str


def rows_request(body: object) -> RowsRequest:
    """What a body of `/metadata` asks for; Refusal where it cannot be understood."""
    fields = object_of(body)
    ids = fields.get("ids")
    if not isinstance(ids, list) or not all(is_int(i) and i >= 0 for i in ids):
        raise Refusal("ids is not a list of whole numbers from 0 on", next_step='send {"ids": [12, 7]}')
    if len(ids) > MOST_RESULTS:
        raise Refusal(
            f"{len(ids):,} ids are more than the {MOST_RESULTS:,} that one request may name",
            code="too_many",
            next_step="ask in several requests",
            status=413,
        )
    return RowsRequest(ids=tuple(ids), index=text_of(fields, "indice_name"), modality=modality_of(fields))


def _query(name: str, value: object) -> dict[str, Any]:
    if name == "embedding_input":
        return {"vector": vector_of(value, name)}
    if name == "image":
        if not isinstance(value, str):
            raise Refusal("image is not a text", next_step="send image as one JSON string")
        return {"image": image_of(value)}
    return {name: query_text(value, name)}
