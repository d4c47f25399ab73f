"""Stub model: vectors computed from a hash of the sample, at any speed.

The tests and `embq doctor` recompute them, so nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from embq.core.errors import DeviceFullError, ModelError, SampleError
from embq.core.model_params import STUB, choice, milliseconds_as_s, whole_number
from embq.core.models import CPU_DECODES, GPU, Chunking, ModelConfig, ModelSpec
from embq.core.units import Sample, content_hash
from embq.sources.interface import Moved
from embq.worker.embedders.base import MAX_CHUNKS, padded_tokens
from embq.worker.embedders.device.hardware import simulated_speed
from embq.worker.embedders.sample_fields import check_modalities, image_of, prepare_each, text_of

EMBEDDER_VERSION = 1
"""Goes up when the same bytes give another vector."""

BATCH_SIZE = 64
"""Large enough that the numpy calls of a batch cost less than the hashing of its samples."""

TEXT_WINDOW = 1024
"""Window of a stub whose passes are bounded by tokens, as those of text models are."""

STEPS = 1024
"""Values are odd multiples of 1/2048: 11 significant bits, which float16 holds exactly, and never zero."""


class Ready(NamedTuple):
    """One sample: a digest for each modality, the words of its text (1 without one), and what became of its image."""

    digests: tuple[bytes, ...]
    words: int
    image: object = None


WORD = re.compile(r"\S+")
"""Pattern of one token of a stub model."""


def stub_vectors(digests: Sequence[bytes], dim: int) -> np.ndarray:
    """Vectors of digests made by `stub_digest`: float32 of shape (len(digests), dim), values in (-1, 1)."""
    words = np.frombuffer(b"".join(digests), dtype="<u2").reshape(len(digests), dim)
    odd = (words & np.uint16(2 * STEPS - 1)).astype(np.float32) * 2.0 + (1.0 - 2 * STEPS)
    return np.asarray(odd / np.float32(2 * STEPS), dtype=np.float32)


def stub_digest(data: bytes, dim: int) -> bytes:
    """SHAKE-256 of `data`, two bytes per dimension."""
    return hashlib.shake_256(data).digest(2 * dim)


def stub_vector(data: bytes, dim: int) -> np.ndarray:
    """The stub's vector of one sample: float32 of shape (dim,), the same in float16, not normalised.

    `data` is the encoded image as it was read, or the text as UTF-8.
    """
    vector: np.ndarray = stub_vectors([stub_digest(data, dim)], dim)[0]
    return vector


class WordSplitter:
    """Windows of whole words, which is as far as a model without a tokeniser can count: anybody can recompute them."""

    identity = ("words 1",)

    def __init__(self, chunking: Chunking) -> None:
        self._words, self._overlap = chunking.tokens, chunking.overlap

    def spans(self, text: str, on_progress: Moved) -> list[tuple[int, int]]:
        """See `embq.worker.embedders.base.Splitter`. The last window may be shorter, and never only repeats words."""
        spans: list[tuple[int, int]] = []
        window: deque[tuple[int, int]] = deque(maxlen=self._words)
        fresh = 0
        for word in WORD.finditer(text):
            if fresh == self._words:
                spans.append((window[0][0], window[-1][1]))
                fresh = self._overlap
                if len(spans) >= MAX_CHUNKS:
                    raise SampleError("too_many_chunks", f"the text has more than {MAX_CHUNKS:,} chunks")
                if len(spans) % 1000 == 0:
                    on_progress()
            window.append(word.span())
            fresh += 1
        spans.append((window[-fresh][0], window[-1][1]))
        return spans


Look = Callable[[Sequence[Sample]], Sequence[object]]
"""Function that looks at the images of a chunk: for each sample a result that is kept until it is embedded, or a
SampleError. Vectors do not depend on it."""


class StubEmbedder:
    """Deterministic vectors of bytes; `embed` waits as long as the device it stands for would compute.

    Args:
        token_budget: padded tokens with which a pass starts; 0 if samples alone bound it.
        speed: how many times as fast the device is as one of speed 1.
        token_budget: padded tokens with which a pass starts; 0 if samples alone bound it.
        max_tokens: padded tokens for which the device has room; 0 for any number.
        decode: decodes images; by default each sample only has to have one.
        image_bytes: of what `decode` makes of one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dim: int,
        batch_size: int,
        s_per_sample: float,
        s_per_token: float,
        s_per_batch: float,
        speed: float = 1.0,
        token_budget: int = 0,
        max_tokens: int = 0,
        decode: Look | None = None,
        image_bytes: int = 0,
    ) -> None:
        self._decode = decode or _encoded
        self._modalities = config.modalities
        self._dim = dim
        self._max_tokens = max_tokens
        self._s_per_sample = s_per_sample / speed
        self._s_per_token = s_per_token / speed
        self._s_per_batch = s_per_batch / speed
        self.dims: Mapping[str, int] = dict.fromkeys(config.modalities, dim)
        self.batch_size = batch_size
        self.image_bytes = image_bytes
        self.token_budget = token_budget
        self.cost = padded_tokens
        self.window = TEXT_WINDOW if token_budget else batch_size
        identity = config.identified_as
        self.fingerprint = content_hash(
            ["stub", EMBEDDER_VERSION, dim, sorted(identity.modalities), identity.precision]
        )

    def prepare(self, samples: Sequence[Sample]) -> list[Ready | SampleError]:
        """One digest per modality of each sample; images are decoded only if the spec asks for it."""
        images = self._decode(samples) if "image" in self._modalities else [None] * len(samples)
        pairs = zip(samples, images, strict=True)
        return [ready for sample, image in pairs for ready in prepare_each([sample], partial(self._ready, image=image))]

    def length(self, prepared: Ready) -> int:
        """Its words."""
        return prepared.words

    def embed(self, batch: Sequence[Ready]) -> dict[str, np.ndarray]:
        """Vectors of a batch, after the time that the spec asks for."""
        padded = len(batch) * max((ready.words for ready in batch), default=0)
        if 0 < self._max_tokens < padded:
            raise DeviceFullError(f"the stub has room for {self._max_tokens} padded tokens, and not for {padded}")
        wait_s = self._s_per_batch + self._s_per_sample * len(batch)
        wait_s += self._s_per_token * sum(ready.words for ready in batch)
        if wait_s > 0:
            time.sleep(wait_s)
        return self._vectors(batch)

    def embed_in_fp32(self, batch: Sequence[Ready]) -> dict[str, np.ndarray]:
        """The same at once."""
        return self._vectors(batch)

    def splitter(self, chunking: Chunking) -> WordSplitter:
        """The splitter that counts words as tokens."""
        return WordSplitter(chunking)

    def _vectors(self, batch: Sequence[Ready]) -> dict[str, np.ndarray]:
        return {
            modality: stub_vectors([ready.digests[position] for ready in batch], self._dim)
            for position, modality in enumerate(self._modalities)
        }

    def _ready(self, sample: Sample, image: object) -> Ready:
        if isinstance(image, SampleError):
            raise image
        digests = tuple(
            stub_digest(image_of(sample) if modality == "image" else text_of(sample).encode(), self._dim)
            for modality in self._modalities
        )
        return Ready(digests, len(text_of(sample).split()) if "text" in self._modalities else 1, image)


def load(spec: ModelSpec, config: ModelConfig, device: str) -> StubEmbedder:
    """The stub that `spec` describes; every device but a simulated one has speed 1."""
    spec.check_params(*STUB)
    check_modalities(config, *spec.model_family.embeds)
    return StubEmbedder(
        config,
        dim=int(spec.name),
        batch_size=whole_number(spec, "batch_size", BATCH_SIZE),
        s_per_sample=milliseconds_as_s(spec, "ms_per_sample"),
        s_per_token=milliseconds_as_s(spec, "ms_per_token"),
        s_per_batch=milliseconds_as_s(spec, "ms_per_batch"),
        speed=simulated_speed(device) or 1.0,
        token_budget=whole_number(spec, "tokens", 0, least=0),
        max_tokens=whole_number(spec, "max_tokens", 0, least=0),
        decode=_looking(spec, config),
        image_bytes=whole_number(spec, "pixels", 0, least=0) ** 2 * 3,
    )


def _looking(spec: ModelSpec, config: ModelConfig) -> Look:
    """The function that looks at images: a no-op, a decoder, or one that makes pixels as a real model gets them.

    The code of real models is imported only if it is asked for.
    """
    size = whole_number(spec, "pixels", 0, least=0)
    if size and config.decode == GPU:
        raise ModelError(f"{spec}: a stub decodes by the CPU only", next_step=f"use --decode {CPU_DECODES[0]}")
    if size:
        import torch

        from embq.worker.embedders.image.decoding import quiet_pillow
        from embq.worker.embedders.image.preprocess import usual
        from embq.worker.embedders.image.upload import ImageBatcher, image_rows

        quiet_pillow()
        images = ImageBatcher(usual(size), config.decode, torch.device("cpu"))
        return lambda samples: image_rows(samples, [images])[0]
    if choice(spec, "decode", "0", ("0", "1")) == "1":
        from embq.worker.embedders.image.decoding import open_image, quiet_pillow

        quiet_pillow()
        return lambda samples: prepare_each(samples, lambda sample: open_image(image_of(sample)).size)
    return _encoded


def _encoded(samples: Sequence[Sample]) -> Sequence[object]:
    return prepare_each(samples, image_of)
