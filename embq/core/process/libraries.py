"""Versions of libraries without importing them, and imports of libraries that are avoided."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.abc import MetaPathFinder


def leave_out_pandas() -> None:
    """Stop pyarrow from importing pandas in this process; conversions from and to pandas then fail.

    pyarrow imports an installed pandas when it makes its first array, to recognise its objects. That takes 0.4 s of a
    core and 30 MB in each process of a run. pyarrow remembers a failed import.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    nowhere = _Nowhere()
    sys.meta_path.insert(0, nowhere)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(nowhere)


class _Nowhere(MetaPathFinder):
    """Import hook without pandas."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> None:
        """Raises ImportError for pandas."""
        if name == "pandas":
            raise ImportError(name)


MODEL_PACKAGES = ("torch", "open_clip_torch", "sentence-transformers", "transformers", "tokenizers")
"""Distributions that load models. Another version may build another model from the same files; its fingerprint shows
that."""


def version_of(name: str) -> str:
    """Version of an installed distribution; "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def model_packages() -> dict[str, str]:
    """The installed ones of `MODEL_PACKAGES`, with their versions."""
    return {name: version for name in MODEL_PACKAGES if (version := version_of(name))}
