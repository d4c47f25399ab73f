"""From an encoded picture to a normalised piece of it, in four ways and one thread: what each costs."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms.v2 import functional

from bench import pictures
from bench.training_set import SIZE
from embq.core.units import Sample
from embq.training.data.batch import IMAGENET_MEAN, IMAGENET_STD
from embq.training.data.images import Crop, random_crop, training_pixels
from embq.training.data.split import random_of
from embq.worker.embedders.image.decoding import Picture

SIZES = (SIZE, (256, 256))
COUNT, ROUNDS, IMAGE_SIZE = 50, 3, 224

MEAN, STD = (torch.tensor(values).view(3, 1, 1) * 255 for values in (IMAGENET_MEAN, IMAGENET_STD))


def ours(data: bytes, key: str) -> torch.Tensor:
    """The pixels as a training of embq makes them."""
    with Picture(Sample(ordinal=0, key=key, image=data)) as picture:
        pixels = training_pixels(picture, key, size=IMAGE_SIZE, seed=0, epoch=0)
        return torch.empty(pixels.shape).copy_(pixels).sub_(MEAN).div_(STD)


def functions(data: bytes, key: str) -> torch.Tensor:
    """torchvision's functions on the same decoded picture."""
    with Picture(Sample(ordinal=0, key=key, image=data)) as picture:
        pixels = torch.from_numpy(picture.pixels()).permute(2, 0, 1)
        crop = _crop(pixels.shape[1], pixels.shape[2], key)
        made = functional.resized_crop(pixels, crop.top, crop.left, crop.height, crop.width, [IMAGE_SIZE, IMAGE_SIZE])
        turned = functional.horizontal_flip(made) if crop.flipped else made
        floats = functional.to_dtype(turned, torch.float32, scale=True)
        result: torch.Tensor = functional.normalize(floats, list(IMAGENET_MEAN), list(IMAGENET_STD))
        return result


def pillow(data: bytes, key: str) -> torch.Tensor:
    """Pillow from end to end."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    crop = _crop(image.height, image.width, key)
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    made = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR, box=box)
    turned = made.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flipped else made
    return torch.from_numpy(np.array(turned)).permute(2, 0, 1).to(torch.float32).sub_(MEAN).div_(STD)


USUAL = transforms.Compose(
    [
        transforms.RandomResizedCrop(IMAGE_SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
)


def usual(data: bytes, _key: str) -> Any:
    """torchvision's transforms on Pillow's images, as most examples have it."""
    return USUAL(Image.open(io.BytesIO(data)).convert("RGB"))


WAYS: dict[str, Callable[[bytes, str], Any]] = {
    "embq": ours,
    "torchvision's functions": functions,
    "Pillow": pillow,
    "torchvision's transforms": usual,
}


def ways() -> list[dict[str, Any]]:
    """CPU microseconds of a picture, for each size and way; the fastest of some rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        data = pictures.jpegs(size, COUNT, seed=1)
        measured: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, make in WAYS.items():
                measured[way].append(_cpu_us(partial(_all, make, data)) / COUNT)
        rows.append({"pictures": f"{size[0]}x{size[1]}", **{way: round(min(us)) for way, us in measured.items()}})
    torch.set_num_threads(threads)
    return rows


def _all(make: Callable[[bytes, str], Any], data: Sequence[bytes]) -> None:
    for number, one in enumerate(data):
        make(one, str(number))


def _cpu_us(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e6


def _crop(height: int, width: int, key: str) -> Crop:
    return random_crop(height, width, random_of("crop", 0, 0, key))
