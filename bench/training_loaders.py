"""Two loaders that do the same with the same shards: embq's, and webdataset's as its documents put it together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import webdataset as wds
from torch import nn
from torchvision import transforms

from bench.training_set import CLASSES
from embq.training.data.batch import IMAGENET_MEAN, IMAGENET_STD, View
from embq.training.data.epochs import exact_epoch
from embq.training.shards.shard_set import Shards

BATCH_SIZE, IMAGE_SIZE, BUFFER = 64, 224, 1000

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def ours(shards: Shards, workers: int, epoch: int) -> Batches:
    """An exact epoch."""
    view = View(loader_workers=workers, batch_size=BATCH_SIZE, image_size=IMAGE_SIZE, shuffle_buffer=BUFFER)
    return ((batch.images, batch.labels) for batch in exact_epoch(shards, view, epoch=epoch))


def theirs(shards: Shards, workers: int, epoch: int) -> Batches:
    """The loader of webdataset's examples, with torchvision's transforms on Pillow's images."""
    steps = [
        transforms.RandomResizedCrop(IMAGE_SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    dataset = (
        wds.WebDataset(list(shards.urls), shardshuffle=len(shards.urls), seed=epoch)
        .shuffle(BUFFER)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transforms.Compose(steps))
        .batched(BATCH_SIZE)
    )
    return iter(wds.WebLoader(dataset, batch_size=None, num_workers=workers))


LOADERS: dict[str, Callable[[Shards, int, int], Batches]] = {"embq": ours, "webdataset": theirs}


def _no_step() -> Callable[[torch.Tensor, torch.Tensor], None]:
    return lambda *_: None


def _tiny_step() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Forward, backward and an update of a model that takes hardly any time."""
    model = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


STEPS: dict[str, Callable[[], Callable[[torch.Tensor, torch.Tensor], None]]] = {
    "nothing": _no_step,
    "a tiny step": _tiny_step,
}


def rate(who: str, into: str, shards: Shards, workers: int, *, epoch: int) -> float:
    """Samples per second of one pass over all shards, the start of the loader workers included."""
    step: Any = STEPS[into]()
    began, samples = time.perf_counter(), 0
    for images, labels in LOADERS[who](shards, workers, epoch):
        step(images, labels)
        samples += len(labels)
    seconds = time.perf_counter() - began
    if samples != shards.samples:
        raise AssertionError(f"{who} gave {samples} of {shards.samples} samples")
    return samples / seconds
