"""Batches of an exact epoch from the messages of loader workers; only the last ones are smaller than the others.

Each worker's stream ends with a piece of a batch. Those pieces are kept until all streams have ended, and then shared
out again in batches of nearly equal size. So the smallest batch is no single sample, on which batch normalisation
cannot be trained, unless the process has but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from embq.training.data.batch import Batch, Failure, View
from embq.training.data.loader import WorkerBatch


def whole(made: WorkerBatch, view: View) -> Batch:
    """A message of a loader worker as a batch."""
    return Batch(
        pixels=made.pixels.permute(0, 3, 1, 2),
        mean=view.mean,
        std=view.std,
        labels=torch.tensor(made.labels),
        keys=made.keys,
        shards=made.shards,
        failed=tuple(failure for _, failure in made.failed),
        reached=((made.stream, made.read),),
        next_stream=(made.stream + 1) % view.streams,
    )


def regrouped(sent: Iterable[WorkerBatch], view: View) -> Iterator[Batch]:
    """Batches of an epoch from the messages of its loader workers, in the order of the loader."""
    held: WorkerBatch | None = None
    pieces: list[WorkerBatch] = []
    for made in sent:
        if len(made) < view.batch_size:
            pieces.append(made)
            continue
        if held is not None:
            yield whole(held, view)
        held = made
    left = sum(map(len, pieces))
    if held is not None:
        # One sample alone, or failures alone, go with the last full batch.
        if pieces and left <= 1:
            pieces.append(held)
            left += len(held)
        else:
            yield whole(held, view)
    yield from _shared_out(pieces, left, view)


class _Item(NamedTuple):
    """A sample or a failure at its place in a stream; ordered by place, so that the order of arrival does not matter.

    Attributes:
        row: of the sample in `piece`; -1 of a failure.
    """

    stream: int
    position: int
    row: int
    piece: WorkerBatch
    failure: Failure | None


def _shared_out(pieces: Sequence[WorkerBatch], left: int, view: View) -> Iterator[Batch]:
    """Batches of nearly equal size from the items of partial batches, larger ones first.

    So after any of them, sharing out what is left gives the very batches that come next.
    """
    items = sorted(item for piece in pieces for item in _items(piece))
    batches = -(-left // view.batch_size)
    group: list[_Item] = []
    size = 0
    for item in items:
        if item.failure is None:
            if size and size == -(-left // batches):
                yield _joined(group, view)
                left, batches, group, size = left - size, batches - 1, [], 0
            size += 1
        group.append(item)
    if group:
        yield _joined(group, view)


def _items(piece: WorkerBatch) -> Iterator[_Item]:
    for row, position in enumerate(piece.positions):
        yield _Item(piece.stream, position, row, piece, None)
    for position, failure in piece.failed:
        yield _Item(piece.stream, position, -1, piece, failure)


def _joined(group: Sequence[_Item], view: View) -> Batch:
    samples = [item for item in group if item.failure is None]
    pixels = [item.piece.pixels[item.row] for item in samples]
    return Batch(
        pixels=(torch.stack(pixels) if pixels else group[0].piece.pixels[:0]).permute(0, 3, 1, 2),
        mean=view.mean,
        std=view.std,
        labels=torch.tensor([item.piece.labels[item.row] for item in samples], dtype=torch.int64),
        keys=[item.piece.keys[item.row] for item in samples],
        shards=[item.piece.shards[item.row] for item in samples],
        failed=tuple(item.failure for item in group if item.failure is not None),
        reached=tuple({item.stream: item.position for item in group}.items()),
        next_stream=None,
    )
