"""Simulates how open_clip splits shards over its processes, to tell whether an epoch has each sample once.

open_clip shuffles all shards in each epoch, deals them out to the processes, and each process deals out its own to its
loader workers. A reader, which is one loader worker of one process, gives the same number of full batches as every
other: it drops what does not fill one, and begins its shards again if it has too few (open_clip_train/data.py,
`get_wds_dataset` of 3.3). Where not one batch comes of them, it gives none (`DataPipeline.iterator` of webdataset).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from embq.core.errors import InputError

SUGGESTED = 4
"""Batch sizes that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Shards and their readers.

    Attributes:
        counts: samples of each shard.
        processes: of the training, on all hosts.
        loader_workers: of each process; 0 reads in the process itself.
        batch_size: of each process.
    """

    counts: Sequence[int]
    processes: int
    loader_workers: int
    batch_size: int

    @property
    def readers(self) -> int:
        """Readers of all processes."""
        return self.processes * max(1, self.loader_workers)

    @property
    def fewest(self) -> int:
        """Fewest samples of a reader in any epoch."""
        return sum(sorted(self.counts)[: len(self.counts) // self.readers])

    @property
    def is_even(self) -> bool:
        """True if all readers get equally many samples, whichever shards they get."""
        alike = len(set(self.counts)) == 1 and len(self.counts) % self.readers == 0
        return alike or self.readers == 1

    @property
    def is_exact(self) -> bool:
        """True if an epoch has each sample once."""
        return self.is_even and sum(self.counts) % (self.readers * self.batch_size) == 0

    def check(self) -> None:
        """InputError if open_clip would fail an assertion, or a reader would never fill a batch."""
        if len(self.counts) < self.readers:
            workers = len(self.counts) // self.processes
            fewer = f"--workers {workers or 1}"
            fewer += "" if workers else f" and at most --num-devices {len(self.counts)}"
            raise InputError(
                f"{len(self.counts)} shards are too few for {self._who}: each of them needs one",
                next_step=f"{fewer}; or --resampled; or more shards: `embq shards convert --samples-per-shard`",
            )
        if self.fewest < self.batch_size:
            smaller = f"--batch-size {self.fewest}, or " if self.fewest else ""
            raise InputError(
                f"{self._who} get as few as {self.fewest:,} samples, which never fill a batch of {self.batch_size:,}: "
                "open_clip would leave them out in silence, and wait for ever if other processes have more",
                next_step=f"{smaller}fewer --workers, or --resampled",
            )

    def check_exact(self) -> None:
        """InputError, with settings that would be exact, if an epoch is not."""
        if self.is_exact:
            return
        total = sum(self.counts)
        if not self.is_even:
            sizes = (
                f"{min(self.counts):,} to {max(self.counts):,}" if len(set(self.counts)) > 1 else f"{self.counts[0]:,}"
            )
            raise InputError(
                f"--exact: {len(self.counts)} shards of {sizes} samples cannot be dealt out evenly to {self._who}, and "
                "the assignment changes in every epoch",
                next_step=self._other_readers() or self._other_shards(),
            )
        each = total // self.readers
        raise InputError(
            f"--exact: each of {self._who} reads {each:,} samples, which batches of {self.batch_size:,} do not divide",
            next_step=f"--batch-size {_listed(_divisors_near(each, self.batch_size))}",
        )

    @property
    def _who(self) -> str:
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{self.readers} readers ({processes} with {self.loader_workers} loader workers each)"

    def _other_readers(self) -> str:
        """The most loader workers that share the shards evenly, with batch sizes; "" if none do."""
        for workers in range(self.loader_workers - 1, -1, -1):
            other = replace(self, loader_workers=workers)
            if other.is_even:
                sizes = _divisors_near(sum(self.counts) // other.readers, self.batch_size)
                return f"--workers {workers} --batch-size {_listed(sizes)}"
        return ""

    def _other_shards(self) -> str:
        total = sum(self.counts)
        if total % self.processes:
            return f"take fewer --num-devices, of which {total:,} samples are a multiple; or train without --exact"
        each = total // self.processes
        near = _divisors_near(each, max(1, round(total / len(self.counts))))
        return (
            f"convert to shards of {_listed(near)} samples (`embq shards convert --samples-per-shard`); then "
            f"--workers 1 --batch-size {_listed(_divisors_near(each, self.batch_size))} will do"
        )


def _divisors_near(number: int, target: int) -> list[int]:
    """Divisors of a number, nearest to the wanted one first."""
    return sorted(_divisors(number), key=lambda divisor: (abs(divisor - target), divisor))[:SUGGESTED]


def _divisors(number: int) -> Iterator[int]:
    for low in range(1, int(number**0.5) + 1):
        if number % low == 0:
            yield low
            if low != number // low:
                yield number // low


def _listed(numbers: Sequence[int]) -> str:
    *leading, last = sorted(numbers)
    return f"{', '.join(map(str, leading))} or {last}" if leading else str(last)
