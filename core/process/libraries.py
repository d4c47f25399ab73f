"""Versions of the libraries on which a model's vectors depend, without importing them."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.abc import MetaPathFinder


def leave_out_pandas() -> None:
    """Have pyarrow do without pandas in this process, which then can convert neither from nor to it.

    pyarrow imports pandas, where that is installed, when it makes its first array, only to see whether it was given
    something of pandas. That takes 0.4 s of a core and 30 MB in each process of a run. It remembers a failed import.
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
    """Finds that there is no pandas."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> None:
        """Raises ImportError for pandas."""
        if name == "pandas":
            raise ImportError(name)


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
