"""What `/knn-service` and `/metadata` are asked: clip-retrieval's fields, checked and bounded.

The fields are those that its client and its page send. Absent and null mean the same. What cannot be done here is never
an error (its client asks for every filter unless told otherwise): it is named in `not_applied`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from embq.serving.refusals import Refusal

MOST_RESULTS = 10_000
"""Most ids of one answer; clip-retrieval's page asks for 3,000."""

MOST_TEXT = 10_000
"""Most characters of a text query. Models read a few hundred tokens, and the rest is cut off anyway."""

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
    fields = _object(body)
    given = [name for name in QUERIES if fields.get(name) not in (None, "")]
    if not given:
        raise Refusal("the request has no query", code="no_query", next_step=f"send one of {', '.join(QUERIES)}")
    ignored = [*given[1:], *(name for name in FILTERS if fields.get(name))]
    ignored += [name for name in ("aesthetic_score",) if fields.get(name) not in (None, "")]
    rows = _count(fields, "num_images", DEFAULT_RESULTS, least=0)
    return KnnRequest(
        **_query(given[0], fields[given[0]]),
        index=_text(fields, "indice_name"),
        modality=_modality(fields),
        rows=rows,
        results=_count(fields, "num_result_ids", max(rows, 1), least=1),
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
    fields = _object(body)
    ids = fields.get("ids")
    if not isinstance(ids, list) or not all(_is_int(i) and i >= 0 for i in ids):
        raise Refusal("ids is not a list of whole numbers from 0 on", next_step='send {"ids": [12, 7]}')
    if len(ids) > MOST_RESULTS:
        raise Refusal(
            f"{len(ids):,} ids are more than the {MOST_RESULTS:,} that one request may name",
            code="too_many",
            next_step="ask in several requests",
            status=413,
        )
    return RowsRequest(ids=tuple(ids), index=_text(fields, "indice_name"), modality=_modality(fields))


def _object(body: object) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object", next_step='send an object, such as {"text": "a red car"}')
    return body


def _query(name: str, value: object) -> dict[str, Any]:
    if name == "embedding_input":
        return {"vector": _vector(value)}
    if not isinstance(value, str):
        raise Refusal(f"{name} is not a text", next_step=f"send {name} as one JSON string")
    if name == "image":
        return {"image": _image(value)}
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
    return {name: value}


def _image(value: str) -> bytes:
    # Pages send what a browser makes of a file: data:image/png;base64,....
    _, comma, data = value.partition(",") if value.startswith("data:") else ("", ",", value)
    try:
        return base64.b64decode(data if comma else value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal(
            f"image is not base64: {error}", code="bad_query", next_step="send the bytes of an image file in base64"
        ) from error


def _vector(value: object) -> np.ndarray:
    if not isinstance(value, list) or not value or not all(_is_number(x) for x in value):
        raise Refusal(
            "embedding_input is not a list of numbers", code="bad_query", next_step="send one vector: [0.1, -0.2, ...]"
        )
    with np.errstate(over="ignore"):
        vector = np.asarray([x if abs(x) < 2**128 else np.inf for x in value], np.float32)
    if not np.isfinite(vector).all() or not vector.any():
        raise Refusal(
            "embedding_input is zero, or has numbers that are not finite in float32",
            code="bad_query",
            next_step="send a vector that the model of the index has made",
        )
    return vector


def _count(fields: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not _is_int(value) or value < least:
        raise Refusal(f"{name} is not a whole number from {least} on", next_step=f'send "{name}": {DEFAULT_RESULTS}')
    if value > MOST_RESULTS:
        raise Refusal(
            f"{name} is {value:,}; {MOST_RESULTS:,} is the most that one answer holds",
            code="too_many",
            next_step=f"ask for {MOST_RESULTS:,} or fewer",
            status=413,
        )
    return int(value)


def _modality(fields: Mapping[str, Any]) -> str:
    value = _text(fields, "modality")
    if value not in ("", "image", "text"):
        raise Refusal(f"there is no modality {value[:40]!r}", next_step='send "image" or "text", or leave it out')
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Refusal(f"{name} is not a text", next_step=f"send {name} as one JSON string, or leave it out")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
