"""The library of the package `embq-native`: what costs Python too much for each image. embq works without it."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def library() -> ctypes.CDLL | None:
    """The library, whose calls hold no lock of the interpreter; None where it is not installed."""
    try:
        import embq_native
    except ImportError:
        return None
    return ctypes.CDLL(str(embq_native.LIBRARY))
