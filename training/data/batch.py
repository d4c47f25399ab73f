"""What a training step is given, and what became of the samples that it is not given."""

from __future__ import annotations

from dataclasses import dataclass

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
        images: float32 of shape (n, 3, image_size, image_size), normalised.
        labels: int64 of shape (n,).
        keys: of the samples, in order.
        shards: path or URL of the shard of each sample, in order.
        failed: what was dropped since the batch before.
        reached: (stream, items of it read until now), for `Taken`. A stream is what one loader worker reads.
        next_stream: which stream's turn it is after this batch; None at the end of an epoch, when all have ended.
    """

    images: torch.Tensor
    labels: torch.Tensor
    keys: list[str]
    shards: list[str]
    failed: tuple[Failure, ...]
    reached: tuple[tuple[int, int], ...]
    next_stream: int | None

    def __len__(self) -> int:
        return len(self.keys)
