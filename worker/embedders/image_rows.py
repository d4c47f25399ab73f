"""Images as a model reads them: rows of bytes on the host, batches of numbers on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.embedders.images import Picture
from worker.embedders.pixels import Normaliser, Pixels
from worker.embedders.preprocess import Preprocess

Row = torch.Tensor
"""One prepared image: uint8 of shape (height, width, 3), not yet normalised."""


class ImageRows:
    """Prepares images by one of the decode paths. Safe to use from any thread.

    Args:
        decode: one of `core.models.DECODES`.
        device: where batches are computed.
    """

    def __init__(self, preprocess: Preprocess, decode: str, device: torch.device) -> None:
        self._pixels = Pixels(preprocess, decode)
        self._normaliser = Normaliser(preprocess, device)
        self._device = device

    def row(self, picture: Picture) -> Row:
        """One image. Raises SampleError as `Pixels.into` does."""
        return torch.from_numpy(self._pixels.of(picture))

    def black(self) -> Row:
        """A black image, as an example."""
        return torch.zeros(self._pixels.shape, dtype=torch.uint8)

    def batch(self, rows: Sequence[Row], dtype: torch.dtype) -> torch.Tensor:
        """The normalised images on the device: `dtype` of shape (len(rows), 3, height, width)."""
        return self._normaliser(torch.stack(list(rows)).to(self._device), dtype)
