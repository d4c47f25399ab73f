"""Warm-up: one synthetic sample through a loaded model before it gets work.

A broken device fails here, where no unit is charged for it, and the one-off cost of a first batch (kernels,
allocations) is not measured as a slow unit.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Sequence

import pyarrow as pa

from embq.core.errors import SampleError
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder

SIDE = 32


def warm_up(embedder: Embedder, modalities: Sequence[str]) -> float:
    """Prepare and embed one sample that has every modality of the model, twice; gives the seconds of the second time.

    The first time holds what happens once (a CUDA context, kernels) and tells nothing of later batches. Whatever this
    raises ends the process.
    """
    (prepared,) = embedder.prepare([made_up(modalities)])
    if isinstance(prepared, SampleError):
        raise prepared
    embedder.embed([prepared])
    began = time.monotonic()
    vectors = embedder.embed([prepared])
    seconds = time.monotonic() - began
    # Arrow imports what it may need at its first use, which takes longer than many a unit.
    for vector in vectors.values():
        pa.array(vector.reshape(-1))
    return seconds


def made_up(modalities: Sequence[str]) -> Sample:
    """A sample with an image, a text, or both."""
    return Sample(
        ordinal=0,
        key="warm-up",
        image=_grey_png() if "image" in modalities else None,
        text="warm up" if "text" in modalities else None,
    )


def _grey_png() -> bytes:
    """A grey square of 8-bit RGB (PNG specification, sections 5 and 11)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    lines = (b"\0" + b"\x80" * (3 * SIDE)) * SIDE
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
