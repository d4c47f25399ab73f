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
        to = _pointers(fits, rows, count)
        files = _at(addresses, np.uint64, count), _at(sizes, np.uint64, count)
        self._library.embq_prepare(*files, count, *to, fast, statuses)
        return list(statuses)

    @staticmethod
    def buffers(images: Sequence[bytes | memoryview | None]) -> tuple[np.ndarray, np.ndarray]:
        """(addresses, sizes) of encoded images, uint64; 0 for None. Good for as long as the images are held."""
        held = [None if image is None else py_buffer(image) for image in images]
        return (
            np.array([0 if buffer is None else buffer.address for buffer in held], np.uint64),
            np.array([0 if buffer is None else buffer.size for buffer in held], np.uint64),
        )

    def sides(self, addresses: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(heights, widths) of the images that a JPEG engine may decode, int32; 0 for all others. See `buffers`."""
        count = len(sizes)
        heights, widths = np.zeros((2, count), np.int32)
        files = _at(addresses, np.uint64, count), _at(sizes, np.uint64, count)
        self._library.embq_sides(*files, count, _at(heights, np.int32, count), _at(widths, np.int32, count))
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
        count, most = len(places), len(rows[0])
        statuses = np.ones(most, np.int32)
        sides = [_at(numbers, np.int32, count) for numbers in (heights, widths, places)]
        if count and (min(heights.min(), widths.min(), places.min()) < 0 or places.max() >= most):
            raise ValueError("a negative side, or a place beyond the rows")
        source = _at(pixels, np.uint8, int(np.dot(heights.astype(np.int64), widths)), 4)
        to = _pointers(fits, rows, most)
        self._library.embq_resize_all(source, *sides, count, *to, _at(statuses, np.int32, most))
        return [int(place) for place in places if not statuses[place]]

    def resize(self, pixels: np.ndarray, fit: Fit, row: np.ndarray) -> bool:
        """Resize one decoded image; False if it would have no height or width.

        Args:
            pixels: uint8 of shape (height, width, 4), contiguous; the last channel is not read.
            row: uint8 of shape (fit.height, fit.width, 3), contiguous.
        """
        height, width, _ = pixels.shape
        source, to = _at(pixels, np.uint8, height, width, 4), _at(row, np.uint8, fit.height, fit.width, 3)
        return not self._library.embq_resize(source, height, width, ctypes.byref(_of(fit)), to)


def _at(array: np.ndarray, dtype: type[np.generic], *shape: int) -> ctypes.c_void_p:
    """Return the address of an array. The library cannot tell how long it is: raises ValueError for any other shape,
    type or layout."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{array.dtype} of shape {array.shape} instead of contiguous {dtype.__name__} of shape {shape}"
        )
    return ctypes.c_void_p(array.ctypes.data)


def _pointers(fits: Sequence[Fit], rows: Sequence[np.ndarray], images: int) -> tuple[ctypes.Array[_Fit], int, Any]:
    """(the fits, how many there are, where the rows of each begin)."""
    count = len(fits)
    to = [_at(pixels, np.uint8, images, fit.height, fit.width, 3) for pixels, fit in zip(rows, fits, strict=True)]
    return (_Fit * count)(*map(_of, fits)), count, (ctypes.c_void_p * count)(*to)


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
