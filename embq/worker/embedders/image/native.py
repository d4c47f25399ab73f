"""Encoded images to the pixels that a model reads, a chunk in one call that holds no lock: the package `embq-native`.

It decodes by the libjpeg-turbo that Pillow brings, and takes plain JPEGs only; see `native/prepare.cpp`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from pyarrow import py_buffer

from embq.core.native import library as native_library
from embq.core.service.log import Events
from embq.worker.embedders.image.preprocess import INTERPOLATIONS, MODES, Fit

FITS_MAX = 16
"""Most models of one call."""

log = Events("worker")


class _Fit(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32) for name in ("height", "width", "mode", "bilinear", "edge", "even", "pillow", "fill")
    ]


def _of(fit: Fit) -> _Fit:
    mode, bilinear = MODES.index(fit.mode), INTERPOLATIONS.index(fit.interpolation)
    return _Fit(fit.height, fit.width, mode, bilinear, fit.edge, fit.even, fit.pillow, fit.fill)


class Native:
    """The library. Thread-safe.

    Attributes:
        kernels: "avx2", "neon" or "plain".
    """

    def __init__(self, library: Any) -> None:
        library.embq_kernels.restype = ctypes.c_char_p
        library.embq_prepare.restype = None
        self._library = library
        self.kernels: str = library.embq_kernels(0).decode()

    def prepare(
        self,
        images: Sequence[bytes | memoryview | None],
        fits: Sequence[Fit],
        rows: Sequence[np.ndarray],
        *,
        fast: bool,
    ) -> list[int]:
        """Decode and resize images for all models at once; 0 for each that is done.

        None, and an image that is not a plain JPEG or that libjpeg warns of, has another number, and undefined rows.

        Args:
            rows: for each fit, uint8 of shape (len(images), height, width, 3), contiguous.
            fast: whether the decoder may make large images smaller.
        """
        count = len(images)
        if len(fits) > FITS_MAX:
            first = self.prepare(images, fits[:FITS_MAX], rows[:FITS_MAX], fast=fast)
            others = self.prepare(images, fits[FITS_MAX:], rows[FITS_MAX:], fast=fast)
            return list(map(max, first, others))
        statuses = (ctypes.c_int32 * count)()
        self._library.embq_prepare(
            (ctypes.c_void_p * count)(*[None if image is None else py_buffer(image).address for image in images]),
            (ctypes.c_int64 * count)(*[0 if image is None else len(image) for image in images]),
            count,
            (_Fit * len(fits))(*map(_of, fits)),
            len(fits),
            (ctypes.c_void_p * len(fits))(*(pixels.ctypes.data for pixels in rows)),
            fast,
            statuses,
        )
        return list(statuses)

    def resize(self, pixels: np.ndarray, fit: Fit, row: np.ndarray) -> bool:
        """Resize one decoded image; False where it would have no height or width.

        Args:
            pixels: uint8 of shape (height, width, 4), contiguous; the last channel is not read.
            row: uint8 of shape (fit.height, fit.width, 3), contiguous.
        """
        height, width, _ = pixels.shape
        to = ctypes.c_void_p(row.ctypes.data)
        return not self._library.embq_resize(
            ctypes.c_void_p(pixels.ctypes.data), height, width, ctypes.byref(_of(fit)), to
        )


@cache
def native() -> Native | None:
    """The library; None where it is not installed, or Pillow's libjpeg does not suit it, which is logged once."""
    if (library := native_library()) is None:
        log.warning("no_native_images", why="embq-native is not installed, or of another version")
        return None
    library.embq_open.restype = ctypes.c_char_p
    problem: bytes | None = library.embq_open(str(_libjpeg()).encode())
    if problem is not None:
        log.warning("no_native_images", libjpeg=_libjpeg(), why=problem.decode())
        return None
    return Native(library)


def _libjpeg() -> str:
    """The libjpeg that Pillow brings, or the one that it is linked to."""
    package = Path(PIL.__file__).parent
    brought = sorted([*package.parent.glob("pillow.libs/libjpeg*"), *package.glob(".dylibs/libjpeg*")])
    return str(brought[0]) if brought else ctypes.util.find_library("jpeg") or "libjpeg.so.62"
