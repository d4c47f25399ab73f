"""What every model family provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from core.errors import SampleError
from core.units import Sample

if TYPE_CHECKING:
    import numpy as np

Prepared = Any
"""One sample made ready for the device (pixels, token ids); only the embedder that made it looks inside."""


class Embedder(Protocol):
    """A loaded model on one device.

    Attributes:
        dims: modality ("image", "text") -> length of its vectors, for exactly the modalities of the model config.
        fingerprint: 32 hex digits over weights, configuration, preprocessing and precision. Two embedders with the
            same fingerprint give the same vectors within rounding.
        batch_size: samples per call of `embed` that suit this model on this device.
    """

    dims: Mapping[str, int]
    fingerprint: str
    batch_size: int

    def prepare(self, samples: Sequence[Sample]) -> list[Prepared | SampleError]:
        """Decode and tokenise on the CPU, one answer per sample in the same order.

        Called from several threads at once. A sample that cannot be embedded gets a SampleError as its answer
        (`missing_member` where a modality of the config is absent, `empty_text`, `truncated`, `unidentified`, ...).
        """
        ...

    def embed(self, batch: Sequence[Prepared]) -> dict[str, np.ndarray]:
        """Vectors of a batch: modality -> float32 array of shape (len(batch), dim), rows in the batch's order.

        Called from one thread only. A vector may hold non-finite values; the caller turns those into failures.
        Raises DeviceError where the device is broken.
        """
        ...
