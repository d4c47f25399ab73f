"""The end of a loader worker's stream: items skipped, decoded and put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch

from core.errors import SampleError
from training.data.batch import Failure
from training.data.reading import RawSample
from training.data.samples import PixelsOf, prepared
from training.data.split import stream_number
from training.data.taken import Taken
from training.data.view import View
from worker.embedders.images import quiet_pillow

FRUITLESS = 1000
"""Items that may fail one after the other before what failed is sent on alone: who counts failures has to see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a loader worker sends: the next samples of its stream, and the failures between them.

    Attributes:
        stream: number of the stream.
        images, labels, keys, shards: as in `Batch`.
        positions: of each sample, its place in the stream, from 1.
        failed: (place in the stream, failure), in order.
        read: items of the stream that were read until now.
    """

    stream: int
    images: torch.Tensor
    labels: torch.Tensor
    keys: list[str]
    shards: list[str]
    positions: list[int]
    failed: list[tuple[int, Failure]]
    read: int

    def __len__(self) -> int:
        return len(self.keys)


def made_batches(
    items: Iterable[RawSample | Failure], *, view: View, pixels_of: PixelsOf, taken: Taken
) -> Iterator[Made]:
    """Full batches of this loader worker's stream, and one that is smaller at its end.

    What is taken already is skipped before it is decoded.
    """
    quiet_pillow()
    stream = stream_number(taken.next_stream, view.streams)
    read = taken.of(stream)
    growing = _Growing(view)
    for item in islice(items, read, None):
        read += 1
        if isinstance(item, Failure):
            growing.failed.append((read, item))
        else:
            try:
                growing.add(read, item, *prepared(item, pixels_of, view.classes))
            except SampleError as error:
                why = Failure(shard=item["__url__"], key=item["__key__"], code=error.code, message=error.message)
                growing.failed.append((read, why))
        if len(growing.keys) == view.batch_size or (not growing.keys and len(growing.failed) == FRUITLESS):
            yield growing.made(stream, read)
            growing = _Growing(view)
    if growing.keys or growing.failed:
        yield growing.made(stream, read)


@dataclass(slots=True)
class _Growing:
    """A batch that is not yet full."""

    view: View
    pixels: list[torch.Tensor] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    failed: list[tuple[int, Failure]] = field(default_factory=list)

    def add(self, position: int, sample: RawSample, pixels: torch.Tensor, label: int) -> None:
        self.pixels.append(pixels)
        self.labels.append(label)
        self.keys.append(sample["__key__"])
        self.shards.append(sample["__url__"])
        self.positions.append(position)

    def made(self, stream: int, read: int) -> Made:
        return Made(
            stream=stream,
            images=normalised(self.pixels, self.view),
            labels=torch.tensor(self.labels, dtype=torch.int64),
            keys=self.keys,
            shards=self.shards,
            positions=self.positions,
            failed=self.failed,
            read=read,
        )


def normalised(pixels: list[torch.Tensor], view: View) -> torch.Tensor:
    """float32 of shape (n, 3, size, size) of n uint8 pictures of shape (3, size, size)."""
    images = torch.empty((len(pixels), 3, view.image_size, view.image_size), dtype=torch.float32)
    for row, picture in zip(images, pixels, strict=True):
        row.copy_(picture)
    mean, std = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in (view.mean, view.std))
    return images.sub_(mean * 255).div_(std * 255)
