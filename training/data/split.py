"""Which shards a process and each of its loader workers read, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import get_worker_info

from training.data.seeds import random_of


def permuted(urls: Sequence[str], seed: int, epoch: int) -> list[str]:
    """The shards in the order of an epoch, the same for all processes."""
    order = list(urls)
    random_of("shards", seed, epoch).shuffle(order)
    return order


def stream_number(first: int, streams: int) -> int:
    """Which of its process's streams the loader worker reads in which this is called.

    A loader asks its workers in turn, from worker 0 on. So that an epoch can go on in the middle of a turn, worker 0
    reads the stream `first`.
    """
    info = get_worker_info()
    return ((0 if info is None else info.id) + first) % streams


def own_part(
    sources: Iterable[dict[str, Any]], *, rank: int, world: int, first: int, streams: int
) -> Iterator[dict[str, Any]]:
    """Of shards that all processes see in one order, those of this process and this loader worker.

    webdataset's own splitters do the same by the environment (`RANK`, `WORKER`), in which other programs write too.
    """
    ours = islice(sources, rank, None, world)
    return islice(ours, stream_number(first, streams), None, streams)
