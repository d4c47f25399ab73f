"""Frames between a reader process and its parent.

A request is one line of JSON. An answer is a row of frames: kind, length, content.
"""

from __future__ import annotations

import json
import struct

import msgspec

from embq.core.errors import EmbqError, error_fields, error_of
from embq.core.units import Sample
from embq.sources.interface import SAMPLE_MAX_BYTES

FRAME = struct.Struct("<cI")
"""Kind and length of a frame's content."""
ERROR, SAMPLES, END = b"E", b"S", b"."
"""Kinds of frames: an error; samples, or none where bytes have come in, and others follow; the last samples, or the
JSON of a look."""
FRAME_MAX_BYTES = 8 * SAMPLE_MAX_BYTES
FRAME_BYTES = 1 << 20
"""Size at which a frame of samples is sent, and size of the pipe."""

_Problem = tuple[str, bytes] | None
_Row = tuple[int, bytes, bytes | None, bytes | None, bytes | None, _Problem, _Problem]
"""Ordinal, key, image, text, metadata, error and `unread` of a sample. Texts are bytes, because they may hold lone
surrogates: bytes of paths that are not UTF-8, and halves of pairs in JSON."""

_DECODER = msgspec.msgpack.Decoder(list[_Row])
_ENCODER = msgspec.msgpack.Encoder()


def encode_samples(samples: list[Sample]) -> bytes:
    """The content of a frame of samples."""
    return _ENCODER.encode([_row(sample) for sample in samples])


def decode_samples(content: bytes) -> list[Sample]:
    """The samples of a frame; msgspec.DecodeError if it holds anything else."""
    try:
        return [
            Sample(
                ordinal=ordinal,
                key=_text(key),
                image=image,
                text=None if text is None else _text(text),
                metadata=None if metadata is None else _text(metadata),
                error=None if error is None else (error[0], _text(error[1])),
                unread=None if unread is None else (unread[0], _text(unread[1])),
            )
            for ordinal, key, image, text, metadata, error, unread in _DECODER.decode(content)
        ]
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def _row(sample: Sample) -> _Row:
    text, metadata, error, unread = sample.text, sample.metadata, sample.error, sample.unread
    return (
        sample.ordinal,
        _bytes(sample.key),
        None if sample.image is None else bytes(sample.image),
        None if text is None else _bytes(text),
        None if metadata is None else _bytes(metadata),
        None if error is None else (error[0], _bytes(error[1])),
        None if unread is None else (unread[0], _bytes(unread[1])),
    )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def encode_error(error: Exception) -> bytes:
    """The content of an `ERROR` frame."""
    fields = error_fields(error) if isinstance(error, EmbqError) else {"bug": repr(error)}
    return json.dumps(fields).encode()


def decode_error(content: bytes) -> Exception:
    """The error of an `ERROR` frame; RuntimeError for one that is not of embq."""
    fields = json.loads(content)
    return RuntimeError(f"{fields['bug']} in the reader process") if "bug" in fields else error_of(fields)
