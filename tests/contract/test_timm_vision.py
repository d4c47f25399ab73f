"""Images of a timm model are prepared as timm's own transform does it, as transformers wraps it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.lazy import lazy

pytest.importorskip("timm")

from embq.core.errors import ModelError
from embq.worker.embedders.image.pixels import Pixels
from embq.worker.embedders.image.processor import SAME, difference, of_image_processor
from examples.demo.collect import photographs

torch = lazy("torch")
transformers = lazy("transformers")


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def processor_of(**settings: Any) -> Any:
    plain = {"input_size": [3, 64, 64], "interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}
    described = {**plain, "mean": MEAN, "std": STD, **settings}
    return transformers.TimmWrapperImageProcessor(pretrained_cfg=described, architecture="resnet18")


@pytest.mark.parametrize("size", [64, 224])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_the_fast_path_has_the_pixels_of_timm(mode: str, interpolation: str, size: int) -> None:
    processor = processor_of(crop_mode=mode, interpolation=interpolation, input_size=[3, size, size])
    assert difference(of_image_processor(processor, "a model")) <= SAME


@pytest.mark.parametrize("settings", [{"crop_mode": "border"}, {"interpolation": "lanczos"}], ids=str)
def test_what_the_fast_path_does_not_know_is_noticed(settings: dict[str, Any]) -> None:
    assert difference(of_image_processor(processor_of(**settings), "a model")) > SAME


@pytest.mark.parametrize("settings", [{}, {"crop_mode": "squash"}, {"crop_mode": "border"}, {"crop_pct": 1.0}], ids=str)
def test_the_reference_path_has_the_numbers_of_timm(settings: dict[str, Any]) -> None:
    processor = processor_of(**settings)
    preprocess = of_image_processor(processor, "a model")
    pixels = Pixels(preprocess, "reference")
    for _, data in photographs(4, seed=3):
        found = torch.from_numpy(pixels.of(data)).permute(2, 0, 1).float() / 255
        scaled = (found - torch.tensor(preprocess.mean)[:, None, None]) / torch.tensor(preprocess.std)[:, None, None]
        image = Image.open(io.BytesIO(data)).convert("RGB")
        expected = processor(images=image, return_tensors="pt")["pixel_values"][0]
        np.testing.assert_allclose(scaled.numpy(), expected.numpy(), atol=1e-6)


def test_a_transform_that_does_more_is_refused() -> None:
    processor = processor_of()
    processor.val_transforms.transforms.append(torch.nn.Identity())
    with pytest.raises(ModelError, match="in a way that embq does not know"):
        of_image_processor(processor, "a model")
