"""Frames between a reader process and its parent.

A request is one line of JSON. An answer is a row of frames: kind, length, content.
"""

from __future__ import annotations

import json
import struct

import msgspec

from core.errors import EmbqError, error_fields, error_of
from core.units import Sample
from sources.interface import SAMPLE_MAX_BYTES

FRAME = struct.Struct("<cI")
"""Kind and length of a frame's content."""
ANSWER, ERROR, SAMPLES, MOVED, END = b"A", b"E", b"S", b"M", b"."
FRAME_MAX_BYTES = 8 * SAMPLE_MAX_BYTES
FRAME_BYTES = 1 << 20
"""Size at which a frame of samples is sent, and size of the pipe."""

_Row = tuple[int, bytes, bytes | None, str | None, str | None, tuple[str, bytes] | None]
"""Ordinal, key, image, text, metadata and error of a sample. Keys and messages may hold bytes of paths that are not
UTF-8."""

_DECODER = msgspec.msgpack.Decoder(list[_Row])
_ENCODER = msgspec.msgpack.Encoder()


def encode_samples(samples: list[Sample]) -> bytes:
    """The content of a `SAMPLES` frame."""
    return _ENCODER.encode([_row(sample) for sample in samples])


def decode_samples(content: bytes) -> list[Sample]:
    """The samples of a `SAMPLES` frame; msgspec.DecodeError where it holds anything else."""
    return [
        Sample(
            ordinal=ordinal,
            key=key.decode("utf-8", "surrogatepass"),
            image=image,
            text=text,
            metadata=metadata,
            error=None if error is None else (error[0], error[1].decode("utf-8", "surrogatepass")),
        )
        for ordinal, key, image, text, metadata, error in _DECODER.decode(content)
    ]


def _row(sample: Sample) -> _Row:
    key, error = sample.key.encode("utf-8", "surrogatepass"), sample.error
    encoded = None if error is None else (error[0], error[1].encode("utf-8", "surrogatepass"))
    return sample.ordinal, key, sample.image, sample.text, sample.metadata, encoded


def encode_error(error: Exception) -> bytes:
    """The content of an `ERROR` frame."""
    fields = error_fields(error) if isinstance(error, EmbqError) else {"bug": repr(error)}
    return json.dumps(fields).encode()


def decode_error(content: bytes) -> Exception:
    """The error of an `ERROR` frame; RuntimeError for one that is not of embq."""
    fields = json.loads(content)
    return RuntimeError(f"{fields['bug']} in the reader process") if "bug" in fields else error_of(fields)
