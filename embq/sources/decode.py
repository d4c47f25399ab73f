"""Strict decoding of texts and JSON objects, for the members and lines of all kinds of input."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from embq.core.errors import SampleError
from embq.core.process.limits import decoded_bytes
from embq.core.service.log import Events
from embq.core.units import json_text, json_value

log = Events("sources")

IMAGE_EXTENSIONS = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
"""Lower-case extensions of images. Where a key has several, the first in this order is embedded."""

_SMALL_JSON_CHARS, _VALUE_BYTES = 1 << 20, 120
"""JSON up to this size is parsed without a look at it. A parsed value takes up to this many bytes: an empty object 64,
its place in a list or object 8 to 40, and both are there twice while they grow."""


@contextmanager
def unread_counted(source: str) -> Iterator[list[str]]:
    """Collect why metadata of first samples cannot be read, and log at the end how many are lost."""
    unread: list[str] = []
    yield unread
    if unread:
        log.warning("metadata_unread", source=source, samples=len(unread), first=unread[0])


def decode_file(data: bytes) -> str:
    """The content of a whole file or member as `decode_text` returns it, without a byte order mark at its start."""
    return decode_text(data.removeprefix(BOM_UTF8))


def decode_text(data: bytes) -> str:
    """`data` as strict UTF-8; SampleError `text_not_utf8` if it is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SampleError(
            "text_not_utf8", f"byte {error.start} of the text is 0x{data[error.start]:02x}, which is not UTF-8"
        ) from error


def parse_object(text: str, code: str) -> dict[str, Any]:
    """The JSON object in `text`; SampleError with `code` if it is none. NaN and Infinity become null.

    A number beyond float64, such as 1e400, is an infinite float, which `compact_json` makes null as well.
    """
    if len(text) > _SMALL_JSON_CHARS:
        values = text.count(",") + text.count("[") + text.count("{")
        if values * _VALUE_BYTES > decoded_bytes():
            raise SampleError("too_large", f"JSON of about {values:,} values, more than a reader has memory for here")
    try:
        value = json_value(text)
    except (ValueError, RecursionError) as error:
        marked = text.startswith("\ufeff")
        why = "a byte order mark, which only the first line of a file may begin with" if marked else error
        raise SampleError(code, f"not JSON: {why}") from error
    if not isinstance(value, dict):
        raise SampleError(code, f"a JSON object is needed, this is a {type(value).__name__}")
    return value


class JsonForm(NamedTuple):
    """Another form of JSON than one object per line, and the command that converts a file of it."""

    what: str
    command: str


def form_of_json(head: bytes) -> JsonForm | None:
    """The form of a file that begins with `head`; None for one object per line, or no JSON at all."""
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    first = text.partition("\n")[0].rstrip()
    if first == "[" or (first.startswith("[") and first[1:].lstrip().startswith("{")):
        return JsonForm("a JSON array", "jq -c '.[]' FILE > NEW.jsonl")
    if not first.startswith("{") or (length := _first_value(first)) == len(first):
        return None
    if length and first[length:].strip() == ",":
        return JsonForm("JSON with a comma after each line", "sed 's/,[[:space:]]*$//' FILE > NEW.jsonl")
    if _first_value(text) > len(first):
        return JsonForm("pretty-printed JSON", "jq -c . FILE > NEW.jsonl")
    return None


def _first_value(text: str) -> int:
    """The length of the JSON value that a text begins with; 0 if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


def compact_json(fields: dict[str, Any], code: str) -> str:
    """`fields` as compact JSON that UTF-8 can hold: NaN and infinity, which JSON has not, are null.

    SampleError with `code` if it cannot be written, as lists in lists beyond what Python can follow.
    """
    try:
        try:
            return json_text(fields)
        except ValueError:
            return json_text(_finite(fields))
    except (ValueError, RecursionError) as error:
        raise SampleError(code, f"cannot be written as JSON: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decode_metadata(data: bytes) -> str:
    """A .json member or file as compact JSON text of one object; SampleError `bad_metadata` if it is none."""
    if len(data) <= _SMALL_JSON_CHARS:
        with suppress(msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
            value = msgspec.json.decode(data)
            if isinstance(value, dict):
                return msgspec.json.encode(value).decode()
    try:
        text = decode_file(data)
    except SampleError as error:
        raise SampleError("bad_metadata", error.message) from error
    return compact_json(parse_object(text, "bad_metadata"), "bad_metadata")
