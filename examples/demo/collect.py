"""Texts and photographs out of what is installed already: no download, and the same on every machine with the same
versions.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from embq.lab.texts import docstrings

__all__ = ["docstrings", "photographs"]

PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "retina.jpg",
    "rocket.jpg",
)
"""Photographs inside the scikit-image wheel; its other images are drawings, or are downloaded on first use."""

JPEG_QUALITY = 90


def photographs(count: int, seed: int) -> list[tuple[str, bytes]]:
    """`count` crops of photographs as JPEG, each at its own scale, as ("chelsea-00001", bytes).

    Sides are 96 to 640 pixels; gray photographs stay gray. Equal arguments give equal
    bytes with equal versions of Pillow.
    """
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("photographs come with scikit-image: pip install scikit-image", name="skimage")
    folder = Path(spec.origin).parent / "data"
    sources = [(Path(name).stem, Image.open(folder / name).convert(_mode(name))) for name in PHOTOGRAPHS]
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        name, source = sources[number % len(sources)]
        made.append((f"{name}-{number:05d}", _crop(source, random)))
    return made


def _mode(name: str) -> str:
    return "L" if name in ("brick.png", "camera.png", "coins.png", "grass.png", "gravel.png", "moon.png") else "RGB"


def _crop(source: Image.Image, random: np.random.Generator) -> bytes:
    width, height = (int(side) for side in random.uniform(0.4, 0.9, size=2) * source.size)
    left = int(random.integers(0, source.width - width + 1))
    top = int(random.integers(0, source.height - height + 1))
    scale = min(float(random.uniform(0.5, 1.6)), 640 / max(width, height))
    size = (max(96, round(width * scale)), max(96, round(height * scale)))
    piece = source.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + width, top + height))
    encoded = io.BytesIO()
    piece.save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()
