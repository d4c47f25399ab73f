"""Upload of decoded images as bytes; the device converts and normalises them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from embq.core.errors import SampleError
from embq.core.models import GPU
from embq.core.units import Sample
from embq.worker.embedders.device.errors import using
from embq.worker.embedders.image.buffer_pool import ROWS, Row, SlabPool, gathered, runs, together
from embq.worker.embedders.image.gpu_decode import gpu_decoder
from embq.worker.embedders.image.pixels import Normaliser, Pixels, prepared
from embq.worker.embedders.image.preprocess import Preprocess

T = TypeVar("T")


class ImageBatcher:
    """Prepares images by one of the decode paths. Safe to use from any thread, but for batches of a CUDA device.

    Args:
        decode: one of `embq.core.models.DECODES`.
        device: where batches are computed.

    Attributes:
        device: that one.
        pixels: the path.
        row_bytes: of a prepared image.

    Raises ModelError if the path is not for this device, or lacks what it needs.
    """

    def __init__(self, preprocess: Preprocess, decode: str, device: torch.device) -> None:
        self.device = device
        self.pixels = Pixels(preprocess, decode, gpu_decoder(device) if decode == GPU else None)
        with using(device):
            self._normaliser = Normaliser(preprocess, device)
        height, width, _ = self.pixels.shape
        self._slabs = SlabPool(height, width, device)
        self._uploader = Uploader(device)
        self.row_bytes = self._slabs.row_bytes

    def rows(self, count: int) -> list[Row]:
        """Rows for the images of a chunk; see `embq.worker.embedders.image.buffer_pool.SlabPool`."""
        return self._slabs.rows(count)

    def black(self) -> Row:
        """A black image, as an example."""
        (row,) = self.rows(1)
        row.array.fill(0)
        return row

    def noise(self) -> Row:
        """An image of which no two pixels are alike, as an example."""
        (row,) = self.rows(1)
        row.pixels.random_()
        return row

    def batch(self, rows: Sequence[Row], dtype: torch.dtype) -> torch.Tensor:
        """The normalised images on the device: `dtype` of shape (len(rows), 3, height, width)."""
        return self._uploader.send(rows, lambda pixels: self._normaliser(pixels, dtype))


def image_rows(samples: Sequence[Sample], models: Sequence[ImageBatcher]) -> list[list[Row | SampleError]]:
    """The images of samples for all models that look at them, each decoded once: of each model, a row for each sample.

    A sample that cannot be prepared for a model has its error there, and for all models behind that.
    """
    results: list[list[Row | SampleError]] = [[] for _ in models]
    for start in range(0, len(samples), ROWS):
        chunk = samples[start : start + ROWS]
        rows = [model.rows(len(chunk)) for model in models]
        answers = prepared(chunk, [model.pixels for model in models], [together(of_model) for of_model in rows])
        for result, of_model, errors in zip(results, rows, answers, strict=True):
            result += [row if error is None else error for row, error in zip(of_model, errors, strict=True)]
    return results


def with_images(
    samples: Sequence[Sample], rows: Sequence[Row | SampleError], ready: Callable[[Sample, Row], T]
) -> list[T | SampleError]:
    """`ready` of every sample and its image, in order, with the SampleError that either of them has."""
    answers: list[T | SampleError] = []
    for sample, row in zip(samples, rows, strict=True):
        try:
            answers.append(row if isinstance(row, SampleError) else ready(sample, row))
        except SampleError as error:
            answers.append(error.with_traceback(None))
    return answers


BUFFERS = 2
"""Upload buffers of a CUDA device: one is copied to while the other is read."""

Reader = Callable[[torch.Tensor], torch.Tensor]
"""Makes numbers of pixels, uint8 of shape (rows, height, width, 3) on the device, and keeps none of their memory."""


class UploadBuffer:
    """Memory of a CUDA device for one batch, with what has to be over before it is used again.

    Attributes:
        copied: recorded behind the copies to it, on the stream that copies.
        was_read: recorded behind what reads it, on the stream that computes.
        rows: what is copied to it; held until `copied` was seen to be over.
    """

    def __init__(self) -> None:
        self.pixels = torch.empty(0, dtype=torch.uint8)
        self.copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.was_read: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.rows: Sequence[Row] = ()


class Uploader:
    """Brings batches of rows to one device.

    On CUDA each run of rows is one copy out of page-locked memory, on a stream of its own, so the images of a pass
    travel while the pass before is computed; there it is for one thread. The order is kept by events alone: a buffer is
    copied to once what read it is done, and read once the copies are done. The rows are held until the host has seen
    that.

    On a CPU nothing travels, and it is safe to use from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cuda":
            with using(device):
                self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._buffers = [UploadBuffer() for _ in range(BUFFERS)]

    def send(self, rows: Sequence[Row], read: Reader) -> torch.Tensor:
        """Upload one row or more, and apply `read` to their pixels on the device."""
        if self._device.type == "cuda":
            with using(self._device):
                return self._sent(rows, read)
        return read(gathered(rows).to(self._device))

    def _sent(self, rows: Sequence[Row], read: Reader) -> torch.Tensor:
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        buffer.copied.synchronize()  # long over: the rows of the batch before the last may go
        buffer.rows = rows
        computes = torch.cuda.current_stream()
        if len(buffer.pixels) < len(rows):
            shape = rows[0].slab.memory.shape[1:]
            buffer.pixels = torch.empty((len(rows), *shape), dtype=torch.uint8, device=self._device)
            self._stream.wait_stream(computes)  # which may still use what this memory was before
        self._stream.wait_event(buffer.was_read)
        with torch.cuda.stream(self._stream):
            at = 0
            try:
                for piece in runs(rows):
                    buffer.pixels[at : at + len(piece)].copy_(piece, non_blocking=True)
                    at += len(piece)
            finally:
                buffer.copied.record()
        computes.wait_event(buffer.copied)
        try:
            return read(buffer.pixels[: len(rows)])
        finally:  # a device that is too full may have begun a part of it
            buffer.was_read.record()
