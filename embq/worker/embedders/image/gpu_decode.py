"""Plain JPEGs decoded by the JPEG engines that some GPUs have, many in one call; the CPU resizes them as all others.

An engine's pixels are those of libjpeg but for a few bytes that are off by 1. They come back to the host before they
are resized, so a damaged image fails before it is in a batch with others, all models' sizes are made of one decoded
image, and a pass is the same as on the other paths. What the engines do not decode takes the path `cpu-exact`, and so
does a chunk that comes while all calls are taken: they and the CPU's threads empty the same queue.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embq.core.errors import DeviceFullError, ModelError
from embq.worker.embedders.device.errors import using
from embq.worker.embedders.image.native import FITS_MAX, native
from embq.worker.embedders.image.preprocess import Fit

AT_ONCE = 3
"""Calls at the same time: an H100's engines are busy with two."""

MAX_PIXELS = 12_500_000
"""Most pixels of one call; a larger image is decoded by the CPU. A call takes 7 bytes of the device and 4 page-locked
ones for each of its pixels."""

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

Pair = tuple[np.ndarray, np.ndarray]
"""(addresses, sizes) of encoded images, or (heights, widths)."""


class GpuDecoder:
    """Decodes plain JPEGs on one device. Safe to use from any thread.

    Raises ModelError if nvJPEG or embq-native is missing, or the device has no JPEG engine.
    """

    def __init__(self, device: torch.device) -> None:
        library = native()
        if library is None:
            raise ModelError(
                "--decode gpu needs embq-native",
                next_step="install it: pip install ./native in a copy of embq's repository",
            )
        self._idle: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        with using(device):
            engines = NvJpeg()
            for _ in range(AT_ONCE):
                self._idle.put(_Call(engines, device))
        self._native = library

    def decoded(
        self, images: Sequence[bytes | memoryview | None], fits: Sequence[Fit], rows: Sequence[np.ndarray]
    ) -> list[bool]:
        """Write the pixels of the images that the engines decode now to rows, for all models; whether each is done.

        Raises DeviceError if the device is broken.

        Args:
            rows: for each fit, uint8 of shape (len(images), height, width, 3), contiguous.
        """
        done = [False] * len(images)
        if len(fits) > FITS_MAX:
            return done
        try:
            call = self._idle.get_nowait()
        except queue.Empty:
            return done
        try:
            files = self._native.buffers(images)
            sides = self._native.sides(*files)
            for group in _groups(np.multiply(*sides, dtype=np.int64)):
                for place in self._decode(call, files, sides, group, fits, rows):
                    done[place] = True
        except DeviceFullError:
            pass
        finally:
            self._idle.put(call)
        return done

    def _decode(
        self, call: _Call, files: Pair, sides: Pair, group: np.ndarray, fits: Sequence[Fit], rows: Sequence[np.ndarray]
    ) -> list[int]:
        """A call for a group of images; if it fails, one for each, so that no image depends on those beside it.

        Returns the places of those that are done.
        """
        heights, widths = (side[group] for side in sides)
        addresses, sizes = (of_all[group] for of_all in files)
        pixels = call.pixels(addresses, sizes, heights, widths)
        if pixels is not None:
            return self._native.resize_all(pixels, heights, widths, group, fits, rows)
        if len(group) == 1:
            return []
        return [
            done
            for at in range(len(group))
            for done in self._decode(call, files, sides, group[at : at + 1], fits, rows)
        ]


class _Call:
    """What one call needs of a device: a stream and memory, which grows to the largest."""

    def __init__(self, engines: NvJpeg, device: torch.device) -> None:
        self._engines, self._device = engines, device
        self._state = engines.state()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._rgb = self._rgbx = self._host = torch.empty(0, dtype=torch.uint8)

    def pixels(
        self, addresses: np.ndarray, sizes: np.ndarray, heights: np.ndarray, widths: np.ndarray
    ) -> np.ndarray | None:
        """The decoded images one behind the other: uint8 of shape (all pixels, 4), of which the last channel means
        nothing, until the next call. None if an image among them cannot be decoded.

        Raises DeviceError if the device is broken, and DeviceFullError if it has no room.
        """
        lengths = np.multiply(heights, widths, dtype=np.int64)
        ends = np.cumsum(lengths)
        count = int(ends[-1])
        with using(self._device), torch.cuda.stream(self._stream), torch.inference_mode(False):
            if len(self._rgb) < 3 * count:
                rgb = torch.empty(3 * count, dtype=torch.uint8, device=self._device)
                rgbx = torch.empty(4 * count, dtype=torch.uint8, device=self._device)
                host = torch.empty(4 * count, dtype=torch.uint8, pin_memory=True)
                self._rgb, self._rgbx, self._host = rgb, rgbx, host  # all of them, or none if there is no room
            starts = 3 * (ends - lengths)
            status = self._engines.decode(self._state, addresses, sizes, self._rgb, starts, widths)
            if not status:
                rgbx = self._rgbx[: 4 * count].view(-1, 4)
                rgbx[:, :3] = self._rgb[: 3 * count].view(-1, 3)
                self._host[: 4 * count].copy_(rgbx.view(-1), non_blocking=True)
            # Raises if the device is broken, which nvJPEG may report as it reports a damaged image.
            self._stream.synchronize()
        return None if status else self._host[: 4 * count].view(-1, 4).numpy()


def gpu_decoder(device: torch.device) -> GpuDecoder:
    """The decoder of a worker on this device; ModelError if that is not a CUDA device."""
    if device.type != "cuda":
        raise ModelError(f"--decode gpu needs a CUDA device, not {device}", next_step="use --decode cpu-exact")
    return _shared(device)


@cache
def _shared(device: torch.device) -> GpuDecoder:
    """One for all models of a process, so that `AT_ONCE` holds for them together."""
    return GpuDecoder(device)


def _groups(pixels: np.ndarray) -> Iterator[np.ndarray]:
    """Places of images for one call each: those with 1 to `MAX_PIXELS` pixels, as many together."""
    group: list[int] = []
    total = 0
    for place in np.flatnonzero((pixels > 0) & (pixels <= MAX_PIXELS)):
        if total + pixels[place] > MAX_PIXELS:
            yield np.array(group, np.int32)
            group, total = [], 0
        group.append(int(place))
        total += int(pixels[place])
    if group:
        yield np.array(group, np.int32)


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
    """nvJPEG on the engines of the current CUDA device, by ctypes: a call leaves Python's lock to others.

    States are for one thread at a time, all else for any. Declared as in nvjpeg.h of CUDA 12 and 13.

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
