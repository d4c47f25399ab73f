"""Pixels that a model reads, from an encoded image: uint8, of one size, not normalised.

Four paths to the same picture. `reference` is what the model's own library does with Pillow. `cpu-exact` decodes plain
JPEGs and resizes all images by a library of our own, if it is installed: three times as fast, and off by at most 2
of 255. `cpu-fast` has the decoder make large JPEGs smaller, where at least twice the wanted size is left. `gpu` has the
JPEG engines of a GPU decode plain JPEGs, many at a time, and is `cpu-exact` but for that. What these do not know
(palettes, alpha, 16 bits, CMYK) takes the first path, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from embq.core.errors import SampleError
from embq.core.models import DECODES, GPU, REFERENCE
from embq.core.units import Sample
from embq.worker.embedders.image.decoding import Picture
from embq.worker.embedders.image.gpu_decode import GpuDecoder
from embq.worker.embedders.image.native import native
from embq.worker.embedders.image.preprocess import Fit, Preprocess, placed, usual

RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
"""Interpolation of a fit, as Pillow calls it."""


class Pixels:
    """Preprocessing of images by one of the paths. Thread-safe.

    Args:
        decode: one of `embq.core.models.DECODES`.
        gpu: what decodes for the path `gpu`, which has to have one; the other paths have none.

    Attributes:
        fit: the geometry.
        shape: of the pixels.
        native: what prepares whole chunks; None if Pillow does.
        is_fast: whether the decoder may make large images smaller.
    """

    def __init__(self, preprocess: Preprocess, decode: str, gpu: GpuDecoder | None = None) -> None:
        assert decode in DECODES
        assert (decode == GPU) == (gpu is not None)
        self.fit = preprocess.fit
        self.shape = (preprocess.fit.height, preprocess.fit.width, 3)
        self.gpu = gpu
        self._by_fit = decode != REFERENCE
        self.native = native() if self._by_fit else None
        self.is_fast = decode == "cpu-fast"
        self._literal, self._fills_holes = preprocess.literal, preprocess.fills_holes

    def of(self, data: bytes | None) -> np.ndarray:
        """The pixels of one encoded image: uint8 of shape `shape`. Raises SampleError as `by_pillow` does."""
        rows = np.empty((1, *self.shape), np.uint8)
        (errors,) = prepared([Sample(ordinal=0, key="", image=data)], [self], [rows])
        if errors[0] is not None:
            raise errors.pop() or AssertionError  # and this frame does not refer to the error, which refers to it
        pixels: np.ndarray = rows[0]
        return pixels

    def by_pillow(self, picture: Picture, row: np.ndarray) -> None:
        """Write the pixels of an image that Pillow decodes to `row`, uint8 of shape `shape`.

        Raises SampleError for an image that cannot be decoded, with the codes of `open_image`; what is in `row` is then
        undefined.
        """
        image = picture.decoded()
        if self._by_fit and image.mode in ("RGB", "L") and not (self._fills_holes and picture.has_clear_colour):
            if self.native is None:
                # By the fit as well, so that a machine without the library judges a model's images as the others do.
                placed(_resized(picture, self.fit), self.fit, row)
                return
            if self.native.resize(picture.padded(), self.fit, row):
                return
        try:
            row[...] = np.asarray(self._literal(image))
        except ValueError as error:
            raise SampleError("unsupported_mode", f"mode {image.mode}: {error}") from error


def _resized(picture: Picture, fit: Fit) -> np.ndarray:
    """An image of the mode RGB or L as large as before the cut, by the library that the model's own code takes."""
    image = picture.decoded()
    height, width = (max(side, 1) for side in fit.resized(image.height, image.width))
    if fit.pillow:
        return np.asarray(image.resize((width, height), RESAMPLING[fit.interpolation]).convert("RGB"))
    source = torch.from_numpy(picture.pixels())[None].permute(0, 3, 1, 2)
    resized = interpolate(source, size=(height, width), mode=fit.interpolation, antialias=True)[0]
    pixels: np.ndarray = resized.permute(1, 2, 0).numpy()
    return pixels


Answers = list[SampleError | None]


def prepared(samples: Sequence[Sample], paths: Sequence[Pixels], rows: Sequence[np.ndarray]) -> list[Answers]:
    """Write the pixels of samples to rows, for all models that look at them; each image is decoded once.

    Args:
        rows: of each path, uint8 of shape (len(samples), *path.shape), contiguous.

    Returns:
        Of each path, for each sample None or why it has none. After the first path with an error, an image is not
        looked at again.
    """
    waiting = [[True] * len(samples) for _ in paths]
    chunks = [at for at, path in enumerate(paths) if path.native is not None]
    if chunks:
        images = [sample.image if sample.error is None else None for sample in samples]
        path = paths[chunks[0]]
        assert path.native is not None
        fits, of_chunks = [paths[at].fit for at in chunks], [rows[at] for at in chunks]
        if path.gpu is not None:
            done = path.gpu.decoded(images, fits, of_chunks)
            images = [None if is_done else image for image, is_done in zip(images, done, strict=True)]
        statuses = path.native.prepare(images, fits, of_chunks, fast=path.is_fast)
        if path.gpu is not None:
            statuses = [0 if is_done else status for status, is_done in zip(statuses, done, strict=True)]
        for at in chunks:
            waiting[at] = [status != 0 for status in statuses]
    answers: list[Answers] = [[None] * len(samples) for _ in paths]
    for i, waits in enumerate(zip(*waiting, strict=True)):
        if True in waits:
            for of_path, answer in zip(answers, _by_pillow(samples[i], paths, waits, rows, i), strict=True):
                of_path[i] = answer
    return answers


def _by_pillow(
    sample: Sample, paths: Sequence[Pixels], waits: Sequence[bool], rows: Sequence[np.ndarray], place: int
) -> Answers:
    error = None if sample.error is None else SampleError(*sample.error)
    answers: Answers = []
    with Picture(sample) as picture:
        for path, pixels, is_waiting in zip(paths, rows, waits, strict=True):
            if error is None and is_waiting:
                try:
                    path.by_pillow(picture, pixels[place])
                except SampleError as problem:
                    error = problem.with_traceback(None)  # whose frames hold the samples, and this answer
            answers.append(error)
    return answers


def pixels_of(size: int, decode: str) -> Pixels:
    """The pixels of a model of the usual kind; see `embq.worker.embedders.image.preprocess.usual`."""
    return Pixels(usual(size), decode)


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
