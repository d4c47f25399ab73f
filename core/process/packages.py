"""Versions of the libraries on which a model's vectors depend, without importing them."""

from __future__ import annotations

import importlib.metadata

MODEL_PACKAGES = ("torch", "open_clip_torch", "sentence-transformers", "transformers", "tokenizers")
"""What loads models. Another version may build another model from the same files, which its fingerprint then shows."""


def version_of(name: str) -> str:
    """Version of an installed distribution; "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def model_packages() -> dict[str, str]:
    """Those of `MODEL_PACKAGES` that are installed here."""
    return {name: version for name in MODEL_PACKAGES if (version := version_of(name))}
