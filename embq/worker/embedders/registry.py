"""Loading a model from its config."""

from __future__ import annotations

from embq.core.errors import ModelError
from embq.core.extras import EXTRA_OF, install, missing
from embq.core.models import FAMILIES, PRECISIONS, REFERENCE, ModelConfig, ModelSpec
from embq.worker.embedders.base import ChunkableEmbedder, Embedder
from embq.worker.embedders.text.splitting import ChunkingEmbedder


def load(config: ModelConfig, device: str) -> Embedder:
    """The model of `config` on `device` ("cpu", "cuda", "cuda:1"), ready to embed: if it names several, all of them.

    Where the config has texts cut into chunks, it is a `ChunkingEmbedder`.

    Raises ModelError, with a next step, if the model is unknown, absent or cannot be loaded here,
    MissingPackageError if a package for it is not installed, ConfigError if the device is not there, and DeviceError
    if it is broken.
    """
    if config.precision not in PRECISIONS:
        raise ModelError(f"unknown precision {config.precision!r}", next_step=f"use one of {', '.join(PRECISIONS)}")
    embedder = _several(config, device) if config.members else _single(config, device)
    if config.chunking is None:
        return embedder
    if config.chunking.late:
        # Here, because it imports what a stub does without.
        from embq.worker.embedders.text.late_chunking import LateChunkingEmbedder

        return LateChunkingEmbedder(embedder, config.chunking, model=config.spec)
    return ChunkingEmbedder(embedder, config.chunking)


def _single(config: ModelConfig, device: str) -> ChunkableEmbedder:
    spec = ModelSpec.parse(config.spec)
    if config.precision == "int8" and not spec.model_family.int8:
        computed = ", ".join(name for name, family in FAMILIES.items() if family.int8)
        raise ModelError(
            f"{spec}: {spec.family} models are not computed in int8, only {computed} models are",
            next_step="use fp32 or bf16",
        )
    try:
        embedder: ChunkableEmbedder = spec.model_family.load(spec, config, device)
        return embedder
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        message = f"{spec} needs the package {package or 'that cannot be imported here'}: {error}"
        raise missing(package, message, next_step=install([package if package in EXTRA_OF else "torch"])) from error


def _several(config: ModelConfig, device: str) -> ChunkableEmbedder:
    loaded = []
    for named in config.members:
        member_config = ModelConfig(
            spec=named.spec,
            modalities=named.modalities,
            precision=config.precision,
            decode=config.decode if "image" in named.modalities else REFERENCE,
        )
        loaded.append((named, _single(member_config, device)))
    # Here, because it imports Pillow, which a single stub does without.
    from embq.worker.embedders.multi_model import MultiModelEmbedder, NamedEmbedder

    return MultiModelEmbedder([NamedEmbedder(named, embedder) for named, embedder in loaded], config)
