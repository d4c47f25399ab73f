"""How far a process is in its epoch, so that a later process can go on at the very next batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from training.data.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What of one process's epoch has been taken.

    It fits an epoch of the same shards, the same view and the same number only: with other ones, begin the epoch anew.

    Attributes:
        batches: so many.
        samples: in them.
        failed: samples that failed on the way to them.
        reached: for each stream, how many of its places need not be read again.
        next_stream: whose turn it is.
    """

    batches: int = 0
    samples: int = 0
    failed: int = 0
    reached: tuple[int, ...] = ()
    next_stream: int = 0

    def after(self, batch: Batch) -> Taken:
        """What is taken once a step has been made of `batch`."""
        reached = dict(enumerate(self.reached)) | dict(batch.reached)
        return Taken(
            batches=self.batches + 1,
            samples=self.samples + len(batch),
            failed=self.failed + sum(failure.samples for failure in batch.failed),
            reached=tuple(reached.get(stream, 0) for stream in range(max(reached, default=-1) + 1)),
            next_stream=self.next_stream if batch.next_stream is None else batch.next_stream,
        )

    def of(self, stream: int) -> int:
        """How many places of a stream are taken."""
        return self.reached[stream] if stream < len(self.reached) else 0

    def to_json(self) -> dict[str, Any]:
        """As what JSON can hold."""
        return asdict(self)

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Taken:
        """The inverse of `to_json`, also after a trip through JSON text."""
        return Taken(**{**told, "reached": tuple(told["reached"])})


NOTHING = Taken()
