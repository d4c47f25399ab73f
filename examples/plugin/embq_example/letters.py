"""Model family `letters`: hashed counts of three letters, as a baseline that needs no weights. Spec: letters:<dim>."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embq.plugins import Chunking, ModelConfig, ModelError, ModelFamily, ModelSpec, Sample, SampleError, content_hash

if TYPE_CHECKING:
    import numpy as np

    from embq.plugins import Splitter

VERSION = "letters 1"
"""Increase it when the same text gets another vector."""


class LettersEmbedder:
    """See `embq.plugins.ChunkableEmbedder`.

    Args:
        dim: length of a vector.
    """

    batch_size = 256
    token_budget = 0
    window = 256
    cost = sum

    def __init__(self, config: ModelConfig, dim: int) -> None:
        self.dims: Mapping[str, int] = {"text": dim}
        self.fingerprint = content_hash([VERSION, dim, config.precision])
        self._dim = dim
        self._config = config

    def prepare(self, samples: Sequence[Sample]) -> list[Any | SampleError]:
        """The places of a text's letters in its vector."""
        from embq.plugins import prepare_each, text_of

        return prepare_each(samples, lambda sample: self._places(text_of(sample)))

    def length(self, prepared: Any) -> int:
        """All texts cost the same."""
        return 1

    def embed(self, batch: Sequence[Any]) -> Mapping[str, np.ndarray]:
        """float32 (len(batch), dim) of length 1."""
        import numpy as np

        counts = np.zeros((len(batch), self._dim), np.float32)
        for row, places in zip(counts, batch, strict=True):
            np.add.at(row, places, 1)
        return {"text": counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-12)}

    def embed_in_fp32(self, batch: Sequence[Any]) -> Mapping[str, np.ndarray]:
        """The same: it knows no other precision."""
        return self.embed(batch)

    def splitter(self, chunking: Chunking) -> Splitter:
        """Cuts texts by words."""
        from embq.plugins import counted_splitter

        model = self._config.spec
        return counted_splitter(lambda text: len(text.split()), chunking, extra=0, longest=1 << 20, model=model)

    def _places(self, text: str) -> list[int]:
        padded = f"  {text.lower()} "
        return [zlib.crc32(padded[at : at + 3].encode()) % self._dim for at in range(len(padded) - 2)]


def load(spec: ModelSpec, config: ModelConfig, device: str) -> LettersEmbedder:  # noqa: ARG001 - it computes on the CPU
    """The model of a spec; ModelError where it is none."""
    from embq.plugins import check_modalities

    spec.check_params()
    check_modalities(config, "text")
    if not spec.name.isascii() or not spec.name.isdigit() or not 1 <= int(spec.name) <= 65_536:
        raise ModelError(f"{spec}: the dimension must be 1 to 65536", next_step="for example letters:256")
    return LettersEmbedder(config, int(spec.name))


FAMILY = ModelFamily(
    help="letters:<dim>                           hashed counts of three letters", embeds=("text",), load=load
)
