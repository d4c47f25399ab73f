"""Images as a model reads them: rows of bytes on the host, batches of numbers on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.models import GPU
from worker.embedders.device import using
from worker.embedders.gpu_decode import gpu_decoder
from worker.embedders.images import Picture
from worker.embedders.pixels import Normaliser, Pixels
from worker.embedders.preprocess import Preprocess
from worker.embedders.slabs import Row, Slabs
from worker.embedders.upload import Uploader


class ImageRows:
    """Prepares images by one of the decode paths. Safe to use from any thread, but for batches of a CUDA device.

    Args:
        decode: one of `core.models.DECODES`.
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
        self._slabs = Slabs(height, width, device)
        self._uploader = Uploader(device)
        self.row_bytes = self._slabs.row_bytes

    def look_ahead(self, pictures: Sequence[Picture]) -> None:
        """See `worker.embedders.pixels.Pixels.look_ahead`."""
        self._pixels.look_ahead(pictures)

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
