"""What a run computes with: one model, or several beside each other, and all that decides their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from core.model_spec import MODALITIES
from core.run.rows import SIMILARITY
from core.units import content_hash
from core.wire import convert, one_of

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
"""What is computed in."""

CPU_DECODES = ("cpu-exact", "cpu-fast", "reference")
"""Paths from an encoded image to the pixels that a model reads, on any machine."""

GPU = "gpu"
"""The path on which a CUDA device decodes, too."""

DECODES = (*CPU_DECODES, GPU)
"""All paths from an encoded image to pixels."""

REFERENCE = "reference"
"""The path that is what the model's own library does. What embeds no image has this one, and what was begun before
there were others."""

SpecText = Annotated[str, Meta(min_length=1, max_length=16_000)]
Modalities = Annotated[tuple[Annotated[str, one_of(MODALITIES)], ...], Meta(min_length=1, max_length=2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """How long texts are cut into chunks, each of which gets a row.

    Attributes:
        tokens: most tokens of a chunk as the model sees it, with its special tokens and its prompt.
        overlap: most tokens that a chunk repeats from the end of the one before, at most half of `tokens`.
    """

    tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    overlap: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

    def __str__(self) -> str:
        return f"--chunk-tokens {self.tokens}" + (f" --chunk-overlap {self.overlap}" if self.overlap else "")

    def describe(self) -> dict[str, int]:
        """The chunking as JSON-ready values."""
        return {"tokens": self.tokens, "overlap": self.overlap}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One of the vectors that each row gets.

    Attributes:
        name: what it is called: its modality, or with several models the model's name, and the modality after it
            where that model embeds two.
        spec: canonical text of the spec of the model that makes it.
        modality: what it is made from, one of `MODALITIES`.
    """

    name: str
    spec: str
    modality: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """One of several models that embed the same samples.

    Attributes:
        name: short name, with which its columns begin.
        spec: canonical text of its spec.
        modalities: those of the run that it embeds, at least one.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    spec: SpecText
    modalities: Modalities

    def __str__(self) -> str:
        return f"{self.name}={self.spec}"

    @property
    def outputs(self) -> dict[str, Output]:
        """Modality -> what the model gives for it."""
        alone = len(self.modalities) == 1
        return {
            modality: Output(name=self.name if alone else f"{self.name}_{modality}", spec=self.spec, modality=modality)
            for modality in self.modalities
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All that decides the numbers a worker computes; one RQ queue and one loaded model per config.

    Attributes:
        spec: canonical text of the model spec; with several models all of them, as people see them.
        modalities: what is embedded of a sample: ("text",), ("image",) or ("image", "text").
        precision: one of `PRECISIONS`.
        chunking: how texts are cut; None embeds each text as one, cut off at what the model reads.
        members: the models, in the order in which they were named, where there are several; else ().
        decode: how images become pixels, one of `DECODES`.
    """

    spec: SpecText
    modalities: Modalities
    precision: Annotated[str, one_of(PRECISIONS)]
    chunking: Chunking | None = None
    members: Annotated[tuple[NamedModel, ...], Meta(max_length=64)] = ()
    decode: Annotated[str, one_of(DECODES)] = REFERENCE

    @classmethod
    def several(
        cls, members: Sequence[NamedModel], *, modalities: tuple[str, ...], precision: str, decode: str = REFERENCE
    ) -> ModelConfig:
        """The config of models that embed each sample together."""
        spec = " + ".join(str(member) for member in members)
        return cls(spec=spec, modalities=modalities, precision=precision, members=tuple(members), decode=decode)

    @property
    def identified_as(self) -> ModelConfig:
        """The config that decides the model's fingerprint: this one; another only in `core.run.query_config`."""
        return self

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The vectors of a row, in the order of its columns."""
        if not self.members:
            return tuple(Output(name=modality, spec=self.spec, modality=modality) for modality in self.modalities)
        return tuple(output for member in self.members for output in member.outputs.values())

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of `outputs`: what an embedder's vectors are called."""
        return tuple(output.name for output in self.outputs)

    @property
    def compared(self) -> dict[str, tuple[str, str]]:
        """Column of a cosine -> names of the two outputs, image and text, of each model that embeds both."""
        parts = [(f"{one.name}_", one.modalities) for one in self.members] or [("", self.modalities)]
        return {
            f"{prefix}{SIMILARITY}": (f"{prefix}image", f"{prefix}text")
            for prefix, modalities in parts
            if {"image", "text"} <= set(modalities)
        }

    @property
    def queue_key(self) -> str:
        """Name of the config's queue: the same for every run that can share a loaded model."""
        cut = [] if self.chunking is None else [self.chunking.describe()]
        members = [[member.name, member.spec, list(member.modalities)] for member in self.members]
        path = [] if self.decode == REFERENCE else [{"decode": self.decode}]
        return content_hash([self.spec, list(self.modalities), self.precision, *cut, *members, *path])[:12]

    def describe(self) -> dict[str, Any]:
        """The config as JSON-ready values; `from_description` is its inverse."""
        members = [{"name": m.name, "spec": m.spec, "modalities": list(m.modalities)} for m in self.members]
        return {
            "spec": self.spec,
            "modalities": list(self.modalities),
            "precision": self.precision,
            **({} if self.chunking is None else {"chunking": self.chunking.describe()}),
            **({"members": members} if members else {}),
            **({} if self.decode == REFERENCE else {"decode": self.decode}),
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> ModelConfig:
        """The config that `describe` gave; other fields are ignored. MalformedError for anything else."""
        return convert(cls, described, what="model of a run")
