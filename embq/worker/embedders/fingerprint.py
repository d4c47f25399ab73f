"""Fingerprint of a loaded model: equal for equal content, whatever the path or the spelling of the spec."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from embq.core.models import ModelConfig
from embq.core.units import canonical_json

VOLATILE_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"}
)
"""Keys of a transformers config that say where the model came from or what wrote it, not what it computes."""


def fingerprint(
    config: ModelConfig, version: str, weights: Mapping[str, torch.Tensor], content: Mapping[str, Any]
) -> str:
    """First 32 hex digits of a SHA-256 over all that decides a model's vectors.

    Args:
        config: what it is identified as gives precision and modalities; its spec is left out, for it says only where
            the model lies.
        version: family and version of the embedder, such as "sentence 1".
        weights: the state dict before any cast to the config's precision.
        content: configuration, tokeniser and preprocessing as JSON-ready values; paths in it are the caller's bug.
    """
    total = hashlib.sha256()
    identity = config.identified_as
    described = [version, identity.precision, sorted(identity.modalities), without_volatile(content)]
    total.update(canonical_json(described).encode("utf-8", "surrogateescape"))
    for name, tensor in sorted(weights.items()):
        total.update(canonical_json([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:32]


def without_volatile(value: Any) -> Any:
    """`value` as JSON-ready data without the keys in `VOLATILE_KEYS`, at any depth; keys become text."""
    if isinstance(value, (str, int, float, bool, type(None))):  # first: nearly all values of a vocabulary
        return value
    if isinstance(value, Mapping):
        return {str(key): without_volatile(item) for key, item in value.items() if key not in VOLATILE_KEYS}
    if isinstance(value, (list, tuple)):
        return [without_volatile(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    return str(value)
