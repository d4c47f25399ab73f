"""Paths from an encoded photograph to the pixels of a model, on one core: speed beside open_clip's own transform on
the same photographs, and how far the pixels and a model's vectors are from its.

Every few photographs go through all paths in turn, in an order drawn anew, and what counts is the processor time of the
thread, so that other work on the machine disturbs all paths alike. The usual path is what a reader with open_clip does:
PIL, resize and cut, ToTensor, Normalize. Ours end where a worker hands pixels to the device, with all checks of files.

python -m bench.images [ROUNDS]
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image, features

from bench.pictures import jpegs
from bench.report import table, write
from embq.core.models import CPU_DECODES, ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.image.decoding import quiet_pillow
from embq.worker.embedders.image.pixels import Pixels
from embq.worker.embedders.image.preprocess import of_open_clip
from embq.worker.embedders.registry import load

ARCH = "ViT-B-32"
MODEL = f"open_clip:{ARCH}?init=random&seed=0"
SETS = ((256, 256, 96, 95), (512, 384, 64, 90), (1024, 768, 32, 90), (3000, 2000, 16, 90), (3000, 2000, 16, 86))
"""Width, height, number and quality of photographs. The last are those before with fewer bytes for each pixel: what
decoding costs goes by the bytes."""
ROUNDS = 5
BLOCK = 4
"""Photographs that a path takes at once, so that most follow one of their own path, as in a worker."""
USUAL = "open_clip"
"""The path that the others are compared with."""

Path = Callable[[bytes], np.ndarray]


def paths() -> dict[str, Path]:
    """Name -> what makes uint8 (224, 224, 3) of a JPEG, or for `USUAL` float32 (3, 224, 224)."""
    model, _, transform = open_clip.create_model_and_transforms(ARCH, pretrained=None)
    preprocess = of_open_clip(transform, model.visual.preprocess_cfg, ARCH)

    def usual(data: bytes) -> np.ndarray:
        made: np.ndarray = transform(Image.open(io.BytesIO(data))).numpy()
        return made

    def ours(decode: str) -> Path:
        return Pixels(preprocess, decode).of

    return {USUAL: usual, **{decode: ours(decode) for decode in CPU_DECODES}}


def seconds(photographs: Sequence[bytes], by: Mapping[str, Path], random: np.random.Generator) -> dict[str, float]:
    """Processor seconds of each path for all photographs."""
    spent = dict.fromkeys(by, 0.0)
    names = list(by)
    for block in range(0, len(photographs), BLOCK):
        for turn in random.permutation(len(names)):
            began = time.thread_time()
            for data in photographs[block : block + BLOCK]:
                by[names[turn]](data)
            spent[names[turn]] += time.thread_time() - began
    return spent


def fidelity(photographs: Sequence[bytes], by: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Path -> how far its pixels, and vectors of `MODEL`, are from those of the reference path."""
    vectors = {}
    for decode in CPU_DECODES:
        model = load(ModelConfig(spec=MODEL, modalities=("image",), precision="fp32", decode=decode), "cpu")
        ready = model.prepare([Sample(ordinal=n, key="", image=data) for n, data in enumerate(photographs)])
        vectors[decode] = np.concatenate(
            [np.array(model.embed(ready[at : at + 16])["image"]) for at in range(0, len(ready), 16)]
        )
    found = {}
    for decode in CPU_DECODES:
        most, psnr = 0, []
        for data in photographs:
            off = np.abs(by[decode](data).astype(np.int16) - by["reference"](data))
            most, square = max(most, int(off.max())), float(np.square(off, dtype=np.float64).mean())
            psnr.append(10 * np.log10(255**2 / square) if square else float("inf"))
        cosines = (vectors[decode] * vectors["reference"]).sum(axis=1)
        finite = [value for value in psnr if value != float("inf")]
        found[decode] = {
            "max_difference": most,
            "psnr_db_mean": round(statistics.fmean(finite), 1) if finite else float("inf"),
            "psnr_db_min": round(min(finite), 1) if finite else float("inf"),
            "cosine_mean": round(float(cosines.mean()), 6),
            "cosine_min": round(float(cosines.min()), 6),
        }
    return found


def measured(width: int, height: int, count: int, quality: int, by: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """The figures of one set of photographs."""
    photographs = jpegs((width, height), count, seed=7, quality=quality)
    random = np.random.default_rng(7)
    seconds(photographs[:BLOCK], by, random)
    spent = [seconds(photographs, by, random) for _ in range(rounds)]
    of_paths: dict[str, dict[str, Any]] = {
        name: {
            "per_s": round(len(photographs) / statistics.median(one[name] for one in spent), 1),
            "times": round(statistics.median(one[USUAL] / one[name] for one in spent), 2),
            "times_least": round(min(one[USUAL] / one[name] for one in spent), 2),
            "times_most": round(max(one[USUAL] / one[name] for one in spent), 2),
        }
        for name in by
    }
    for name, figures in fidelity(photographs, by).items():
        of_paths[name] |= figures
    total = sum(map(len, photographs))
    return {
        "width": width,
        "height": height,
        "quality": quality,
        "photographs": len(photographs),
        "bytes_each": total // len(photographs),
        "bytes_per_pixel": round(total / len(photographs) / width / height, 3),
        "paths": of_paths,
    }


def main() -> None:
    """Measure all sets and write the figures."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    quiet_pillow()
    by = paths()
    sets = [measured(*one, by, rounds) for one in SETS]
    rows = [
        (
            f"{of['width']}x{of['height']} q{of['quality']}",
            of["bytes_per_pixel"],
            name,
            f"{path['per_s']:g}",
            f"{path['times']:.2f} ({path['times_least']:.2f}-{path['times_most']:.2f})",
            *(
                path.get(figure, "")
                for figure in ("max_difference", "psnr_db_mean", "psnr_db_min", "cosine_mean", "cosine_min")
            ),
        )
        for of in sets
        for name, path in of["paths"].items()
    ]
    header = (
        "photographs",
        "B/pixel",
        "path",
        "per s and core",
        "times",
        "max diff",
        "PSNR",
        "least",
        "cosine",
        "least",
    )
    table(header, rows)
    libraries = {
        "libjpeg_turbo_of_pillow": features.version_feature("libjpeg_turbo"),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
    }
    print(f"\nwritten: {write('images', {'rounds': rounds, 'model': MODEL, 'libraries': libraries, 'sets': sets})}")


if __name__ == "__main__":
    main()
