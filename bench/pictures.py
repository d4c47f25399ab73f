"""Sets of photographs for the benchmarks of images: JPEGs of one size each, and tar shards of them.

Made of the photographs inside the scikit-image wheel, in colour, and never enlarged: an enlarged picture is smooth,
compresses too well, and flatters whatever decodes it. Sizes that no photograph fills are mosaics of several. Nothing
is downloaded; equal arguments give equal bytes with equal versions of Pillow.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = ((256, 256), (512, 384), (1024, 768), (3000, 2000))
"""Width and height of the usual sets. The first is what img2dataset stores by default."""

PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "retina.jpg",
    "rocket.jpg",
)

TILE_MAX, LARGE_TILE_MAX = (512, 400), (1000, 667)
"""Pixels of most of the photographs, and of the largest two. A larger picture is a mosaic of equal tiles no larger
than this; beyond `LARGE_PIXELS` of the larger ones, because seams are what no photograph has."""
LARGE_PIXELS = 2_000_000

SMALL_SIDE = 256
"""Pictures of sides up to this have the quality that img2dataset stores them with."""
SMALL_QUALITY = 95
QUALITY = 90


def jpegs(size: tuple[int, int], count: int, seed: int, quality: int = 0) -> list[bytes]:
    """`count` baseline JPEGs (4:2:0, RGB) of `size` (width, height), no two of the same piece of a photograph.

    The quality, where none is given, is 95 up to 256 pixels, and 90 above. Raises ModuleNotFoundError without
    scikit-image, and FileNotFoundError where its wheel lacks a photograph.
    """
    tile_max = LARGE_TILE_MAX if size[0] * size[1] > LARGE_PIXELS else TILE_MAX
    grid = [math.ceil(side / most) for side, most in zip(size, tile_max, strict=True)]
    edges = [[side * n // parts for n in range(parts + 1)] for side, parts in zip(size, grid, strict=True)]
    tiles = [
        (left, top, right - left, bottom - top)
        for top, bottom in zip(edges[1], edges[1][1:], strict=False)
        for left, right in zip(edges[0], edges[0][1:], strict=False)
    ]
    width, height = (max(tile[side] for tile in tiles) for side in (2, 3))
    quality = quality or (SMALL_QUALITY if max(size) <= SMALL_SIDE else QUALITY)
    sources = [source for source in _photographs() if source.width >= width and source.height >= height]
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        picture = Image.new("RGB", size)
        for at, (left, top, width, height) in enumerate(tiles):
            source = sources[(number + at) % len(sources)]
            picture.paste(_piece(source, (width, height), random), (left, top))
        encoded = io.BytesIO()
        picture.save(encoded, "JPEG", quality=quality, subsampling="4:2:0")
        made.append(encoded.getvalue())
    return made


def shards(folder: Path, jpegs: Sequence[bytes], per_shard: int) -> list[Path]:
    """Write tar shards in the webdataset layout, with an image and nothing else for each sample, in order.

    `folder` is made where it is missing. Gives the paths: 00000.tar, 00001.tar and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for start in range(0, len(jpegs), per_shard):
        path = folder / f"{start // per_shard:05d}.tar"
        with tarfile.open(path, "w") as shard:
            for number, content in enumerate(jpegs[start : start + per_shard], start):
                member = tarfile.TarInfo(f"{number:09d}.jpg")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
        paths.append(path)
    return paths


def linked(folder: Path, shards: Sequence[Path], count: int) -> list[Path]:
    """`count` shards in `folder`, which is made: the given ones over and over, each time under another name."""
    folder.mkdir(parents=True)
    paths = [folder / f"{number:05d}.tar" for number in range(count)]
    for number, path in enumerate(paths):
        path.hardlink_to(shards[number % len(shards)])
    return paths


def _photographs() -> list[Image.Image]:
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("photographs come with scikit-image: pip install scikit-image", name="skimage")
    folder = Path(spec.origin).parent / "data"
    return [Image.open(folder / name).convert("RGB") for name in PHOTOGRAPHS]


def _piece(source: Image.Image, size: tuple[int, int], random: np.random.Generator) -> Image.Image:
    """A piece of a photograph, from somewhere in it, brought down to `size` by up to as much as it allows."""
    scale = float(random.uniform(1, min(side / wanted for side, wanted in zip(source.size, size, strict=True))))
    width, height = size[0] * scale, size[1] * scale
    left, top = random.uniform(0, source.width - width), random.uniform(0, source.height - height)
    return source.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + width, top + height))
