"""Batches of a training step, failures, and the position of a process in its epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPosition:
    """Position of one process in its epoch, from which a later process continues at the very next batch.

    It fits an epoch of the same shards, the same view and the same number only: with other ones, begin the epoch anew.

    Attributes:
        batches: their number.
        samples: in them.
        failed: samples that failed on the way to them.
        reached: for each stream, how many of its places need not be read again.
        next_stream: whose turn it is.
    """

    batches: int = 0
    samples: int = 0
    failed: int = 0
    reached: tuple[int, ...] = ()
    next_stream: int = 0

    def after(self, batch: Batch) -> EpochPosition:
        """The position after a step on `batch`."""
        reached = dict(enumerate(self.reached)) | dict(batch.reached)
        return EpochPosition(
            batches=self.batches + 1,
            samples=self.samples + len(batch),
            failed=self.failed + sum(failure.samples for failure in batch.failed),
            reached=tuple(reached.get(stream, 0) for stream in range(max(reached, default=-1) + 1)),
            next_stream=self.next_stream if batch.next_stream is None else batch.next_stream,
        )

    def of(self, stream: int) -> int:
        """Places of a stream that are taken."""
        return self.reached[stream] if stream < len(self.reached) else 0

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> EpochPosition:
        """The position of which `content` has the fields, as JSON has them."""
        return EpochPosition(**{**content, "reached": tuple(content["reached"])})


EPOCH_START = EpochPosition()


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of the shards that one process reads, and how it reads it.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        loader_workers: processes that read and decode for this one; 0 has it do so itself.
        batch_size: samples of a batch.
        image_size: side of the square pictures that the model takes, in pixels.
        seed: of the whole training; order, crops and flips follow from it.
        shuffle_buffer: encoded samples that each loader worker holds in memory and draws from; 0 leaves the order of
            the shards.
        classes: labels are 0 to `classes` - 1, others fail; None takes any that are not negative.
        mean, std: per channel, of values from 0 to 1; a picture is normalised with them.
        pin_memory: whether pixels come in page-locked memory, from which a GPU copies them while it computes.
    """

    rank: int = 0
    world: int = 1
    loader_workers: int = 0
    batch_size: int
    image_size: int
    seed: int = 0
    shuffle_buffer: int = 1000
    classes: int | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    pin_memory: bool = False

    @property
    def streams(self) -> int:
        """Streams of samples that are read side by side for this process."""
        return max(1, self.loader_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Samples that could not be used.

    Attributes:
        shard: path or URL of the shard.
        key: of the sample; "" if the shard as a whole is meant.
        code: why, as docs/reference/failure-codes.md lists it.
        message: what is the matter, for people.
        samples: how many samples it stands for: those that a damaged shard lacks by its sizes.json, 1 if nobody
            knows; 0 if nothing is lost.
    """

    shard: str
    key: str
    code: str
    message: str
    samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step, and the failures since the batch before.

    A batch without samples comes only as the last of an epoch of which nothing else is left but failures: it is for the
    account, take no step on it.

    Attributes:
        pixels: uint8 of shape (n, 3, image_size, image_size), channels last in memory.
        mean, std: as in `View`; the pictures are normalised with them.
        labels: int64 of shape (n,).
        keys: of the samples, in order.
        shards: path or URL of the shard of each sample, in order.
        failed: what was dropped since the batch before.
        reached: (stream, places of it read until now), for `EpochPosition`. A stream is what one loader worker reads.
        next_stream: which stream's turn it is after this batch; None at the end of an epoch, when all have ended.
    """

    pixels: torch.Tensor
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    labels: torch.Tensor
    keys: list[str]
    shards: list[str]
    failed: tuple[Failure, ...]
    reached: tuple[tuple[int, int], ...]
    next_stream: int | None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def images(self) -> torch.Tensor:
        """Normalised float32 of shape (n, 3, image_size, image_size), made at each call."""
        return self.images_on(torch.device("cpu"))

    def images_on(self, device: torch.device) -> torch.Tensor:
        """`images` on a device, which normalises, so that a quarter of the bytes is transferred.

        Channels stay last in memory on a GPU, whose convolutions want them there, and come first on a CPU.
        """
        order = torch.contiguous_format if device.type == "cpu" else torch.preserve_format
        images = self.pixels.to(device, non_blocking=True).to(torch.float32, memory_format=order)
        return images.sub_(_channels(self.mean, device)).div_(_channels(self.std, device))


@cache
def _channels(values: tuple[float, float, float], device: torch.device) -> torch.Tensor:
    """Per-channel values for pixels of 0 to 255; cached, because sending them waits for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device).view(1, 3, 1, 1) * 255
