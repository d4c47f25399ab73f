"""From an encoded picture to the square of pixels that a step sees: uint8, not yet normalised.

Decoded as embq's workers decode: libjpeg-turbo for plain JPEGs, Pillow for the rest, under the same limits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate

from core.errors import SampleError
from training.data.crops import SHOWN, random_crop
from training.data.seeds import random_of
from worker.embedders.image.decoding import Picture


def training_pixels(picture: Picture, key: str, *, size: int, seed: int, epoch: int) -> torch.Tensor:
    """A random piece of a picture as uint8 of shape (3, size, size); which one follows from seed, epoch and key alone.

    Raises SampleError where the picture cannot be decoded.
    """
    pixels = _decoded(picture)
    height, width = pixels.shape[:2]
    crop = random_crop(height, width, random_of("crop", seed, epoch, key))
    piece = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    made = _resized(piece, size, size)
    return made.flip(-1) if crop.flipped else made


def validation_pixels(picture: Picture, _key: str, *, size: int) -> torch.Tensor:
    """The middle of a picture as uint8 of shape (3, size, size), as torchvision's Resize and CenterCrop give it.

    Raises as `training_pixels` does.
    """
    pixels = _decoded(picture)
    height, width = pixels.shape[:2]
    short = round(size / SHOWN)
    tall, wide = short * height // min(height, width), short * width // min(height, width)
    top, left = round((tall - size) / 2), round((wide - size) / 2)
    return _resized(pixels, tall, wide)[:, top : top + size, left : left + size]


def _decoded(picture: Picture) -> np.ndarray:
    """uint8 of shape (height, width, 3), or (height, width, 1) of a gray one; the next picture may overwrite it."""
    pixels = picture.pixels()
    if pixels is not None:
        return pixels
    image = picture.decoded()
    try:
        return np.array(image.convert("RGB"))
    except ValueError as error:
        raise SampleError("unsupported_mode", f"mode {image.mode}: {error}") from error


def _resized(pixels: np.ndarray, height: int, width: int) -> torch.Tensor:
    """Pixels as uint8 of shape (3, height, width), by the kernel that Pillow calls bilinear."""
    source = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    return interpolate(source, size=(height, width), mode="bilinear", antialias=True)[0].expand(3, -1, -1)
