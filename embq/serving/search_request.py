"""What `/search` is asked: the questions of `embq search`, checked and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from embq.serving.fields import count_of, image_of, is_int, modality_of, object_of, query_text, text_of, vector_of
from embq.serving.refusals import Refusal

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
        **_query(given[0], fields[given[0]]),
        k=count_of(fields, "k", DEFAULT_RESULTS, least=1),
        index=text_of(fields, "index"),
        modality=modality_of(fields),
        nprobe=_nprobe(fields),
        refine=refine,
    )


def _query(name: str, value: object) -> dict[str, Any]:
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
