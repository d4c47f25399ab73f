"""Cost of a sample in each stage of embq's loader: in one thread, each stage added to those before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from bench.training_loaders import BATCH_SIZE, IMAGE_SIZE
from embq.core.units import Sample
from embq.training.data.batch import EPOCH_START, View
from embq.training.data.epochs import as_batch
from embq.training.data.images import training_pixels
from embq.training.data.loader import WorkerBatch, made_batches
from embq.training.data.reading import RawSample, read_shards
from embq.training.shards.shard_set import Shards
from embq.worker.embedders.image.decoding import Picture

PASSES = 5
"""In each of them every stage has its turn; the fastest counts: what disturbs only ever adds."""


def costs(shards: Shards) -> dict[str, Any]:
    """CPU microseconds of a sample in each stage, the part of all that is the largest, and its name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    until = {
        "reading the tar": lambda: _read(shards),
        "decoding": lambda: _pictures(shards, lambda picture, _: picture.pixels()),
        "cropping and resizing": lambda: _pictures(shards, _pixels),
        "putting into a batch": lambda: _exhaust(_made(shards)),
        "normalising": lambda: _exhaust(as_batch(made, _view()).images for made in _made(shards)),
    }
    passes = [[_cpu_us(stage, shards.samples or 1) for stage in until.values()] for _ in range(PASSES)]
    sums = [min(taken) for taken in zip(*passes, strict=True)]
    torch.set_num_threads(threads)
    us = {name: round(now - before, 1) for name, now, before in zip(until, sums, [0.0, *sums], strict=False)}
    bottleneck = max(us, key=lambda name: us[name])
    return {"us": us, "bottleneck": bottleneck, "its_part": round(us[bottleneck] / sums[-1], 2)}


_pixels = partial(training_pixels, size=IMAGE_SIZE, seed=0, epoch=0)


def _made(shards: Shards) -> Iterator[WorkerBatch]:
    return made_batches(_read(shards), view=_view(), pixels_of=_pixels, taken=EPOCH_START)


def _view() -> View:
    return View(batch_size=BATCH_SIZE, image_size=IMAGE_SIZE)


def _read(shards: Shards) -> list[Any]:
    return list(read_shards(({"url": url} for url in shards.urls), counts={}))


def _pictures(shards: Shards, use: Callable[[Picture, str], object]) -> None:
    samples: Iterable[RawSample] = _read(shards)
    for sample in samples:
        with Picture(Sample(ordinal=0, key=sample["__key__"], image=sample["jpg"])) as picture:
            use(picture, sample["__key__"])


def _exhaust(batches: Iterable[object]) -> None:
    """Read as a training does: a batch is gone before the next one comes."""
    deque(batches, maxlen=0)


def _cpu_us(stage: Callable[[], object], samples: int) -> float:
    began = time.process_time()
    stage()
    return (time.process_time() - began) / samples * 1e6
