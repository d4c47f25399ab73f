"""What every model family provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from core.errors import SampleError
from core.models import Chunking
from core.units import Sample
from sources.base import Moved

if TYPE_CHECKING:
    import numpy as np

    from worker.embedders.images import Picture

Prepared = Any
"""One sample made ready for the device (pixels, token ids); only the embedder that made it looks inside."""


MAX_CHUNKS = 100_000
"""Of one text: 32 MB in chunks of 80 tokens. All chunks of a text are in memory at once."""


class Truncated(dict[str, Any]):
    """A prepared sample whose text was longer than the model reads: only its beginning will be embedded."""


class Splitter(Protocol):
    """Cuts texts, always in the same way.

    Attributes:
        identity: all that decides where a text is cut, beside the model itself, as JSON-ready values.
    """

    identity: Sequence[Any]

    def spans(self, text: str, moved: Moved) -> list[tuple[int, int]]:
        """(start, end) of each chunk in characters, in order; none begins or ends with white space, nothing else is
        left out.

        Called from several threads at once. Calls `moved` whenever it got on. Raises SampleError `too_many_chunks`
        for a text beyond `MAX_CHUNKS`, `chunk_too_long` where one character makes more tokens than a chunk may have.
        """
        ...


class Embedder(Protocol):
    """A loaded model on one device.

    Attributes:
        dims: output -> length of its vectors, for exactly the `output_names` of the model config: of one model these
            are its modalities.
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
        (`missing_member` where a modality of the config is absent, `empty_text`, `truncated`, `unidentified`, ...),
        one whose text is longer than the model reads a `Truncated`.
        """
        ...

    def length(self, prepared: Prepared) -> int:
        """What a sample costs the device, in tokens: the tokens of its text, 1 for an image. At least 1."""
        ...

    def embed(self, batch: Sequence[Prepared]) -> dict[str, np.ndarray]:
        """Vectors of a batch: output -> float32 array of shape (len(batch), dim), rows in the batch's order.

        Called from one thread only. A vector may hold non-finite values; the caller turns those into failures.
        Raises DeviceError where the device is broken.
        """
        ...


class Family(Embedder, Protocol):
    """A model as its family loads it."""

    def splitter(self, chunking: Chunking) -> Splitter:
        """What cuts texts by the model's own tokens; ModelError where `chunking` does not suit the model."""
        ...


@runtime_checkable
class Looking(Embedder, Protocol):
    """A model that decodes images, and may share a decoded one with others."""

    def prepare_one(self, sample: Sample, picture: Picture) -> Prepared:
        """What `prepare` makes of one sample, whose image is `picture`; it changes nothing of the decoded image.

        Called from several threads at once. Raises SampleError where the sample cannot be embedded.
        """
        ...


@runtime_checkable
class Cutting(Embedder, Protocol):
    """A model whose samples are chunks of texts."""

    def chunks(self, sample: Sample, moved: Moved) -> list[Sample]:
        """The chunks of a text, at least one; SampleError where it cannot be embedded."""
        ...
