"""The interfaces of a model family: `Embedder`, and what some families offer beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from embq.core.errors import SampleError
from embq.core.models import Chunking, ModelSpec
from embq.core.units import Sample
from embq.sources.interface import Moved

if TYPE_CHECKING:
    import numpy as np

    from embq.worker.embedders.image.buffer_pool import Row
    from embq.worker.embedders.image.upload import ImageBatcher

Prepared = Any
"""One sample made ready for the device (pixels, token ids); only the embedder that made it looks inside."""


MAX_CHUNKS = 100_000
"""Most chunks of one text: 32 MB in chunks of 80 tokens. All chunks of a text are in memory at once."""


class Truncated(dict[str, Any]):
    """A prepared sample whose text was longer than the model reads: only its beginning will be embedded."""


class PendingVectors(Mapping[str, "np.ndarray"]):
    """Vectors that a device still computes; reading any of them waits for all.

    Args:
        names: the outputs.
        arrive: waits for the vectors and returns them; called once. Raises DeviceError if the device is broken, and
            DeviceFullError if only now it is seen that its memory is too small.
        ahead: passes that may be begun before these vectors are asked for.
        is_over: whether the device is through with the pass; it waits for nothing, and raises nothing.

    Attributes:
        over_at: when that was seen first, in monotonic seconds; None before. The caller of `is_over` sets it.
    """

    def __init__(
        self,
        names: Iterable[str],
        arrive: Callable[[], Mapping[str, np.ndarray]],
        *,
        ahead: int = 1,
        is_over: Callable[[], bool] = lambda: True,
    ) -> None:
        self.ahead = ahead
        self.is_over = is_over
        self.over_at: float | None = None
        self._names = tuple(names)
        self._arrive = arrive
        self._here: Mapping[str, np.ndarray] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        if self._here is None:
            self._here = self._arrive()
        return self._here[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


Cost = Callable[[Sequence[int]], int]
"""Cost of a forward pass in tokens, from the lengths of its samples: `padded_tokens` if each is padded to the
longest, `sum` if none is."""


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens of samples of these lengths with their padding."""
    return len(lengths) * max(lengths, default=0)


class Splitter(Protocol):
    """Splits texts into chunks, deterministically."""

    @property
    def identity(self) -> Sequence[Any]:
        """All that decides where a text is cut, beside the model itself, as JSON-ready values."""
        ...

    def spans(self, text: str, on_progress: Moved) -> list[tuple[int, int]]:
        """(start, end) of each chunk in characters, in order; none begins or ends with white space, nothing else is
        left out.

        Called from several threads at once. Calls `on_progress` as it gets on. Raises SampleError `too_many_chunks`
        for a text beyond `MAX_CHUNKS`, `chunk_too_long` if one character makes more tokens than a chunk may have.
        """
        ...


class Embedder(Protocol):
    """A loaded model on one device.

    Attributes:
        dims: output -> length of its vectors, for exactly the `output_names` of the model config: of one model these
            are its modalities.
        fingerprint: 32 hex digits over weights, configuration, preprocessing and precision. Two embedders with the
            same fingerprint give the same vectors within rounding.
        batch_size: most samples of one forward pass on this device.
        token_budget: tokens, counted by `cost`, that suit a pass; 0 if only samples bound it.
        cost: of a pass.
        window: samples gathered before they are sorted by length and cut into passes; `batch_size` if all are alike.
    """

    dims: Mapping[str, int]
    fingerprint: str
    batch_size: int
    token_budget: int
    cost: Cost
    window: int

    def prepare(self, samples: Sequence[Sample]) -> list[Prepared | SampleError]:
        """Decode and tokenise on the CPU, one answer per sample in the same order.

        Called from several threads at once. A sample that cannot be embedded gets a SampleError as its answer
        (`missing_member` if a modality of the config is absent, `empty_text`, `truncated`, `unidentified`, ...),
        one whose text is longer than the model reads a `Truncated`.
        """
        ...

    def length(self, prepared: Prepared) -> int:
        """Cost of a sample in tokens: the tokens of its text, 1 for an image. At least 1."""
        ...

    def embed(self, batch: Sequence[Prepared]) -> Mapping[str, np.ndarray]:
        """Vectors of one forward pass: output -> float32 array of shape (len(batch), dim), rows in the batch's order.

        Called from one thread only. The answer is `PendingVectors` if the device still computes.
        A vector may hold non-finite values; the caller has those computed once more, by `embed_in_fp32`.
        Raises DeviceFullError if the device's memory is too small for the batch, DeviceError if it is broken.
        """
        ...

    def embed_in_fp32(self, batch: Sequence[Prepared]) -> Mapping[str, np.ndarray]:
        """The same computed in fp32 for this once, for samples of which half precision made no finite vector; the same
        vectors if the model knows no other precision. Slow. Raises as `embed` does.
        """
        ...


class ChunkableEmbedder(Embedder, Protocol):
    """A model that can tell how texts are split for it."""

    def splitter(self, chunking: Chunking) -> Splitter:
        """The splitter by the model's own tokens; ModelError if `chunking` does not suit the model."""
        ...


@runtime_checkable
class BuffersImages(Embedder, Protocol):
    """A model that keeps the pixels of images until the device has them.

    Attributes:
        image_bytes: of each image.
    """

    image_bytes: int


@runtime_checkable
class ImageEmbedder(Embedder, Protocol):
    """A model that may look at images, which are prepared for all models of a run at once."""

    @property
    def images(self) -> ImageBatcher | None:
        """Prepares them; None if the run wants none embedded."""
        ...

    def with_image(self, sample: Sample, row: Row) -> Prepared:
        """`prepare` for one sample, whose image has been prepared; SampleError if it cannot be embedded.

        Called from several threads at once.
        """
        ...


@runtime_checkable
class HasVariants(Embedder, Protocol):
    """A model with several variants of its forward pass."""

    def choose_variant(self, *, compile_s: float) -> None:
        """Choose the fastest variant on this device for passes of `batch_size` samples, and log it.

        Args:
            compile_s: seconds that compiling may take; 0 spares it.

        Raises DeviceError if the device is broken.
        """
        ...


@runtime_checkable
class PromptedEmbedder(Embedder, Protocol):
    """A model of texts whose prompt may change between passes."""

    def use_prompt(self, spec: ModelSpec, task: str = "") -> None:
        """Put the prompt of a spec of the same model before each text from now on; `fingerprint` stays as it is.

        Called while nothing is prepared or embedded. `task` is "query" or "document" beside a prompt that names none.
        Raises ModelError, and changes nothing, where the model has no prompt of that name.
        """
        ...


@runtime_checkable
class VariedEmbedder(Embedder, Protocol):
    """A model of texts that can prepare some of them in another way than the others."""

    def preparing(self, *, prompt_name: str = "", cut: str = "") -> Embedder:
        """An embedder whose `prepare` takes another prompt, or cuts long texts at the "left" or "right"; "": neither.

        What it returns goes into passes of this one. Raises ModelError if the model has no such prompt or cut.
        """
        ...


@runtime_checkable
class HasChunks(Embedder, Protocol):
    """A model whose samples are chunks of texts."""

    def chunks(self, sample: Sample, on_progress: Moved) -> list[Sample]:
        """The chunks of a text, at least one; SampleError if it cannot be embedded."""
        ...
