"""What a training step is given, and what became of the samples that it is not given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Samples that no step is given.

    Attributes:
        shard: path or URL of the shard.
        key: of the sample; "" where the shard as a whole is meant.
        code: why, as docs/operations.md lists it.
        message: what is the matter, for people.
        samples: how many samples it stands for: those that a damaged shard lacks by its sizes.json, 1 where nobody
            knows; 0 where nothing is lost.
    """

    shard: str
    key: str
    code: str
    message: str
    samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step, and what failed on the way to them.

    A batch without samples comes only as the last of an epoch of which nothing else is left but failures: it is for the
    account, take no step on it.

    Attributes:
        pixels: uint8 of shape (n, 3, image_size, image_size), channels last in memory.
        mean, std: as in `View`; the pictures are normalised with them.
        labels: int64 of shape (n,).
        keys: of the samples, in order.
        shards: path or URL of the shard of each sample, in order.
        failed: what was dropped since the batch before.
        reached: (stream, places of it read until now), for `Taken`. A stream is what one loader worker reads.
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
        """float32 of shape (n, 3, image_size, image_size), normalised, in memory of its own; made at each call."""
        return self.images_on(torch.device("cpu"))

    def images_on(self, device: torch.device) -> torch.Tensor:
        """`images` on a device, which normalises by itself, so that a quarter of the bytes goes there.

        Channels stay last in memory on a GPU, whose convolutions want them there, and come first on a CPU.
        """
        order = torch.contiguous_format if device.type == "cpu" else torch.preserve_format
        images = self.pixels.to(device, non_blocking=True).to(torch.float32, memory_format=order)
        return images.sub_(_channels(self.mean, device)).div_(_channels(self.std, device))


@cache
def _channels(values: tuple[float, float, float], device: torch.device) -> torch.Tensor:
    """Of 0 to 1 per channel, for pixels of 0 to 255. Made once: to send it there waits for all that the device does."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device).view(1, 3, 1, 1) * 255
