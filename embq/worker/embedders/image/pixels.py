"""Pixels that a model reads, from an encoded image: uint8, of one size, not normalised.

Four paths to the same picture. `reference` is what the model's own library does with Pillow. `cpu-exact` decodes by
libjpeg-turbo and resizes by torch's kernel for bytes: two to three times as fast, and off by a step of 255 here and
there. `cpu-fast` has the decoder make large JPEGs smaller, where at least twice the wanted size is left. `gpu` has a
GPU decode and resize plain JPEGs, many at a time, and takes `cpu-exact` for all other images. What these do not know
(palettes, alpha, 16 bits, CMYK) takes the first path, bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import interpolate

from embq.core.errors import SampleError
from embq.core.models import DECODES, GPU
from embq.core.service.log import Events
from embq.worker.embedders.image.decoding import Picture
from embq.worker.embedders.image.gpu_decode import GpuDecoder
from embq.worker.embedders.image.jpeg import SCALES, Frame
from embq.worker.embedders.image.preprocess import Fit, Preprocess, placed, usual

ROOM = 2
"""Least ratio of an image that the decoder made smaller to the wanted size, on each side: resizing then hides the
decoder's coarse filter."""

SIMD = ("AVX2", "AVX512", "SVE256", "SVE128")
"""Capabilities of CPUs, as torch names them, with a fast kernel that resizes bytes."""

log = Events("worker")
_mine = threading.local()


class Pixels:
    """Preprocessing of images by one of the paths. Thread-safe.

    Args:
        decode: one of `embq.core.models.DECODES`.
        gpu: what decodes for the path `gpu`, which has to have one; the other paths have none.
    """

    def __init__(self, preprocess: Preprocess, decode: str, gpu: GpuDecoder | None = None) -> None:
        assert decode in DECODES
        assert (decode == GPU) == (gpu is not None)
        self._gpu = gpu
        self._fit, self._literal, self._decode = preprocess.fit, preprocess.literal, decode
        self._fills_holes = preprocess.fills_holes
        self.shape = (preprocess.fit.height, preprocess.fit.width, 3)
        if decode != "reference" and torch.backends.cpu.get_cpu_capability() not in SIMD:
            log.warning("slow_resizing", processor=torch.backends.cpu.get_cpu_capability())

    def decode_ahead(self, pictures: Sequence[Picture]) -> None:
        """Have the GPU decode what it can of images that are asked for next; nothing on the other paths.

        Raises DeviceError where the device is broken.
        """
        if self._gpu is not None:
            _compute_alone()
            self._gpu.decode_ahead(pictures, self._fit)

    def of(self, picture: Picture) -> np.ndarray:
        """The pixels of one image: uint8 of shape `shape`. Raises SampleError as `into` does."""
        made = np.empty(self.shape, np.uint8)
        self.into(picture, made)
        return made

    def into(self, picture: Picture, row: np.ndarray) -> None:
        """Write the pixels of one image to `row`, uint8 of shape `shape`: those of `decode_ahead` where it made them.

        Raises SampleError for an image that cannot be decoded, with the codes of `open_image`;
        what is in `row` is then undefined.
        """
        _compute_alone()
        if self._gpu is not None and self._fit in picture.resized:
            row[...] = picture.resized[self._fit]
            return
        if self._decode != "reference" and not (self._fills_holes and picture.has_clear_colour):
            scale = 1
            if self._decode == "cpu-fast" and picture.frame is not None:
                scale = scale_for(picture.frame, self._fit)
            pixels = picture.pixels(scale)
            if pixels is not None:
                if pixels.shape[:2] == picture.size:
                    scale = 1  # also of a damaged JPEG, which Pillow decodes whole
                placed(_resized(pixels, scale, picture.size, self._fit), self._fit, row)
                return
        image = picture.decoded()
        try:
            row[...] = np.asarray(self._literal(image))
        except ValueError as error:
            raise SampleError("unsupported_mode", f"mode {image.mode}: {error}") from error


def pixels_of(size: int, decode: str) -> Pixels:
    """The pixels of a model of the usual kind; see `embq.worker.embedders.image.preprocess.usual`."""
    return Pixels(usual(size), decode)


def scale_for(frame: Frame, fit: Fit) -> int:
    """By how much the decoder may make an image smaller: one of `SCALES`, or 1."""
    height, width = fit.resized(frame.height, frame.width)
    for scale in SCALES:
        if frame.height // scale >= ROOM * height and frame.width // scale >= ROOM * width:
            return scale
    return 1


def _resized(pixels: np.ndarray, scale: int, size: tuple[int, int], fit: Fit) -> np.ndarray:
    """`pixels` as large as before the cut, by the kernels that Pillow has (a = -0.5, as wide as the reduction).

    Args:
        scale: by which they were made smaller already; then they may stand for a little more than the whole image,
            because the decoder rounds up.
        size: of the whole image.
    """
    wanted, interpolation = fit.resized(*size), fit.interpolation
    if pixels.shape[:2] == wanted:
        return pixels
    height, width = wanted
    # With these strides torch knows the layout again, and gives one like it: else pixels would come out plane by plane,
    # and laying them side by side again would take as long as resizing (150 us for 224x224). The views are numpy's:
    # each of torch's lets the interpreter's lock go, and 16 threads that wait for it decode less than four.
    source = torch.from_numpy(pixels.reshape(1, *pixels.shape).transpose(0, 3, 1, 2))
    if scale > 1:
        # The sides as they would be without rounding; a hair more, because torch rounds what it gets down.
        sides = [(side * scale / whole) * (1 + 1e-9) for side, whole in zip(wanted, size, strict=True)]
        made = interpolate(source, scale_factor=sides, mode=interpolation, antialias=True)[:, :, :height, :width]
    elif fit.columns_first(*size):
        source = interpolate(source, size=(height, size[1]), mode=interpolation, antialias=True)
        made = interpolate(source, size=wanted, mode=interpolation, antialias=True)
    else:
        made = interpolate(source, size=wanted, mode=interpolation, antialias=True)
    result: np.ndarray = made.numpy()[0].transpose(1, 2, 0)
    return result


def _compute_alone() -> None:
    """Else each decoding thread would have a pool of torch's threads of its own.

    The main thread decodes a few images at most, and has to know how many cores there are when it loads the next model.
    """
    if not getattr(_mine, "alone", False) and threading.current_thread() is not threading.main_thread():
        torch.set_num_threads(1)
        _mine.alone = True


class Normaliser:
    """Brings pixels to the numbers that a model reads, on its device.

    In float32 and by the operations of torchvision's ToTensor and Normalize, in their order, so that the numbers are
    the same bit by bit; the type of the model comes last, because in bf16 each step would cost as much as a step of
    the pixels.
    """

    def __init__(self, preprocess: Preprocess, device: torch.device) -> None:
        self._mean = torch.tensor(preprocess.mean, dtype=torch.float32, device=device).view(1, 3, 1, 1)
        self._std = torch.tensor(preprocess.std, dtype=torch.float32, device=device).view(1, 3, 1, 1)

    def __call__(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of shape (n, 3, height, width) for uint8 `rows` of shape (n, height, width, 3) on the device."""
        # Channels stay last where they are, which a GPU's convolutions may want; a CPU copies them anyway.
        layout = torch.preserve_format if rows.is_cuda else torch.contiguous_format
        numbers = rows.permute(0, 3, 1, 2).to(dtype=torch.float32, memory_format=layout)
        return numbers.div_(255).sub_(self._mean).div_(self._std).to(dtype)
