"""Preprocessing of images: the geometry, the filter and the numbers are those that open_clip configures, for all of
its models, and the fast paths give its pixels.
"""

from __future__ import annotations

import io
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import ModelError
from embq.worker.embedders.image.native import native
from embq.worker.embedders.image.pixels import Normaliser, Pixels
from embq.worker.embedders.image.preprocess import Preprocess, of_open_clip, usual
from tests.support.lazy import lazy
from tests.support.picture_files import encoded

transforms = lazy("open_clip.transform")
open_clip = lazy("open_clip")
torch = lazy("torch")


FAMILIES = [
    ("ViT-B-32", "openai", "shortest", "bicubic", 0.48145466),
    ("ViT-B-16", "datacomp_xl_s13b_b90k", "shortest", "bicubic", 0.48145466),
    ("ViT-L-14", "laion2b_s32b_b82k", "shortest", "bicubic", 0.5),
    ("ViT-H-14-quickgelu", "dfn5b", "squash", "bicubic", 0.48145466),
    ("ViT-B-16-SigLIP", "webli", "squash", "bicubic", 0.5),
    ("ViT-SO400M-14-SigLIP-384", "webli", "squash", "bicubic", 0.5),
    ("ViT-H-14-CLIPA-336", "datacomp1b", "squash", "bilinear", 0.485),
    ("PE-Core-B-16", "meta", "squash", "bilinear", 0.5),
    ("MobileCLIP-S1", "datacompdr", "shortest", "bilinear", 0.0),
    ("MobileCLIP2-S4", "dfndr2b", "shortest", "bilinear", 0.48145466),
    ("EVA02-L-14-336", "merged2b_s6b_b61k", "shortest", "bicubic", 0.48145466),
    ("convnext_base_w", "laion2b_s13b_b82k", "shortest", "bicubic", 0.48145466),
]
"""Architecture, weights, and what open_clip says of their images: how a side is chosen, the filter, the mean of red."""

SIZES = [(255, 383), (333, 251), (224, 225), (227, 224), (1, 1), (150, 113), (640, 480), (480, 640), (500, 1700)]
"""Width and height of photographs; some are on the rounding ties of resizing and cutting."""


def configured(arch: str, tag: str) -> dict[str, Any]:
    """Settings from which open_clip's factory makes the evaluation transform (`open_clip.factory.create_model`)."""
    vision = open_clip.get_model_config(arch)["vision_cfg"]
    made = transforms.merge_preprocess_dict(asdict(transforms.PreprocessCfg()), {"size": vision.get("image_size", 224)})
    told = open_clip.get_pretrained_cfg(arch, tag) or {}
    return transforms.merge_preprocess_dict(made, {name: told[name] for name in told if name in made})


def preprocess_of(**settings: Any) -> tuple[Any, Preprocess]:
    """open_clip's evaluation transform, and what we take from it."""
    transform = transforms.image_transform_v2(transforms.PreprocessCfg(**settings), is_train=False)
    return transform, of_open_clip(transform, settings, "a model")


@cache
def photograph(width: int, height: int) -> bytes:
    import skimage

    with Image.open(Path(skimage.__file__).parent / "data" / "astronaut.png") as source:
        made = source.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    return encoded(made, "JPEG", quality=92)


def pixels_of(data: bytes, pixels: Pixels) -> np.ndarray:
    return pixels.of(data)


def by_open_clip(data: bytes, transform: Any) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    for step in transform.transforms[:-2]:
        image = step(image)
    return np.array(image)


@pytest.mark.parametrize(("arch", "tag", "mode", "interpolation", "red"), FAMILIES)
def test_each_family_has_the_settings_that_open_clip_gives_it(
    arch: str, tag: str, mode: str, interpolation: str, red: float
) -> None:
    settings = configured(arch, tag)
    transform, preprocess = preprocess_of(**settings)
    assert (preprocess.fit.mode, preprocess.fit.interpolation) == (mode, interpolation)
    assert preprocess.mean[0] == pytest.approx(red)

    data = photograph(333, 251)
    expected = transform(Image.open(io.BytesIO(data)))
    rows = torch.from_numpy(pixels_of(data, Pixels(preprocess, "reference")))[None]
    numbers = Normaliser(preprocess, torch.device("cpu"))(rows, torch.float32)
    assert numbers.shape == (1, *expected.shape)
    assert torch.equal(numbers[0], expected)


def test_every_model_of_open_clip_is_known_or_refused_by_name() -> None:
    known = 0
    for arch, tag in open_clip.list_pretrained():
        settings = configured(arch, tag)
        transform, preprocess = preprocess_of(**settings)
        size = settings["size"]
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        assert (preprocess.fit.height, preprocess.fit.width) == (height, width), (arch, tag)
        assert len(transform.transforms) >= 4
        known += 1
    assert known > 150


def test_a_transform_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="in a way that embq does not know"):
        of_open_clip(lambda image: image, {"size": 256}, "open_clip:a/b")


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@pytest.mark.parametrize("size", [224, 256, 336, 384, 448, (224, 336)])
def test_photographs_have_the_pixels_of_open_clip(size: Any, mode: str, interpolation: str) -> None:
    transform, preprocess = preprocess_of(size=size, resize_mode=mode, interpolation=interpolation, fill_color=3)
    for width, height in SIZES:
        data = photograph(width, height)
        expected = by_open_clip(data, transform)
        assert np.array_equal(pixels_of(data, Pixels(preprocess, "reference")), expected)
        off = np.abs(pixels_of(data, Pixels(preprocess, "cpu-exact")).astype(int) - expected)
        assert off.max() <= 4, (width, height)
        assert (off > 1).mean() <= 1e-3, (width, height)
        assert 10 * np.log10(255**2 / max(1e-9, np.square(off).mean())) >= 55, (width, height)


@pytest.mark.skipif(native() is None, reason="embq-native is not installed")
@pytest.mark.parametrize(("width", "height"), [(3000, 2000), (1601, 1067), (901, 1353), (2048, 1536)])
def test_what_the_decoder_makes_smaller_is_close(width: int, height: int) -> None:
    transform, preprocess = preprocess_of(size=224)
    data = photograph(width, height)
    fast = pixels_of(data, Pixels(preprocess, "cpu-fast"))
    expected = by_open_clip(data, transform)
    off = np.abs(fast.astype(int) - expected)
    assert off.any(), "nothing was made smaller"
    assert 10 * np.log10(255**2 / np.square(off).mean()) >= 48


def test_the_usual_preprocess_is_that_of_vit_b_32() -> None:
    transform, preprocess = preprocess_of(**configured("ViT-B-32", "openai"))
    ours = usual(224)
    assert ours.fit == preprocess.fit
    assert (ours.mean, ours.std) == (preprocess.mean, preprocess.std)
    data = photograph(333, 251)
    assert np.array_equal(pixels_of(data, Pixels(ours, "reference")), by_open_clip(data, transform))
