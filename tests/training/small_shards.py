"""Shards of small pictures with classes, whole or with something the matter, made where a test wants them."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from embq.training.shards.shard_set import Shards, open_shards
from tests.support.outputs.build import write_tar
from tests.support.picture_files import encoded

CLASSES = 7

Members = Mapping[str, bytes]
"""The members of a sample by extension."""


def key_of(number: int) -> str:
    return f"{number:05d}"


def label_of(key: str) -> int:
    """The class of the samples made here."""
    return int(key) % CLASSES


@cache
def picture(number: int) -> bytes:
    """One of a few JPEGs of noise, 20 by 16 pixels."""
    pixels = np.random.default_rng(number % 10).integers(0, 255, (16, 20, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG", quality=90)


def sample(number: int, changes: Mapping[str, bytes | None] | None = None) -> dict[str, bytes]:
    """The members of a sound sample; `changes` replaces some of them, and takes away what it says is None."""
    members = {"jpg": picture(number), "cls": str(number % CLASSES).encode(), **(changes or {})}
    return {extension: data for extension, data in members.items() if data is not None}


def write_shard(path: Path, samples: Mapping[str, Members]) -> Path:
    """A tar of samples by their keys, in order."""
    members = [(f"{key}.{extension}", data) for key, one in samples.items() for extension, data in one.items()]
    return write_tar(path, members, tarfile.USTAR_FORMAT)


def write_shards(
    folder: Path,
    counts: Sequence[int],
    changes: Mapping[int, Mapping[str, bytes | None]] | None = None,
) -> Shards:
    """Shards of so many samples each, numbered through, with sizes.json.

    Args:
        changes: number of a sample -> what is other than it should be, see `sample`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number, sizes = 0, {}
    for at, count in enumerate(counts):
        numbers = range(number, number + count)
        name = f"s-{at:03d}.tar"
        write_shard(folder / name, {key_of(n): sample(n, (changes or {}).get(n)) for n in numbers})
        sizes[name] = count
        number += count
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return open_shards(str(folder))
