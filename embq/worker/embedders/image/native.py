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
            rest = self.prepare(images, fits[FITS_MAX:], rows[FITS_MAX:], fast=fast)
            return list(map(max, first, rest))
        statuses = (ctypes.c_int32 * count)()
        addresses, sizes = self.buffers(images)
        to = _pointers(fits, rows)
        self._library.embq_prepare(_at(addresses), _at(sizes), count, *to, fast, statuses)
        return list(statuses)

    @staticmethod
    def buffers(images: Sequence[bytes | memoryview | None]) -> tuple[np.ndarray, np.ndarray]:
        """(addresses, sizes) of encoded images, uint64; 0 for None. Good for as long as the images are held."""
        return (
            np.array([0 if image is None else py_buffer(image).address for image in images], np.uint64),
            np.array([0 if image is None else len(image) for image in images], np.uint64),
        )

    def sides(self, addresses: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(heights, widths) of the images that a JPEG engine may decode, int32; 0 for all others. See `buffers`."""
        heights, widths = np.zeros((2, len(sizes)), np.int32)
        self._library.embq_sides(_at(addresses), _at(sizes), len(sizes), _at(heights), _at(widths))
        return heights, widths

    def resize_all(
        self,
        pixels: np.ndarray,
        heights: np.ndarray,
        widths: np.ndarray,
        places: np.ndarray,
        fits: Sequence[Fit],
        rows: Sequence[np.ndarray],
    ) -> list[int]:
        """Resize decoded images for all models at once; the places of those that have a height and a width then.

        Args:
            pixels: uint8 of shape (all pixels, 4), contiguous: the images one behind the other; see `resize`.
            heights, widths, places: of each image, int32; the last are those of its pixels in each of `rows`.
            rows: as of `prepare`.
        """
        statuses = np.ones(len(rows[0]), np.int32)
        sides, count = (_at(heights), _at(widths), _at(places)), len(places)
        to = _pointers(fits, rows)
        self._library.embq_resize_all(_at(pixels), *sides, count, *to, _at(statuses))
        return [int(place) for place in places if not statuses[place]]

    def resize(self, pixels: np.ndarray, fit: Fit, row: np.ndarray) -> bool:
        """Resize one decoded image; False if it would have no height or width.

        Args:
            pixels: uint8 of shape (height, width, 4), contiguous; the last channel is not read.
            row: uint8 of shape (fit.height, fit.width, 3), contiguous.
        """
        height, width, _ = pixels.shape
        return not self._library.embq_resize(_at(pixels), height, width, ctypes.byref(_of(fit)), _at(row))


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _pointers(fits: Sequence[Fit], rows: Sequence[np.ndarray]) -> tuple[ctypes.Array[_Fit], int, Any]:
    """(the fits, how many there are, where the rows of each begin)."""
    count = len(fits)
    return (_Fit * count)(*map(_of, fits)), count, (ctypes.c_void_p * count)(*(pixels.ctypes.data for pixels in rows))


@cache
def native() -> Native | None:
    """The library; None if it is not installed, or Pillow's libjpeg does not suit it, which is logged once."""
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
