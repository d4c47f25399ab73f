"""Several models as one embedder: each sample is read and decoded once, and every model embeds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embq.core.errors import SampleError
from embq.core.models import Chunking, ModelConfig, NamedModel
from embq.core.units import Sample, content_hash
from embq.worker.embedders.base import (
    BuffersImages,
    Cost,
    Embedder,
    HasVariants,
    ImageEmbedder,
    PendingVectors,
    Prepared,
    Splitter,
    Truncated,
    padded_tokens,
)
from embq.worker.embedders.image.buffer_pool import Row
from embq.worker.embedders.image.upload import ImageBatcher, image_rows, with_images
from embq.worker.embedders.text.splitting import no_splitter

EMBEDDER_VERSION = "several 1"
"""Its number goes up when the same models and samples give other vectors."""


@dataclass(frozen=True, slots=True)
class NamedEmbedder:
    """One of the models: how the run calls it, and what is loaded."""

    named: NamedModel
    embedder: Embedder


Ready = dict[str, Any]
"""One sample: model's name -> what that model made of it; a `Truncated` if a model does not read all its text."""


class MultiModelEmbedder:
    """Models that embed the same samples. A sample has a row where each of them can embed it."""

    def __init__(self, members: Sequence[NamedEmbedder], config: ModelConfig) -> None:
        self._members = tuple(members)
        self._spec = config.spec
        self.dims: Mapping[str, int] = {
            output.name: member.embedder.dims[modality]
            for member in members
            for modality, output in member.named.outputs.items()
        }
        self.batch_size = min(member.embedder.batch_size for member in members)
        # As lengths are sums over the models, so are budgets.
        self.token_budget = sum(member.embedder.token_budget for member in members)
        self.cost: Cost = sum if all(member.embedder.cost is sum for member in members) else padded_tokens
        self.window = max(member.embedder.window for member in members) if self.token_budget else self.batch_size
        self.image_bytes = sum(m.embedder.image_bytes for m in members if isinstance(m.embedder, BuffersImages))
        self.fingerprint = content_hash(
            [EMBEDDER_VERSION, *([member.named.name, member.embedder.fingerprint] for member in members)]
        )

    def prepare(self, samples: Sequence[Sample]) -> list[Ready | SampleError]:
        """Prepare each sample for every model; the error of the first that cannot, which the message names.

        Texts are tokenised together, and each image is decoded once.
        """
        looking = [_images_of(member) for member in self._members]
        rows = iter(image_rows(samples, [images for images in looking if images is not None]))
        columns: list[Sequence[Prepared | SampleError]] = []
        for member, images in zip(self._members, looking, strict=True):
            columns.append(member.embedder.prepare(samples) if images is None else _with(member, samples, next(rows)))
        return [
            self._ready(answers) if sample.error is None else SampleError(*sample.error)
            for sample, answers in zip(samples, zip(*columns, strict=True), strict=True)
        ]

    def length(self, prepared: Ready) -> int:
        """Cost of a sample with all models together."""
        return sum(member.embedder.length(prepared[member.named.name]) for member in self._members)

    def embed(self, batch: Sequence[Ready]) -> Mapping[str, np.ndarray]:
        """The vectors of one model after the other."""
        vectors = [member.embedder.embed(_of(member, batch)) for member in self._members]
        if under_way := [of_model for of_model in vectors if isinstance(of_model, PendingVectors)]:
            return PendingVectors(
                self.dims,
                lambda: self._named(vectors),
                ahead=min(pending.ahead for pending in under_way),
                is_over=lambda: all(pending.is_over() for pending in under_way),
            )
        return self._named(vectors)

    def embed_in_fp32(self, batch: Sequence[Ready]) -> Mapping[str, np.ndarray]:
        """The vectors of each model in fp32."""
        return self._named([member.embedder.embed_in_fp32(_of(member, batch)) for member in self._members])

    def splitter(self, chunking: Chunking) -> Splitter:
        """Raise ModelError: a chunk is as long as one model reads, and another reads more or less."""
        del chunking
        raise no_splitter(self._spec, "each of these models counts tokens in its own way")

    def choose_variant(self, *, compile_s: float) -> None:
        """Each model by itself; their passes have the size of the passes of all."""
        for member in self._members:
            member.embedder.batch_size = self.batch_size
            if isinstance(member.embedder, HasVariants):
                member.embedder.choose_variant(compile_s=compile_s)

    def _named(self, vectors: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {
            output.name: of_model[modality]
            for member, of_model in zip(self._members, vectors, strict=True)
            for modality, output in member.named.outputs.items()
        }

    def _ready(self, answers: Sequence[Prepared | SampleError]) -> Ready | SampleError:
        """One sample of all models, from what each made of it."""
        ready: Ready = {}
        cut = False
        for member, answer in zip(self._members, answers, strict=True):
            if isinstance(answer, SampleError):
                return SampleError(answer.code, f"{member.named.name}: {answer.message}")
            cut = cut or isinstance(answer, Truncated)
            ready[member.named.name] = answer
        return Truncated(ready) if cut else ready


def _images_of(member: NamedEmbedder) -> ImageBatcher | None:
    return member.embedder.images if isinstance(member.embedder, ImageEmbedder) else None


def _with(
    member: NamedEmbedder, samples: Sequence[Sample], rows: Sequence[Row | SampleError]
) -> list[Prepared | SampleError]:
    """What a model makes of samples whose images have been prepared."""
    assert isinstance(member.embedder, ImageEmbedder)
    return with_images(samples, rows, member.embedder.with_image)


def _of(member: NamedEmbedder, batch: Sequence[Ready]) -> list[Prepared]:
    """The prepared samples of one model."""
    return [ready[member.named.name] for ready in batch]
