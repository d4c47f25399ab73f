"""Shards to train on: photographs with the numbers of their classes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from bench import pictures

SIZE = (500, 375)
"""Width and height of the average picture of ImageNet."""

DIFFERENT, SHARDS, CLASSES = 400, 8, 10
"""Pictures that differ; shards, of equal size; classes."""


def training_set(folder: Path, samples: int) -> Path:
    """Write shards of about so many samples, sizes.json and classes.json; gives the folder."""
    folder.mkdir(parents=True)
    jpegs = pictures.jpegs(SIZE, min(DIFFERENT, samples), seed=0)
    each = max(1, samples // SHARDS)
    names = [f"train-{number:06d}.tar" for number in range(SHARDS)]
    for number, name in enumerate(names):
        with tarfile.open(folder / name, "w", format=tarfile.USTAR_FORMAT) as shard:
            for at in range(number * each, (number + 1) * each):
                for extension, data in (("jpg", jpegs[at % len(jpegs)]), ("cls", str(at % CLASSES).encode())):
                    member = tarfile.TarInfo(f"{at:08d}.{extension}")
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))
    (folder / "sizes.json").write_text(json.dumps(dict.fromkeys(names, each)))
    (folder / "classes.json").write_text(json.dumps([f"class {number}" for number in range(CLASSES)]))
    return folder
