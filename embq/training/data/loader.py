"""Loader workers: processes that read, decode and batch samples while a step is computed."""

from __future__ import annotations

import math
import os
import re
import signal
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import webdataset as wds
from torch.utils.data import DataLoader, get_worker_info

from embq.core.errors import SampleError, UnwellError
from embq.core.process.children import die_with_parent
from embq.training.data.batch import EpochPosition, Failure, View
from embq.training.data.images import PixelsOf, prepared
from embq.training.data.reading import RawSample
from embq.training.data.split import stream_number
from embq.worker.embedders.image.decoding import quiet_pillow

FRUITLESS = 1000
"""Consecutive failures after which they are sent alone, so that they are counted in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBatch:
    """A message of a loader worker: the next samples of its stream, and the failures among them.

    Attributes:
        stream: number of the stream.
        pixels: uint8 of shape (n, image_size, image_size, 3).
        keys, shards: as in `Batch`.
        labels: of the samples.
        positions: of each sample, its place in the stream; see `left_of`.
        failed: (place in the stream, failure), in order.
        read: places of the stream that were read until now.
    """

    stream: int
    pixels: torch.Tensor
    labels: list[int]
    keys: list[str]
    shards: list[str]
    positions: list[int]
    failed: list[tuple[int, Failure]]
    read: int

    def __len__(self) -> int:
        return len(self.keys)

    def pin_memory(self) -> WorkerBatch:
        """The same with pixels in page-locked memory; torch's loader calls this."""
        return replace(self, pixels=self.pixels.pin_memory())


def made_batches(
    items: Iterable[RawSample | Failure], *, view: View, pixels_of: PixelsOf, taken: EpochPosition
) -> Iterator[WorkerBatch]:
    """Full batches of this loader worker's stream, and a smaller one at its end.

    What is taken already is skipped before it is decoded.
    """
    quiet_pillow()
    stream = stream_number(taken.next_stream, view.streams)
    batch = _empty(stream, view)
    read = 0
    for read, item in remaining(items, taken.of(stream)):
        if isinstance(item, Failure):
            batch.failed.append((read, item))
        else:
            try:
                pixels, label = prepared(item, pixels_of, view.classes)
            except SampleError as error:
                why = Failure(shard=item["__url__"], key=item["__key__"], code=error.code, message=error.message)
                batch.failed.append((read, why))
            else:
                batch.pixels[len(batch)].copy_(pixels.permute(1, 2, 0))
                batch.labels.append(label)
                batch.shards.append(item["__url__"])
                batch.positions.append(read)
                batch.keys.append(item["__key__"])
        if len(batch) == view.batch_size or (not batch and len(batch.failed) == FRUITLESS):
            yield _finished(batch, read)
            batch = _empty(stream, view)
    if batch or batch.failed:
        yield _finished(batch, read)


def _empty(stream: int, view: View) -> WorkerBatch:
    """A batch to fill, with room for the pixels of all of its samples."""
    pixels = _pixel_buffer(view.batch_size, view.image_size)
    return WorkerBatch(stream=stream, pixels=pixels, labels=[], keys=[], shards=[], positions=[], failed=[], read=0)


def _finished(batch: WorkerBatch, read: int) -> WorkerBatch:
    return replace(batch, pixels=batch.pixels[: len(batch)], read=read)


def remaining(items: Iterable[RawSample | Failure], taken: int) -> Iterator[tuple[int, RawSample | Failure]]:
    """The items of a stream after its first `taken` places, each with its place, from 1.

    A failure of many samples has as many places, its own being the last. So a stream is as long if a shard could not
    be read as if it could, and what became of its samples adds up even if that has changed since the first places
    were taken.
    """
    place = 0
    for item in items:
        size = max(1, item.samples) if isinstance(item, Failure) else 1
        place += size
        if place <= taken:
            continue
        if isinstance(item, Failure) and place - taken < size:
            item = replace(item, samples=place - taken)
        yield place, item


def _pixel_buffer(pictures: int, size: int) -> torch.Tensor:
    """Memory for uint8 of shape (pictures, size, size, 3); in a loader worker, memory that the process which it works
    for shares, so that nothing is copied on the way there."""
    shape = (pictures, size, size, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    # As torch's own collation does it; `share_memory_` would copy.
    shared = torch.UntypedStorage._new_shared(math.prod(shape), device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(shared).view(shape)


DIED = re.compile(
    r"DataLoader worker \(pid|Pin memory thread exited|unable to (allocate|mmap|resize)|No space left on device"
)
"""Messages of torch for a dead worker, or one without shared memory. Its pinning thread ends where the last message
of a dead worker cannot be read."""


def loaded(stages: list[Any], view: View) -> Iterator[WorkerBatch]:
    """The output of the stages, from as many processes as the view has loader workers, in turn.

    Raises UnwellError if a loader worker has died.
    """
    workers = view.loader_workers
    sent = _begun(stages, view)
    try:
        yield from sent
    except (RuntimeError, OSError, EOFError) as error:
        if not workers or not _is_of_a_death(error):
            raise
        raise UnwellError(
            f"a loader worker has died: {(str(error) or type(error).__name__).strip().splitlines()[-1]}",
            next_step="often the machine had no memory left, or /dev/shm none: fewer --workers, a smaller "
            "--shuffle-buffer or --batch-size, or a container with --shm-size=1g or --ipc=host; the same command goes "
            "on where the training stopped",
        ) from error


def _is_of_a_death(error: Exception) -> bool:
    """True if a worker is gone. OSError and EOFError come from its pipes, unless a live worker caught them."""
    if isinstance(error, RuntimeError):
        return DIED.search(str(error)) is not None
    return not str(error).startswith("Caught ")


def _begun(stages: list[Any], view: View) -> Iterator[WorkerBatch]:
    """A loader with running workers."""
    handler = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        # torch warns for each epoch of more workers than cores, although they may be waiting for storage.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        pipeline = wds.DataPipeline(*stages)
        loader: DataLoader[Any] = DataLoader(
            pipeline,
            batch_size=None,
            num_workers=view.loader_workers,
            worker_init_fn=_bound_to_parent,
            # For the current device, which `process_group.membership` has set.
            pin_memory=view.pin_memory,
        )
        sent = iter(loader)
    if signal.getsignal(signal.SIGCHLD) is not handler:
        # On a dead worker torch's handler would raise wherever the main thread is, also in a collective. Without it the
        # wait for the next batch raises within 5 s.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return sent


def _bound_to_parent(_worker: int) -> None:
    """Bind a loader worker to the process that it reads for.

    A request to stop goes to that process's group, and torch has its workers end at a SIGTERM from anybody: the process
    would lose them before it came to its next step. And they would hold the inherited lock of the output
    folder for seconds after that process was killed.
    """
    os.setpgid(0, 0)
    die_with_parent()
