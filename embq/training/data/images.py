"""Decodes, crops and resizes the image of a sample to uint8 pixels, and reads its label.

Decoded by Pillow, under the same limits as in a worker.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import interpolate

from embq.core.errors import SampleError
from embq.core.units import Sample
from embq.sources.decode import IMAGE_EXTENSIONS
from embq.training.data.reading import RawSample
from embq.training.data.split import random_of
from embq.training.shards.pictures import class_index
from embq.worker.embedders.image.decoding import Picture

LABEL = "cls"
"""Extension of the member that holds the number of the class, in decimal digits."""

PixelsOf = Callable[[Picture, str], torch.Tensor]
"""The pixels that a step sees of a picture with a key: uint8 of shape (3, size, size)."""


def prepared(sample: RawSample, pixels_of: PixelsOf, classes: int | None) -> tuple[torch.Tensor, int]:
    """Pixels and label of a sample; SampleError if one is missing or unusable."""
    label = label_of(sample, classes)
    key = sample["__key__"]
    image = next((sample[extension] for extension in IMAGE_EXTENSIONS if extension in sample), None)
    with Picture(Sample(ordinal=0, key=key, image=image)) as picture:
        return pixels_of(picture, key), label


def label_of(sample: RawSample, classes: int | None) -> int:
    """The label of a sample; SampleError `missing_label` or `bad_label`."""
    written = sample.get(LABEL)
    if written is None:
        raise SampleError("missing_label", f"the sample has no .{LABEL}")
    return class_index(written, classes)


AREA = (0.08, 1.0)
"""Least and most of the picture's area that a crop covers."""

ASPECT = (3 / 4, 4 / 3)
"""Width over height, least and most."""

TRIES = 10
"""Tries to find a crop that fits; of a photograph of 4 by 3 the first one does 7 times out of 10."""

SHOWN = 0.875
"""Part of the short side that the middle of a picture shows in validation: 224 of 256."""


class Crop(NamedTuple):
    """A crop in pixels, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool = False


def random_crop(height: int, width: int, numbers: random.Random) -> Crop:
    """A crop of random area and aspect, mirrored or not, after "Going deeper with convolutions" (Szegedy et al.
    2015), section 6.
    """
    flipped = numbers.random() < 0.5
    for _ in range(TRIES):
        area = height * width * numbers.uniform(*AREA)
        aspect = math.exp(numbers.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return Crop(numbers.randint(0, height - tall), numbers.randint(0, width - wide), tall, wide, flipped)
    wide = min(width, round(height * ASPECT[1]))
    tall = min(height, round(width / ASPECT[0]))
    return Crop((height - tall) // 2, (width - wide) // 2, max(1, tall), max(1, wide), flipped)


def training_pixels(picture: Picture, key: str, *, size: int, seed: int, epoch: int) -> torch.Tensor:
    """A random crop as uint8 of shape (3, size, size), determined by seed, epoch and key.

    Raises SampleError if the picture cannot be decoded.
    """
    pixels = _decoded(picture)
    height, width = pixels.shape[:2]
    crop = random_crop(height, width, random_of("crop", seed, epoch, key))
    piece = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    resized = _resized(piece, size, size)
    return resized.flip(-1) if crop.flipped else resized


def validation_pixels(picture: Picture, _key: str, *, size: int) -> torch.Tensor:
    """The center crop as uint8 of shape (3, size, size), equal to torchvision's Resize and CenterCrop.

    Raises as `training_pixels` does.
    """
    pixels = _decoded(picture)
    height, width = pixels.shape[:2]
    short = round(size / SHOWN)
    tall, wide = short * height // min(height, width), short * width // min(height, width)
    top, left = round((tall - size) / 2), round((wide - size) / 2)
    return _resized(pixels, tall, wide)[:, top : top + size, left : left + size]


def _decoded(picture: Picture) -> np.ndarray:
    """uint8 of shape (height, width, 3), or (height, width, 1) for gray; the next picture may overwrite it."""
    pixels = picture.pixels()
    if pixels is not None:
        return pixels
    image = picture.decoded()
    try:
        return np.array(image.convert("RGB"))
    except ValueError as error:
        raise SampleError("unsupported_mode", f"mode {image.mode}: {error}") from error


def _resized(pixels: np.ndarray, height: int, width: int) -> torch.Tensor:
    """uint8 of shape (3, height, width), by bilinear interpolation with antialiasing."""
    source = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    return interpolate(source, size=(height, width), mode="bilinear", antialias=True)[0].expand(3, -1, -1)
