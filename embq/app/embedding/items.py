"""Items of `embq.embed` and `embq.Model`, of several packages, as texts and encoded images."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from embq.core.redaction import cut
from embq.worker.embedders.image.headers import DECODER_ERRORS, damaged


def is_one(item: Any) -> bool:
    """True for a text, an image or an array without dimensions by itself."""
    is_scalar = getattr(item, "ndim", None) == 0
    return is_scalar or isinstance(item, str | bytes | bytearray | memoryview | Path) or is_picture(item)


def is_picture(item: Any) -> bool:
    """True for an image of PIL, which is not imported for this."""
    return any(base.__module__.partition(".")[0] == "PIL" for base in type(item).__mro__)


def of_one_kind(items: Iterable[Any], modality: str = "") -> tuple[str, Iterable[Any]]:
    """The modality of items, and the items as `samples_of` takes them: texts, encoded images, or why there is none.

    Args:
        modality: "text" or "image"; "" for that of the first item, and "text" if there is none.
    """
    iterator, first = map(_plain, items), []
    for item in iterator:
        first.append(item)
        if item is not None:
            break
    kind = modality or _kind(first[-1] if first else "")
    return kind, map(_image if kind == "image" else _text, chain(first, iterator))


def _plain(item: Any) -> Any:
    """Python's own value of an item of pyarrow or a buffer; None for what pandas has where a value is missing."""
    if hasattr(item, "as_py"):
        item = item.as_py()
    if isinstance(item, bytearray | memoryview):
        return bytes(item)
    if isinstance(item, dict) and isinstance(item.get("text"), str):  # a row, as of a .jsonl file
        return item["text"]
    is_nan = isinstance(item, float | np.floating) and bool(np.isnan(item))
    return None if is_nan or type(item).__name__ in ("NAType", "NaTType") else item


def _kind(item: Any) -> str:
    is_image = isinstance(item, bytes | Path) or is_picture(item) or _is_undecoded(item)
    return "image" if is_image else "text"


def _is_undecoded(item: Any) -> bool:
    """True for an image as datasets gives it where it is not decoded."""
    return isinstance(item, dict) and not {"bytes", "path"}.isdisjoint(item)


def _text(item: Any) -> Any:
    """The text, or (code, message)."""
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        return (
            "missing_text",
            f"the item is a dict without a str under 'text'; it has {cut(', '.join(map(repr, item)))}",
        )
    return ("missing_text", "the item is None" if item is None else f"the item is no str but {type(item).__name__}")


def _image(item: Any) -> Any:
    """The encoded bytes of an image, or (code, message)."""
    if _is_undecoded(item):
        item = item.get("bytes") or item.get("path")
    if item is None:
        return ("missing_member", "the item is None")
    if isinstance(item, bytes):
        return item
    if isinstance(item, str | Path):
        try:
            return Path(item).read_bytes()
        except (OSError, ValueError) as error:  # a null character in the path
            return ("source_unreadable", f"{item} cannot be read: {getattr(error, 'strerror', None) or error}")
    if not is_picture(item):
        return ("missing_member", f"the item is no path, bytes or PIL image but {type(item).__name__}")
    return _encoded(item)


PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
"""Modes of PIL that a PNG holds without loss; others become RGB, which models read."""


def _encoded(picture: Any) -> Any:
    buffer = io.BytesIO()
    try:
        picture.load()
    except DECODER_ERRORS as error:
        failure = damaged(b"", error)
        return (failure.code, failure.message)
    try:
        (picture if picture.mode in PNG_MODES else picture.convert("RGB")).save(buffer, "PNG")
    except DECODER_ERRORS as error:
        return ("unsupported_mode", f"mode {picture.mode}: {error}")
    return buffer.getvalue()
