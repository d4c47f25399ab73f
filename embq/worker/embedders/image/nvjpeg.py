"""nvJPEG's decoder for the JPEG engines of a GPU, called by ctypes: a chunk of images in one call, without the
interpreter's lock.

Declared as in nvjpeg.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embq.core.errors import ModelError

HARDWARE = 3
"""NVJPEG_BACKEND_HARDWARE: the engines. The decoders that run on the GPU's own cores take them from the model."""
INTERPOLATES = 1 << 5
"""NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION: chroma as libjpeg makes it."""
RGB = 5
"""NVJPEG_OUTPUT_RGBI: bytes of shape (height, width, 3)."""
COMPONENTS = 4
"""NVJPEG_MAX_COMPONENT."""

IMAGE = np.dtype([("channel", np.uint64, COMPONENTS), ("pitch", np.uint64, COMPONENTS)])
"""nvjpegImage_t: an address and the bytes of a row for each plane."""


class State:
    """Memory for the calls of one thread.

    Attributes:
        handle: of the library.
        images: of one call that it is set up for; setting up may wait for all of the device.
    """

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle
        self.images = 0


class NvJpeg:
    """The engines of the current CUDA device. States are for one thread at a time, all else for any.

    Raises ModelError if the library is missing, or the device has no engine.
    """

    def __init__(self) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()
        status = self._library.nvjpegCreateEx(HARDWARE, None, None, INTERPOLATES, ctypes.byref(self._handle))
        if status:
            raise ModelError(
                f"this GPU has no JPEG engine, says nvJPEG (status {status})",
                next_step="use --decode cpu-exact",
            )

    def state(self) -> State:
        """A new one."""
        state = ctypes.c_void_p()
        status = self._library.nvjpegJpegStateCreate(self._handle, ctypes.byref(state))
        if status:
            raise torch.OutOfMemoryError(f"nvjpegJpegStateCreate: {status}")
        return State(state)

    def decode(
        self,
        state: State,
        addresses: np.ndarray,
        sizes: np.ndarray,
        pixels: torch.Tensor,
        starts: np.ndarray,
        widths: np.ndarray,
    ) -> int:
        """Begin to decode encoded images on the current stream; returns 0, or why nothing can be said of any of them.

        Args:
            addresses, sizes: of the encoded images, uint64; they may go when the stream is done.
            pixels: uint8 on the device; those of an image go to `starts`, of shape (height, its width, 3).
        """
        images = np.zeros(len(addresses), IMAGE)
        images["channel"][:, 0] = pixels.data_ptr() + starts
        images["pitch"][:, 0] = 3 * widths
        status: int = 0
        if state.images != len(images):
            state.images = len(images)
            status = self._library.nvjpegDecodeBatchedInitialize(self._handle, state.handle, len(images), 1, RGB)
        if not status:
            pointers = (ctypes.c_void_p(array.ctypes.data) for array in (addresses, sizes, images))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = self._library.nvjpegDecodeBatched(self._handle, state.handle, *pointers, stream)
        if status:
            state.images = 0
        return status


def _library() -> Any:
    """The library of torch's CUDA version: the one that torchvision brings, of its wheel, or of the system."""
    version = str(torch.version.cuda).partition(".")[0]
    patterns = ("torchvision.libs/libnvjpeg*", "nvidia/cu13/lib/libnvjpeg*", "nvidia/nvjpeg/lib/libnvjpeg*")
    brought = [path for pattern in patterns for path in Path(torch.__file__).parents[1].glob(pattern)]
    libraries = [str(path) for path in brought if f".so.{version}" in path.name]
    try:
        return ctypes.CDLL((libraries or [f"libnvjpeg.so.{version}"])[0])
    except OSError as error:
        wheel = "nvidia-nvjpeg" if version == "13" else f"nvidia-nvjpeg-cu{version}"
        raise ModelError(f"--decode gpu needs nvJPEG: {error}", next_step=f"pip install {wheel}") from error
