"""Epochs of training and validation, as one process reads them.

Rebuilt for each epoch: a loader that is used again would give the same order again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import webdataset as wds

from embq.core.errors import InputError
from embq.training.data.batch import EPOCH_START, Batch, EpochPosition, Failure, View
from embq.training.data.images import PixelsOf, training_pixels, validation_pixels
from embq.training.data.loader import WorkerBatch, loaded, made_batches
from embq.training.data.reading import read_shards
from embq.training.data.split import dealt, own_stream, permuted, seed_of, stream_number
from embq.training.shards.shard_set import Shards


def number_of_stream(rank: int, *, first: int, streams: int) -> int:
    """Number of this loader worker's stream among those of all processes, which seeds its draws."""
    return rank * streams + stream_number(first, streams)


def own_batches(
    messages: Iterable[WorkerBatch], *, batches: int, taken: EpochPosition, streams: int
) -> Iterator[WorkerBatch]:
    """The remaining batches of an epoch that come from this loader worker; streams take turns.

    Messages without samples do not count.
    """
    stream = stream_number(taken.next_stream, streams)
    remaining = len(range(taken.batches + (stream - taken.batches) % streams, batches, streams))
    for each in messages if remaining else ():
        yield each
        remaining -= bool(each)
        if not remaining:
            return


def batches_or_error(sent: Iterable[WorkerBatch], view: View) -> Iterator[Batch]:
    """Batches of what loader workers sent; InputError if one of them found only failures for long."""
    for message in sent:
        if not message:
            raise _fruitless([failure for _, failure in message.failed])
        yield as_batch(message, view)


def as_batch(message: WorkerBatch, view: View) -> Batch:
    """A message of a loader worker as a batch."""
    return Batch(
        pixels=message.pixels.permute(0, 3, 1, 2),
        mean=view.mean,
        std=view.std,
        labels=torch.tensor(message.labels),
        keys=message.keys,
        shards=message.shards,
        failed=tuple(failure for _, failure in message.failed),
        reached=((message.stream, message.read),),
        next_stream=(message.stream + 1) % view.streams,
    )


def regrouped(sent: Iterable[WorkerBatch], view: View) -> Iterator[Batch]:
    """Batches of an exact epoch from the messages of its loader workers, in the order of the loader.

    Each worker's stream ends with a piece of a batch. Those pieces are kept until all streams have ended, and then
    shared out again in batches of nearly equal size. So the smallest batch is no single sample, on which batch
    normalisation cannot be trained, unless the process has but one.
    """
    held: WorkerBatch | None = None
    pieces: list[WorkerBatch] = []
    for message in sent:
        if len(message) < view.batch_size:
            pieces.append(message)
            continue
        if held is not None:
            yield as_batch(held, view)
        held = message
    remaining = sum(map(len, pieces))
    if held is not None:
        # One sample alone, or failures alone, go with the last full batch.
        if pieces and remaining <= 1:
            pieces.append(held)
            remaining += len(held)
        else:
            yield as_batch(held, view)
    yield from _shared_out(pieces, remaining, view)


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


def _shared_out(pieces: Sequence[WorkerBatch], remaining: int, view: View) -> Iterator[Batch]:
    """Batches of nearly equal size from the items of partial batches, larger ones first.

    So after any of them, sharing out what is left gives the very batches that come next.
    """
    items = sorted(item for piece in pieces for item in _items(piece))
    batches = -(-remaining // view.batch_size)
    group: list[_Item] = []
    size = 0
    for item in items:
        if item.failure is None:
            if size and size == -(-remaining // batches):
                yield _joined(group, view)
                remaining, batches, group, size = remaining - size, batches - 1, [], 0
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


def _fruitless(failed: list[Failure]) -> InputError:
    first = failed[0]
    return InputError(
        f"{len(failed)} samples one after the other failed; the first is {first.key or 'all'} of {first.shard}: "
        f"{first.message}",
        code=first.code,
        next_step="check the shards with embq shards verify",
    )


def exact_epoch(shards: Shards, view: View, *, epoch: int, taken: EpochPosition = EPOCH_START) -> Iterator[Batch]:
    """This process's part of an epoch in which all processes together see every sample once.

    Processes may end at different steps: their shards hold about as many samples as those of others, and some processes
    may have none.
    Only the last batches are smaller than `batch_size`; one has a single sample only if the process has no other,
    or if `batch_size` is 1 or 2.

    Args:
        taken: what of this very epoch was taken before; it goes on with the batch that comes next.

    Raises UnwellError if a loader worker has died.
    """
    pixels_of = partial(training_pixels, size=view.image_size, seed=view.seed, epoch=epoch)
    urls = permuted(shards.urls, view.seed, epoch)
    stages = [*_own_shards(shards, urls, view, taken), *_shuffled(view, epoch)]
    return _once(stages, view, pixels_of, taken)


def resampled_epoch(
    shards: Shards, view: View, *, epoch: int, batches: int, taken: EpochPosition = EPOCH_START
) -> Iterator[Batch]:
    """`batches` full batches for this process, of shards that each loader worker draws with replacement.

    Every draw takes any shard with equal probability, whatever others have drawn, and gives all of its samples. So a
    sample may come several times in an epoch, or not at all; all processes make the same number of steps.

    Args:
        batches: of the whole epoch, what was taken before included.
        taken: what of this very epoch was taken before; it goes on with the batch that comes next.

    Raises as `exact_epoch` does, and InputError if nothing in the shards is of any use.
    """
    pixels_of = partial(training_pixels, size=view.image_size, seed=view.seed, epoch=epoch)
    making = partial(made_batches, view=view, pixels_of=pixels_of, taken=taken)
    stages = [_drawn(shards, view, epoch, taken), _reading(shards), *_shuffled(view, epoch), making]
    own = partial(own_batches, batches=batches, taken=taken, streams=view.streams)
    return batches_or_error(loaded([*stages, own], view), view)


def _drawn(shards: Shards, view: View, epoch: int, taken: EpochPosition) -> Any:
    counts = shards.counts or (1,) * len(shards.urls)
    urls = [url for url, count in zip(shards.urls, counts, strict=True) if count]
    if not urls:
        raise InputError("the shards hold no sample", next_step="look at them with embq shards sum")
    number = partial(number_of_stream, view.rank, first=taken.next_stream, streams=view.streams)
    seed = seed_of("draws", view.seed, epoch)
    return wds.ResampledShards(urls, seed=seed, worker_seed=number, deterministic=True)


def validation_samples(shards: Shards, view: View) -> Iterator[Batch]:
    """This process's part of all samples, each of which one process sees once, the middle of each picture.

    Raises as `exact_epoch` does.
    """
    pixels_of = partial(validation_pixels, size=view.image_size)
    return _once(_own_shards(shards, list(shards.urls), view, EPOCH_START), view, pixels_of, EPOCH_START)


def _own_shards(shards: Shards, urls: list[str], view: View, taken: EpochPosition) -> list[Any]:
    """The stages that give the samples of this process's and this loader worker's part of `urls`."""
    counts = _counts(shards)
    streams = dealt(dealt(urls, view.world, counts)[view.rank], view.streams, counts)
    return [partial(own_stream, streams, first=taken.next_stream), _reading(shards)]


def _reading(shards: Shards) -> Any:
    return partial(read_shards, counts=_counts(shards))


def _counts(shards: Shards) -> dict[str, int]:
    return {} if shards.counts is None else dict(zip(shards.urls, shards.counts, strict=True))


def _shuffled(view: View, epoch: int) -> list[Any]:
    if not view.shuffle_buffer:
        return []
    return [wds.shuffle(view.shuffle_buffer, seed=seed_of("buffer", view.seed, epoch, view.rank))]


def _once(stages: list[Any], view: View, pixels_of: PixelsOf, taken: EpochPosition) -> Iterator[Batch]:
    making = partial(made_batches, view=view, pixels_of=pixels_of, taken=taken)
    return regrouped(loaded([*stages, making], view), view)
