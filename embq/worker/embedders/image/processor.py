"""Preprocessing read from an image processor of transformers or timm, checked on synthetic images."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

from embq.core.errors import ModelError
from embq.worker.embedders.image.pixels import Pixels
from embq.worker.embedders.image.preprocess import INTERPOLATIONS, Fit, Preprocess, channels

TENSORS = ("MaybeToTensor", "ToTensor", "Normalize")
"""The last steps, which make numbers of pixels."""


def is_of_timm(processor: Any) -> bool:
    """Whether an image processor is transformers' wrapper of a timm transform."""
    return hasattr(processor, "val_transforms") and hasattr(processor, "data_config")


def of_timm(processor: Any, model: str) -> Preprocess:
    """Preprocessing of a wrapped timm transform, whose images timm's own pipelines convert to RGB first.

    Raises ModelError if its last steps are not to scale pixels of three channels.
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
        result = image.convert("RGB")
        for step in steps[:-2]:
            result = step(result)
        return result

    mean, std = (np.broadcast_to(np.asarray(values, dtype=np.float64), 3) for values in (steps[-1].mean, steps[-1].std))
    return Preprocess(
        fit=_timm_fit(steps, config),
        mean=channels(mean.tolist()),
        std=channels(std.tolist()),
        literal=literal,
    )


def _timm_fit(steps: list[Any], config: Mapping[str, Any]) -> Fit:
    """The fit that the steps describe; for others than a resize and a cut a guess, which `difference` finds out."""
    _, height, width = config["input_size"]
    target = getattr(steps[0], "size", height)
    sides = (target, target) if isinstance(target, int) else tuple(target)
    interpolation = config.get("interpolation", "")
    return Fit(
        height=height,
        width=width,
        mode="shortest" if isinstance(target, int) else "squash",
        interpolation=interpolation if interpolation in INTERPOLATIONS else "bicubic",
        edge=sides[0] if len(set(sides)) == 1 else 0,
    )


TRIED = ((61, 83), (83, 61), (301, 407), (640, 427), (330, 517), (40, 330))
"""(height, width) of the made-up images: wider and taller than they are wide, smaller and larger than what models ask
for, with odd and even margins to cut."""

SAME = 2
"""Steps of 255 by which pixels may differ that count as the same. Another cut, size or filter of noise makes it 100."""

PIL_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""`PIL.Image.Resampling` -> what `Fit` calls it. For others there is no fast kernel of the same pixels."""


def of_image_processor(processor: Any, model: str) -> Preprocess:
    """Preprocessing of an image processor of transformers.

    Its pixels are those that it returns when it is set to neither rescale nor normalise. The geometry is what its
    settings say, and no more than that: `difference` tells whether it returns these pixels.

    Args:
        processor: a loaded one; nothing is taken from a model's name.
        model: whose it is, for errors.

    Raises ModelError if its images have no one size, or if there is more to them than bytes that are scaled by
    numbers of each channel.
    """
    if is_of_timm(processor):
        return of_timm(processor, model)
    converts = bool(getattr(processor, "do_convert_rgb", False))

    def literal(image: Image.Image) -> Image.Image:
        # What is not converted by the processor is RGB in the library's own pipelines.
        rgb = image if converts else image.convert("RGB")
        return Image.fromarray(_given(processor, rgb, do_rescale=False, do_normalize=False))

    mean, std = _scaling(processor)
    height, width = _check(processor, literal, mean, std, model)
    return Preprocess(
        fit=_fit(processor, height, width),
        mean=channels(mean.tolist()),
        std=channels(std.tolist()),
        literal=literal,
        fills_holes=converts,
    )


def difference(preprocess: Preprocess) -> int:
    """Largest difference between the pixels of `cpu-exact` and of `reference` on the made-up images, 0 to 255."""
    fast, exact = Pixels(preprocess, "cpu-exact"), Pixels(preprocess, "reference")

    def of(image: Image.Image) -> int:
        encoded = io.BytesIO()
        image.save(encoded, "BMP")
        data = encoded.getvalue()
        return int(np.abs(fast.of(data).astype(np.int16) - exact.of(data)).max())

    return max(map(of, _made_up()))


def _made_up() -> Iterator[Image.Image]:
    """Noise, in which each pixel that lies elsewhere is seen."""
    random = np.random.default_rng(0)
    for height, width in TRIED:
        yield Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def _given(processor: Any, image: Image.Image, **options: bool) -> np.ndarray:
    """The array that the processor makes of an image, of shape (height, width, 3); ValueError for another shape."""
    output = processor(images=image, return_tensors="pt", **options)["pixel_values"].numpy()
    if output.ndim != 4 or output.shape[:2] != (1, 3):
        raise ValueError(f"an array of shape {output.shape}")
    array: np.ndarray = output[0].transpose(1, 2, 0)
    return array


def _scaling(processor: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel, for pixels in 0 to 1."""
    brought_to = float(processor.rescale_factor) * 255 if processor.do_rescale else 255.0
    if abs(brought_to - 1) < 1e-6:
        brought_to = 1.0
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
    return np.broadcast_to(mean, 3) / brought_to, np.broadcast_to(std, 3) / brought_to


def _check(processor: Any, literal: Any, mean: np.ndarray, std: np.ndarray, model: str) -> tuple[int, int]:
    """Height and width of every image; ModelError if they differ, or `literal` and scaling are not all there is."""
    sizes: set[tuple[int, int]] = set()
    try:
        for image in _made_up():
            pixels = np.asarray(literal(image))
            sizes.add((pixels.shape[0], pixels.shape[1]))
            numbers = _given(processor, image)
            # A step is what a processor may gain that resizes fractions, and not bytes.
            if np.abs((pixels / 255 - mean) / std - numbers).max() > 1 / 255 / std.min():
                raise ValueError("numbers that are more than scaled pixels")
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"{model}: images are prepared in a way that embq does not know ({type(processor).__name__}): {error}",
            next_step="use a model whose images have one size and three channels",
        ) from error
    if len(sizes) > 1:
        raise ModelError(
            f"{model}: its image processor gives images of several sizes, such as {sorted(sizes)[0]}",
            next_step="set size, or do_center_crop and crop_size, in its preprocessor_config.json",
        )
    return sizes.pop()


def _fit(processor: Any, height: int, width: int) -> Fit:
    """The fit that the settings describe, to this height and width; a guess if `Fit` has no words for them."""
    size = _sizes(processor, "size")
    resample = getattr(processor, "resample", None)
    by_torch = getattr(processor, "backend", "") == "torchvision"
    # These two are ConvNeXT's: below 384 pixels a cut, from there on none.
    cut = float(getattr(processor, "crop_pct", None) or 1)
    short = int(size.get("shortest_edge", 0))
    is_squash = not short or (cut != 1 and short >= 384)
    edge = int(size.get("height", 0)) if is_squash else int(short / cut)
    return Fit(
        height=height,
        width=width,
        mode="squash" if is_squash else "shortest",
        interpolation=PIL_INTERPOLATIONS.get(int(resample) if resample is not None else 2, "bicubic"),
        edge=edge if size.get("height") == size.get("width") else 0,
        even=False,
        pillow=not by_torch,
    )


def _sizes(processor: Any, name: str) -> Mapping[str, int]:
    """The settings `size` or `crop_size` without what is not set."""
    return {key: value for key, value in dict(getattr(processor, name, None) or {}).items() if value}
