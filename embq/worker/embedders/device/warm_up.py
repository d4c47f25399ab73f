"""Warm-up: one synthetic sample through a loaded model before it gets work.

A broken device fails here, where no unit is charged for it, and the one-off cost of a first batch (kernels,
allocations) is not measured as a slow unit.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

import pyarrow as pa

from embq.core.errors import SampleError
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder

SIDE = 32


def warm_up(embedder: Embedder, modalities: Sequence[str]) -> float:
    """Prepare and embed one sample that has every modality of the model, twice; returns the seconds of the second time.

    The first time includes what happens once (a CUDA context, kernels). Whatever this raises ends the process.
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
    """A grey square of 8-bit RGB."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), "grey").save(file, "png")
    return file.getvalue()
