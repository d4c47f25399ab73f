"""The library of the package `embq-native`: what costs Python too much for each image. embq works without it."""

from __future__ import annotations

import ctypes
from functools import cache

INTERFACE = 4
"""Of the functions as they are called here, as `native/members.cpp` counts it."""


@cache
def library() -> ctypes.CDLL | None:
    """The library, whose calls hold no lock of the interpreter; None if it is not installed, cannot be loaded, or is
    of another version."""
    try:
        import embq_native

        loaded = ctypes.CDLL(str(embq_native.LIBRARY))
        interface: int = loaded.embq_interface()
    except (ImportError, AttributeError, OSError):
        return None
    return loaded if interface == INTERFACE else None
