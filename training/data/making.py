"""The end of a loader worker's stream: items skipped, decoded and put together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch.utils.data import get_worker_info

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
        images, keys, shards: as in `Batch`.
        labels: of the samples.
        positions: of each sample, its place in the stream, from 1.
        failed: (place in the stream, failure), in order.
        read: items of the stream that were read until now.
    """

    stream: int
    images: torch.Tensor
    labels: list[int]
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


class _Growing:
    """A batch that is not yet full."""

    def __init__(self, view: View) -> None:
        self.labels: list[int] = []
        self.keys: list[str] = []
        self.shards: list[str] = []
        self.positions: list[int] = []
        self.failed: list[tuple[int, Failure]] = []
        self._images = _room(view.batch_size, view.image_size)
        self._mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (view.mean, view.std))
        self._scale = 1 / std

    def add(self, position: int, sample: RawSample, pixels: torch.Tensor, label: int) -> None:
        # Each picture by itself, while it is in the processor's cache.
        self._images[len(self.keys)].copy_(pixels).sub_(self._mean).mul_(self._scale)
        self.labels.append(label)
        self.keys.append(sample["__key__"])
        self.shards.append(sample["__url__"])
        self.positions.append(position)

    def made(self, stream: int, read: int) -> Made:
        return Made(
            stream=stream,
            images=self._images[: len(self.keys)],
            labels=self.labels,
            keys=self.keys,
            shards=self.shards,
            positions=self.positions,
            failed=self.failed,
            read=read,
        )


def _room(pictures: int, size: int) -> torch.Tensor:
    """Memory for float32 of shape (pictures, 3, size, size); in a loader worker, memory that the process which it
    works for shares, so that nothing is copied on the way there."""
    shape = (pictures, 3, size, size)
    if get_worker_info() is None:
        return torch.empty(shape)
    # As torch's own collation does it; `share_memory_` would copy.
    shared = torch.UntypedStorage._new_shared(4 * math.prod(shape), device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0).set_(shared).view(shape)
