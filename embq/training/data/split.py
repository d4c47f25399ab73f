"""The shards that each process and each of its loader workers reads, and seeds derived from names."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapreplace
from typing import Any

from torch.utils.data import get_worker_info


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed derived from `parts`, the same on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 1


def random_of(*parts: int | str) -> random.Random:
    """A random generator derived from `parts`."""
    return random.Random(seed_of(*parts))


DEALING = "by size"
"""Method of `dealt`, recorded because an epoch cannot be resumed by another one."""


def permuted(urls: Sequence[str], seed: int, epoch: int) -> list[str]:
    """The shards in the order of an epoch, the same for all processes."""
    order = list(urls)
    random_of("shards", seed, epoch).shuffle(order)
    return order


def stream_number(first: int, streams: int) -> int:
    """The stream that the calling loader worker reads.

    A loader asks its workers in turn, from worker 0 on. So that an epoch can go on in the middle of a turn, worker 0
    reads the stream `first`.
    """
    info = get_worker_info()
    return ((0 if info is None else info.id) + first) % streams


def dealt(urls: Sequence[str], parts: int, counts: Mapping[str, int]) -> list[list[str]]:
    """Split the shards into parts of nearly equal numbers of samples, each in the original order.

    The largest comes first, and each goes to the part that has least (Graham's rule for parallel machines, 1969: at
    most a third above the best there is). Shards of one size go round in turn.

    Args:
        counts: URL -> samples; of shards that are not in it nothing is known, and they count alike.
    """
    sizes = [counts.get(url, 1) for url in urls]
    loads = [(0, 0, part) for part in range(parts)]  # samples, shards, number
    hands: list[list[int]] = [[] for _ in loads]
    for place in sorted(range(len(urls)), key=lambda place: -sizes[place]):
        samples, shards, part = loads[0]
        hands[part].append(place)
        heapreplace(loads, (samples + sizes[place], shards + 1, part))
    return [[urls[place] for place in sorted(hand)] for hand in hands]


def own_stream(streams: Sequence[Sequence[str]], *, first: int) -> Iterator[dict[str, Any]]:
    """The shards of this loader worker's stream, as webdataset passes them on.

    webdataset's own splitters go by the environment (`RANK`, `WORKER`), in which other programs write too.
    """
    for url in streams[stream_number(first, len(streams))]:
        yield {"url": url}
