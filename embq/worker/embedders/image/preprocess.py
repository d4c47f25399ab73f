"""Preprocessing of a model: image size, resizing and normalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from embq.core.errors import ModelError

MODES = ("shortest", "longest", "squash")
"""Side that fills the square: the short one, the rest is cut off; the long one, the rest is filled up; or both, and the
shape is lost."""

INTERPOLATIONS = ("bicubic", "bilinear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The geometry of a preprocess: an image of any size in, one of a fixed size out.

    Attributes:
        height, width: of what comes out, in pixels.
        mode: one of `MODES`.
        interpolation: one of `INTERPOLATIONS`, always with antialiasing.
        edge: before the cut, in the mode "shortest" length of the short side, in the mode "squash" of both sides; 0
            where the sides are as long as their sides of the result.
        even: whether half a pixel of the cut is rounded to the even side, as torchvision does; else it is left out.
        pillow: whether the model's library resizes by Pillow, which goes through the columns first if that leaves it
            less to do; else by torch, which begins with the rows.
        fill: value of what is filled up, of each channel.
    """

    height: int
    width: int
    mode: str
    interpolation: str
    edge: int = 0
    even: bool = True
    pillow: bool = True
    fill: int = 0

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) to which an image of this size is resized, before it is cut or filled up."""
        if self.mode == "squash":
            return self.edge or self.height, self.edge or self.width
        if self.mode == "shortest" and self.edge:
            if width <= height:
                return int(self.edge * height / width), self.edge
            return self.edge, int(self.edge * width / height)
        ratios = (height / self.height, width / self.width)
        ratio = max(ratios) if self.mode == "longest" else min(ratios)
        return round(height / ratio), round(width / ratio)

    def corner(self, height: int, width: int) -> tuple[int, int]:
        """(top, left) of what is cut out of a resized image; negative if it is filled up instead."""
        return self._offset(height, self.height), self._offset(width, self.width)

    def _offset(self, have: int, want: int) -> int:
        if have < want:
            return -((want - have) // 2)
        return round((have - want) / 2.0) if self.even else (have - want) // 2


def placed(resized: Any, fit: Fit, row: Any) -> None:
    """Cut a resized image, or fill it up: what `fit` wants of it is written to `row`.

    Args:
        resized: uint8 of shape (height, width, 3 or 1), of numpy or torch.
        row: uint8 of shape (fit.height, fit.width, 3), of the same library.
    """
    height, width = resized.shape[:2]
    top, left = fit.corner(height, width)
    if height >= fit.height and width >= fit.width:
        row[...] = resized[top : top + fit.height, left : left + fit.width]
        return
    row[...] = fit.fill
    crop = resized[max(top, 0) : max(top, 0) + fit.height, max(left, 0) : max(left, 0) + fit.width]
    down, right = max(-top, 0), max(-left, 0)
    row[down : down + crop.shape[0], right : right + crop.shape[1]] = crop


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """All that lies between a decoded image and the numbers that a model reads.

    Attributes:
        fit: the geometry.
        mean, std: of each channel, of pixels in 0 to 1: the model reads (pixel / 255 - mean) / std.
        literal: the same geometry by the library that defines it: a decoded image in its own mode -> an RGB image of
            the size of `fit`. Changes nothing of what it is given.
        fills_holes: whether what is transparent becomes white, also in images without an alpha channel, which may name
            a colour that stands for it.
    """

    fit: Fit
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    literal: Callable[[Image.Image], Image.Image]
    fills_holes: bool = False


def usual(size: int) -> Preprocess:
    """Preprocessing of most CLIP models: the short side to `size` by a bicubic filter, and a square cut."""
    from torchvision.transforms import CenterCrop, InterpolationMode, Resize

    resize, cut = Resize(size, InterpolationMode.BICUBIC), CenterCrop(size)
    return Preprocess(
        fit=Fit(height=size, width=size, mode="shortest", interpolation="bicubic", edge=size),
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        literal=lambda image: cut(resize(image)).convert("RGB"),
    )


def of_open_clip(transform: Any, configured: Mapping[str, Any], model: str) -> Preprocess:
    """Preprocessing of open_clip's evaluation transform (`open_clip.transform.image_transform`).

    Args:
        transform: the one that it made: its last two steps give numbers, the others an RGB image.
        configured: the `preprocess_cfg` of the loaded model's visual tower; never a guess from a model's name.
        model: whose it is, for errors.

    Raises ModelError if the transform is of another kind, as that of the NaFlex models.
    """
    steps: Sequence[Any] = getattr(transform, "transforms", ())
    size = configured.get("size", 224)
    height, width = (size, size) if isinstance(size, int) else map(int, size[-2:])
    mode, interpolation = configured.get("resize_mode") or "shortest", configured.get("interpolation") or "bicubic"
    if len(steps) < 4 or mode not in MODES:
        raise ModelError(
            f"{model}: images are prepared in a way that embq does not know ({type(transform).__name__}, {mode})",
            next_step="use a model whose images have one size; NaFlex models have none",
        )

    def literal(image: Image.Image) -> Image.Image:
        for step in steps[:-2]:
            image = step(image)
        return image

    # For a target that is not square, open_clip ignores what is configured.
    oblong = mode == "shortest" and height != width
    return Preprocess(
        fit=Fit(
            height=height,
            width=width,
            mode=mode,
            interpolation="bilinear" if interpolation == "bilinear" and not oblong else "bicubic",
            edge=0 if oblong or mode != "shortest" else height,
            fill=int(configured.get("fill_color") or 0),
        ),
        mean=channels(steps[-1].mean),
        std=channels(steps[-1].std),
        literal=literal,
    )


def channels(values: Sequence[float]) -> tuple[float, float, float]:
    """A number for each of the three channels."""
    red, green, blue = (float(value) for value in values)
    return red, green, blue
