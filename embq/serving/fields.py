"""The fields of a request's body, checked and bounded. Absent and null mean the same."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from embq.serving.refusals import Refusal

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
