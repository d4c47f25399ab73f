"""What the image processor of a timm model does: the steps of timm's own transform for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from core.errors import ModelError
from worker.embedders.preprocess import INTERPOLATIONS, Fit, Preprocess, channels

TENSORS = ("MaybeToTensor", "ToTensor", "Normalize")
"""The last steps, which make numbers of pixels."""


def is_of_timm(processor: Any) -> bool:
    """Whether an image processor is transformers' wrapper of a timm transform."""
    return hasattr(processor, "val_transforms") and hasattr(processor, "data_config")


def of_timm(processor: Any, model: str) -> Preprocess:
    """What the wrapper of a timm transform does to an image, which timm's own pipelines first make RGB.

    Raises ModelError where its last steps are not to scale pixels of three channels.
    """
    steps = list(processor.val_transforms.transforms)
    config: Mapping[str, Any] = processor.data_config
    names = [type(step).__name__ for step in steps]
    if len(steps) < 3 or names[-1] != "Normalize" or names[-2] not in TENSORS or config["input_size"][0] != 3:
        raise ModelError(
            f"{model}: images are prepared in a way that embq does not know ({', '.join(names)})",
            next_step="use a model whose images have one size and three channels",
        )

    def literal(image: Image.Image) -> Image.Image:
        made = image.convert("RGB")
        for step in steps[:-2]:
            made = step(made)
        return made

    mean, std = (np.broadcast_to(np.asarray(values, dtype=np.float64), 3) for values in (steps[-1].mean, steps[-1].std))
    return Preprocess(
        fit=_fit(steps, config), mean=channels(mean.tolist()), std=channels(std.tolist()), literal=literal
    )


def _fit(steps: list[Any], config: Mapping[str, Any]) -> Fit:
    """What the steps say; where they are others than a resize and a cut, a guess, which `difference` finds out."""
    _, height, width = config["input_size"]
    asked = getattr(steps[0], "size", height)
    sides = (asked, asked) if isinstance(asked, int) else tuple(asked)
    interpolation = config.get("interpolation", "")
    return Fit(
        height=height,
        width=width,
        mode="shortest" if isinstance(asked, int) else "squash",
        interpolation=interpolation if interpolation in INTERPOLATIONS else "bicubic",
        edge=sides[0] if len(set(sides)) == 1 else 0,
    )
