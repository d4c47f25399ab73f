"""The library of `prepare.cpp`; `embq.worker.embedders.image.native` calls it."""

from pathlib import Path

LIBRARY = Path(__file__).parent / "embq_native.so"
"""Opened by ctypes: it knows nothing of Python, so one file serves all its versions."""
