"""Bodies of `/knn-service` and `/metadata`: clip-retrieval's fields, checked and bounded.

The fields are those that its client and its page send. A feature that is missing here is not an error (the client asks
for every filter by default): it is named in `not_applied`. The body of `/search` is `Query.from_json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from embq.core.errors import InputError
from embq.retrieval.searching.query import (
    MOST_RESULTS,
    FromZero,
    Modality,
    Query,
    Whole,
    count_field,
    json_field,
    json_object,
    query_field,
)

DEFAULT_RESULTS = 40
"""As clip-retrieval's client asks for."""

FILTERS = ("use_mclip", "use_safety_model", "use_violence_detector")

QUERIES = {"text": "text", "image": "image", "image_url": "text", "embedding_input": "vector"}
"""Field -> kind of query, in the order in which clip-retrieval's back end looks for one; it takes the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnRequest:
    """A body of `/knn-service`.

    Attributes:
        query: what is searched for; without a query of its own if `image_url` is given.
        image_url: of the image to search for; "" if the query is another one.
        rows: how many results come with their columns; those after them are ids with similarities.
        deduplicate: whether to drop near-duplicates of better results.
        not_applied: names of fields that have no effect here.
    """

    query: Query
    image_url: str
    rows: int
    deduplicate: bool
    not_applied: tuple[str, ...]

    @classmethod
    def from_json(cls, body: object) -> KnnRequest:
        """Parse a body; InputError if it is invalid."""
        fields = json_object(body)
        given = [name for name in QUERIES if fields.get(name) not in (None, "")]
        if not given:
            raise InputError("the request has no query", code="no_query", next_step=f"send one of {', '.join(QUERIES)}")
        ignored = [*given[1:], *(name for name in FILTERS if fields.get(name))]
        ignored += ["aesthetic_score"] if fields.get("aesthetic_score") not in (None, "") else []
        value = query_field(given[0], fields[given[0]], QUERIES[given[0]])
        rows = count_field(fields, "num_images", DEFAULT_RESULTS, FromZero)
        query = Query(
            **({} if given[0] == "image_url" else value),
            k=count_field(fields, "num_result_ids", max(rows, 1), Whole),
            index=json_field(fields, "indice_name", str, ""),
            modality=json_field(fields, "modality", Modality, ""),
        )
        return cls(
            query=query,
            image_url=value["text"] if given[0] == "image_url" else "",
            rows=rows,
            deduplicate=bool(fields.get("deduplicate")),
            not_applied=tuple(ignored),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """A body of `/metadata`: rows by their ids, in this order."""

    ids: tuple[int, ...]
    index: str
    modality: str

    @classmethod
    def from_json(cls, body: object) -> RowsRequest:
        """Parse a body; InputError if it is invalid."""
        fields = json_object(body)
        ids = json_field({"ids": fields.get("ids", "")}, "ids", list[FromZero], None)
        if ids is None:
            raise InputError("ids is null", code="bad_request", next_step='send {"ids": [12, 7]}')
        if len(ids) > MOST_RESULTS:
            raise InputError(
                f"{len(ids):,} ids are more than the {MOST_RESULTS:,} that one request may name",
                code="too_many",
                next_step="ask in several requests",
            )
        return cls(
            ids=tuple(ids),
            index=json_field(fields, "indice_name", str, ""),
            modality=json_field(fields, "modality", Modality, ""),
        )
