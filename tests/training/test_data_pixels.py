"""The piece of a picture that a step sees: which one, and its pixels, held against torchvision's and Pillow's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms
from torchvision.transforms.v2 import functional

from embq.core.units import Sample
from embq.training.data.batch import IMAGENET_MEAN, IMAGENET_STD, View
from embq.training.data.epochs import validation_samples
from embq.training.data.images import Crop, random_crop, training_pixels, validation_pixels
from embq.training.data.split import random_of, seed_of
from embq.worker.embedders.image.decoding import Picture
from tests.support.picture_files import encoded, photograph
from tests.training.small_shards import write_shards

SIDES = st.one_of(st.integers(1, 40), st.integers(100, 3000))


@given(SIDES, SIDES, st.integers())
def test_a_random_piece_lies_within_its_picture(height: int, width: int, seed: int) -> None:
    assert_within(random_crop(height, width, random.Random(seed)), height, width)


def assert_within(crop: Crop, height: int, width: int) -> None:
    assert 0 <= crop.top < crop.top + crop.height <= height
    assert 0 <= crop.left < crop.left + crop.width <= width


@pytest.mark.parametrize("size", [(300, 400), (200, 1000)])
def test_random_pieces_are_spread_as_those_of_torchvision(size: tuple[int, int]) -> None:
    blank = torch.zeros(3, *size)
    torch.manual_seed(0)
    their = cast(Any, transforms.RandomResizedCrop)
    theirs = [their.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    ours = [random_crop(*size, random_of("test", number)) for number in range(4000)]
    measures: list[Callable[[int, int, int, int], float]] = [
        lambda top, left, height, width: height * width / (size[0] * size[1]),
        lambda top, left, height, width: width / height,
        lambda top, left, height, width: top / size[0],
        lambda top, left, height, width: left / size[1],
    ]
    for measure in measures:
        there, here = [quantiles([measure(*crop[:4]) for crop in crops], n=8) for crops in (theirs, ours)]
        assert here == pytest.approx(there, abs=0.035)
    assert fmean(crop.flipped for crop in ours) == pytest.approx(0.5, abs=0.03)


def test_the_pixels_of_a_piece_are_those_of_torchvision_and_nearly_those_of_pillow() -> None:
    data = encoded(photograph(), "JPEG", quality=90)
    with Picture(Sample(ordinal=0, key="k", image=data)) as picture:
        whole = picture.decoded()
        flips = set()
        for number in range(20):
            made = training_pixels(picture, str(number), size=64, seed=3, epoch=1)
            crop = random_crop(whole.height, whole.width, random_of("crop", 3, 1, str(number)))
            tensor = functional.pil_to_tensor(whole)
            wanted = functional.resized_crop(tensor, crop.top, crop.left, crop.height, crop.width, [64, 64])
            assert torch.equal(made, wanted.flip(-1) if crop.flipped else wanted)
            box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
            pillow = np.asarray(whole.crop(box).resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
            mine = (made.flip(-1) if crop.flipped else made).permute(1, 2, 0).numpy().astype(int)
            assert np.abs(mine - pillow).max() <= 2
            flips.add(crop.flipped)
        assert flips == {True, False}


@pytest.mark.parametrize(("size", "shown"), [(224, 256), (64, 73), (299, 342)])
@pytest.mark.parametrize("picture_size", [(590, 390), (391, 150), (100, 333), (30, 31)])
def test_a_validation_shows_what_torchvision_cuts_from_the_middle(
    picture_size: tuple[int, int], size: int, shown: int
) -> None:
    whole = photograph(size=(590, 390)).resize(picture_size)
    tensor = functional.resize(functional.pil_to_tensor(whole), [shown], antialias=True)
    with Picture(Sample(ordinal=0, key="k", image=encoded(whole, "PNG"))) as picture:
        made = validation_pixels(picture, "k", size=size)
    assert torch.equal(made, functional.center_crop(tensor, [size]))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_a_picture_of_any_mode_has_three_channels(mode: str) -> None:
    image = photograph("L").convert("I;16") if mode == "I;16" else photograph().convert(mode)
    data = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    with Picture(Sample(ordinal=0, key="k", image=data)) as picture:
        made = training_pixels(picture, "k", size=32, seed=0, epoch=0)
    assert made.shape == (3, 32, 32)
    assert made.dtype == torch.uint8
    assert made.float().std() > 5
    if mode in ("L", "LA", "1", "I;16"):
        assert torch.equal(made[0], made[2])


def test_pictures_are_normalised_as_torchvision_does_it(tmp_path: Path) -> None:
    data = encoded(photograph(), "PNG")
    shards = write_shards(tmp_path, [1], {0: {"jpg": data}})
    (batch,) = validation_samples(shards, View(batch_size=4, image_size=64))
    with Picture(Sample(ordinal=0, key="k", image=data)) as picture:
        pixels = validation_pixels(picture, "k", size=64)
    wanted = functional.normalize(pixels.float() / 255, list(IMAGENET_MEAN), list(IMAGENET_STD))
    torch.testing.assert_close(batch.images[0], wanted, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_gpu_normalises_as_the_processor_does(tmp_path: Path) -> None:
    (batch,) = validation_samples(write_shards(tmp_path, [5]), View(batch_size=8, image_size=32))
    made = batch.images_on(torch.device("cuda"))
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made.cpu(), batch.images, atol=1e-6, rtol=1e-6, check_stride=False)


def test_seeds_are_the_same_on_every_machine_and_differ_by_each_part() -> None:
    assert seed_of("crop", 3, 1, "00017") == 8056463315297813803
    parts: list[tuple[int | str, ...]] = [
        ("a", 1),
        ("a", "1"),
        (1, "a"),
        ("a1",),
        ("a", 1, 0),
        ("a", 10),
        ("b", 1),
        ("a", 2),
    ]
    assert len({seed_of(*part) for part in parts}) == len(parts)
    assert seed_of("a key with \udcff") >= 0
