"""Upload of decoded images as bytes; the device converts and normalises them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from embq.core.models import GPU
from embq.worker.embedders.device.errors import using
from embq.worker.embedders.image.buffer_pool import Row, SlabPool, gathered, runs
from embq.worker.embedders.image.decoding import Picture
from embq.worker.embedders.image.gpu_decode import gpu_decoder
from embq.worker.embedders.image.pixels import Normaliser, Pixels
from embq.worker.embedders.image.preprocess import Preprocess


class ImageBatcher:
    """Prepares images by one of the decode paths. Safe to use from any thread, but for batches of a CUDA device.

    Args:
        decode: one of `embq.core.models.DECODES`.
        device: where batches are computed.

    Attributes:
        device: that one.
        row_bytes: of a prepared image.

    Raises ModelError where the path is not for this device, or lacks what it needs.
    """

    def __init__(self, preprocess: Preprocess, decode: str, device: torch.device) -> None:
        self.device = device
        self._pixels = Pixels(preprocess, decode, gpu_decoder(device) if decode == GPU else None)
        with using(device):
            self._normaliser = Normaliser(preprocess, device)
        height, width, _ = self._pixels.shape
        self._slabs = SlabPool(height, width, device)
        self._uploader = Uploader(device)
        self.row_bytes = self._slabs.row_bytes

    def decode_ahead(self, pictures: Sequence[Picture]) -> None:
        """See `embq.worker.embedders.image.pixels.Pixels.decode_ahead`."""
        self._pixels.decode_ahead(pictures)

    def row(self, picture: Picture) -> Row:
        """One image, uint8 of shape (height, width, 3), not normalised. Raises SampleError as `Pixels.into` does."""
        return self._slabs.fill(lambda row: self._pixels.into(picture, row))

    def black(self) -> Row:
        """A black image, as an example."""
        return self._slabs.fill(lambda row: row.fill(0))

    def noise(self) -> Row:
        """An image of which no two pixels are alike, as an example."""
        return self._slabs.fill(lambda row: torch.from_numpy(row).random_())

    def batch(self, rows: Sequence[Row], dtype: torch.dtype) -> torch.Tensor:
        """The normalised images on the device: `dtype` of shape (len(rows), 3, height, width)."""
        return self._uploader.send(rows, lambda pixels: self._normaliser(pixels, dtype))


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
