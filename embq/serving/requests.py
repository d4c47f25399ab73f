"""What `/knn-service` and `/metadata` are asked: clip-retrieval's fields, checked and bounded.

The fields are those that its client and its page send. What cannot be done here is never
an error (its client asks for every filter unless told otherwise): it is named in `not_applied`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from embq.serving.http_errors import Refusal

QUERIES = ("text", "image", "vector", "id")
KNOWN = (*QUERIES, "k", "index", "modality", "nprobe", "refine")

DEFAULT_RESULTS = 10
"""As `embq search` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """One question: exactly one of the first four is not None.

    Attributes:
        image: bytes of an image file.
        vector: float32, finite, one row; its length is not checked yet.
        id: of a row, which is itself no answer.
        k: most results.
        index: name of the index; "" where there is one only.
        modality: "image" or "text": which index of that name; "" for whichever there is.
        nprobe: lists of the index that are looked at; None for what its tuning chose.
        refine: False leaves out the second look at the best rows by their full vectors.
    """

    text: str | None = None
    image: bytes | None = None
    vector: np.ndarray | None = None
    id: int | None = None
    k: int
    index: str
    modality: str
    nprobe: int | None
    refine: bool | None


def search_request(body: object) -> SearchRequest:
    """What a body asks for; Refusal where it cannot be understood. A field that is not known is an error."""
    fields = object_of(body)
    if unknown := [name for name in fields if name not in KNOWN]:
        raise Refusal(f"there is no field {unknown[0][:40]!r}", next_step=f"send of {', '.join(KNOWN)}")
    given = [name for name in QUERIES if fields.get(name) is not None]
    if len(given) != 1:
        said = f"the request asks by {' and by '.join(given)}" if given else "the request has no query"
        raise Refusal(said, code="no_query", next_step=f"send one of {', '.join(QUERIES)}")
    refine = fields.get("refine")
    if refine is not None and not isinstance(refine, bool):
        raise Refusal("refine is neither true nor false", next_step="leave it out")
    return SearchRequest(
        **_search_request_query(given[0], fields[given[0]]),
        k=count_of(fields, "k", DEFAULT_RESULTS, least=1),
        index=text_of(fields, "index"),
        modality=modality_of(fields),
        nprobe=_nprobe(fields),
        refine=refine,
    )


def _search_request_query(name: str, value: object) -> dict[str, Any]:
    if name == "vector":
        return {"vector": vector_of(value, name)}
    if name == "id":
        if not is_int(value):
            raise Refusal("id is not a whole number", next_step='send {"id": 12}')
        return {"id": value}
    if name == "image":
        if not isinstance(value, str):
            raise Refusal("image is not a text", next_step="send the bytes of an image file in base64")
        return {"image": image_of(value)}
    return {"text": query_text(value, name)}


def _nprobe(fields: Mapping[str, Any]) -> int | None:
    value = fields.get("nprobe")
    if value is None:
        return None
    if not is_int(value) or value < 1:
        raise Refusal("nprobe is not a whole number from 1 on", next_step="leave it out")
    return int(value)


MOST_RESULTS = 10_000
"""Most ids of one answer; clip-retrieval's page asks for 3,000."""

MOST_TEXT = 10_000
"""Most characters of a text query. Models read a few hundred tokens, and the rest is cut off anyway."""


def object_of(body: object) -> Mapping[str, Any]:
    """The fields; Refusal where the body is no object."""
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object", next_step='send an object, such as {"text": "a red car"}')
    return body


def image_of(value: str) -> bytes:
    """The bytes of an image in base64, or in the `data:` URL that a browser makes of a file."""
    _, comma, data = value.partition(",") if value.startswith("data:") else ("", ",", value)
    try:
        return base64.b64decode(data if comma else value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal(
            f"image is not base64: {error}", code="bad_query", next_step="send the bytes of an image file in base64"
        ) from error


def vector_of(value: object, name: str) -> np.ndarray:
    """float32, finite and not zero, of the field `name`."""
    if not isinstance(value, list) or not value or not all(is_number(x) for x in value):
        raise Refusal(
            f"{name} is not a list of numbers", code="bad_query", next_step="send one vector: [0.1, -0.2, ...]"
        )
    with np.errstate(over="ignore"):
        vector = np.asarray([x if abs(x) < 2**128 else np.inf for x in value], np.float32)
    if not np.isfinite(vector).all() or not vector.any():
        raise Refusal(
            f"{name} is zero, or has numbers that are not finite in float32",
            code="bad_query",
            next_step="send a vector that the model of the index has made",
        )
    return vector


def count_of(fields: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    """A whole number from `least` to MOST_RESULTS."""
    value = fields.get(name)
    if value is None:
        return default
    if not is_int(value) or value < least:
        raise Refusal(f"{name} is not a whole number from {least} on", next_step=f'send "{name}": {default}')
    if value > MOST_RESULTS:
        raise Refusal(
            f"{name} is {value:,}; {MOST_RESULTS:,} is the most that one answer holds",
            code="too_many",
            next_step=f"ask for {MOST_RESULTS:,} or fewer",
            status=413,
        )
    return int(value)


def modality_of(fields: Mapping[str, Any]) -> str:
    """image, text, or nothing."""
    value = text_of(fields, "modality")
    if value not in ("", "image", "text"):
        raise Refusal(f"there is no modality {value[:40]!r}", next_step='send "image" or "text", or leave it out')
    return value


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """A text; "" where it is absent."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Refusal(f"{name} is not a text", next_step=f"send {name} as one JSON string, or leave it out")
    return value


def query_text(value: object, name: str) -> str:
    """A text that is asked by: Unicode, of at most MOST_TEXT characters."""
    if not isinstance(value, str):
        raise Refusal(f"{name} is not a text", next_step=f"send {name} as one JSON string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{name} is no Unicode text: {error.reason}", next_step="send whole characters") from error
    if len(value) > MOST_TEXT:
        raise Refusal(
            f"{name} has {len(value):,} characters; {MOST_TEXT:,} are the most",
            code="too_long",
            next_step="send its beginning",
            status=413,
        )
    return value


def is_int(value: object) -> bool:
    """Whether it is a whole number of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_number(value: object) -> bool:
    """Whether it is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


KNN_RESULTS = 40
"""As clip-retrieval's client asks for."""

FILTERS = ("use_mclip", "use_safety_model", "use_violence_detector")
KNN_QUERIES = ("text", "image", "image_url", "embedding_input")
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
    given = [name for name in KNN_QUERIES if fields.get(name) not in (None, "")]
    if not given:
        raise Refusal("the request has no query", code="no_query", next_step=f"send one of {', '.join(KNN_QUERIES)}")
    ignored = [*given[1:], *(name for name in FILTERS if fields.get(name))]
    ignored += [name for name in ("aesthetic_score",) if fields.get(name) not in (None, "")]
    rows = count_of(fields, "num_images", KNN_RESULTS, least=0)
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
