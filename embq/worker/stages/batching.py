"""Forms forward passes from waiting samples: texts of similar length together, each pass within the device's memory.

Samples are gathered to a window, which is sorted by length and cut into forward passes, longest first. The longer the
window, the less padding; the shorter it is, the less work a slow device holds. So it is bounded by samples, and by the
seconds that the device needs for it at the speed that was measured.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from embq.core.units import Sample
from embq.worker.claim.lease import LeasedUnit
from embq.worker.embedders.base import Cost, Embedder, Prepared
from embq.worker.meter.meter import Throughput

WINDOW_S = 8.0
"""Most seconds of work in a window; as much waits behind it. On a CPU with a small model these are 1,000 texts."""

BATCHES_AHEAD = 4
"""Passes that wait behind the window, at least if that is less than `WINDOW_S`: they ride out a slow file."""

THREAD_SAMPLES = 64
"""Samples for each thread that prepares, at least if that is less than `WINDOW_S`: two chunks, one in hand and one
to go on with. Many cores before small passes would else wait for each other."""


@dataclass
class Batch:
    """Samples that wait for the device, or those of one forward pass, longest first; of each an item in every list.

    Lists, because an object for each sample would take longer to make than all that is done with it.

    Attributes:
        tokens: lengths of the samples, as `Embedder.length` says.
    """

    leases: Sequence[LeasedUnit] = ()
    samples: Sequence[Sample] = ()
    prepared: Sequence[Prepared] = ()
    tokens: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int | None = None) -> Batch:
        """Samples in a row."""
        return Batch(
            self.leases[start:stop], self.samples[start:stop], self.prepared[start:stop], self.tokens[start:stop]
        )

    def chosen(self, places: Sequence[int]) -> Batch:
        """Samples in another order, or some of them."""
        if len(places) < 2:  # of one place, `itemgetter` returns no tuple
            return self.part(places[0], places[0] + 1) if places else Batch()
        pick = itemgetter(*places)
        return Batch(pick(self.leases), pick(self.samples), pick(self.prepared), pick(self.tokens))

    @cached_property
    def by_unit(self) -> dict[LeasedUnit, Sequence[int]]:
        """Places of the samples of each unit, ascending."""
        if self.leases and self.leases.count(self.leases[0]) == len(self):  # as most of the time
            return {self.leases[0]: range(len(self))}
        by_lease: dict[LeasedUnit, list[int]] = {}
        for place, lease in enumerate(self.leases):
            by_lease.setdefault(lease, []).append(place)
        return dict(by_lease)


def joined(batches: Sequence[Batch]) -> Batch:
    """The samples of all in a row."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        [lease for batch in batches for lease in batch.leases],
        [sample for batch in batches for sample in batch.samples],
        [prepared for batch in batches for prepared in batch.prepared],
        [tokens for batch in batches for tokens in batch.tokens],
    )


class Batcher:
    """Gathers samples and forms forward passes from them. For one thread.

    Args:
        embedder: says how many samples and tokens suit a pass, what a pass costs, and how many samples suit a window.
        throughput: how fast this worker has been.
        threads: that prepare samples.

    Attributes:
        room: budget of a pass; it is updated by the code that runs the passes.
    """

    def __init__(self, embedder: Embedder, throughput: Throughput, *, threads: int = 1) -> None:
        self._embedder = embedder
        self._threads = threads
        self._throughput = throughput
        self._waiting: list[Batch] = []
        self._count = self._tokens = 0
        self._to_repeat: list[Batch] = []
        self.room = MemoryBudget(embedder.token_budget)

    def __len__(self) -> int:
        return self._count + sum(len(batch) for batch in self._to_repeat)

    def add(self, samples: Batch) -> None:
        """Let samples wait."""
        self._waiting.append(samples)
        self._count += len(samples)
        self._tokens += sum(samples.tokens)

    def drop(self, lease: LeasedUnit) -> None:
        """Forget what waits of a unit."""
        self._wait_only(without(batch, {lease}) for batch in self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether a window waits: more would gain little, or be too much for a slow device."""
        return self._window() > 0

    @property
    def samples_ahead(self) -> int:
        """Number of samples that should wait behind the window."""
        embedder = self._embedder
        rows_per_s = self._throughput.rows_per_s
        if rows_per_s is None:
            return BATCHES_AHEAD * embedder.batch_size
        most = max(embedder.window, BATCHES_AHEAD * embedder.batch_size, THREAD_SAMPLES * self._threads)
        return max(embedder.batch_size, min(most, int(rows_per_s * WINDOW_S)))

    def batches(self) -> Iterator[Batch]:
        """The forward passes of the next window, or of all that waits if that is less."""
        count = self._window() or self._count
        every = joined(self._waiting)
        taken = every.part(0, count)
        self._wait_only([every.part(count)])
        if taken and taken.tokens.count(taken.tokens[0]) < len(taken):
            # Those of one length stay in the order in which they came.
            taken = taken.chosen(sorted(range(len(taken)), key=taken.tokens.__getitem__, reverse=True))
        start = 0
        while self._to_repeat or start < len(taken):
            if self._to_repeat:
                yield self._to_repeat.pop()
                continue
            batch = self._within_budget(taken.part(start, start + self._embedder.batch_size))
            yield batch
            start += len(batch)

    def repeat(self, batches: Sequence[Batch]) -> None:
        """Let these be the next forward passes, in this order."""
        self._to_repeat += reversed(batches)

    def is_whole(self, batch: Batch) -> bool:
        """Whether a pass was at least half of what suits the device, in samples or in tokens."""
        embedder = self._embedder
        if 2 * len(batch) >= embedder.batch_size:
            return True
        return 0 < self.room.tokens <= 2 * embedder.cost(batch.tokens)

    def _wait_only(self, batches: Iterable[Batch]) -> None:
        self._waiting = [batch for batch in batches if batch]
        self._count = sum(map(len, self._waiting))
        self._tokens = sum(sum(batch.tokens) for batch in self._waiting)

    def _window(self) -> int:
        """Number of waiting samples that form a window; 0 if they are too few."""
        embedder = self._embedder
        most = max(embedder.window, embedder.batch_size)
        if not embedder.token_budget:
            return most if self._count >= most else 0
        tokens = max(embedder.token_budget, (self._throughput.tokens_per_s or 0.0) * WINDOW_S)
        if self._count < most and self._tokens < tokens:
            return 0
        totals = itertools.accumulate(itertools.chain.from_iterable(batch.tokens for batch in self._waiting))
        enough = (count for count, total in enumerate(totals, 1) if count == most or total >= tokens)
        return next(enough)

    def _within_budget(self, batch: Batch) -> Batch:
        """The first samples, as many as there is room for, at least one."""
        return batch.part(0, fitting(batch.tokens, self.room.tokens, self._embedder.cost))


def without(batch: Batch, leases: Set[LeasedUnit]) -> Batch:
    """The samples that are not of these units."""
    return batch.chosen([place for place, lease in enumerate(batch.leases) if lease not in leases])


def fitting(lengths: Sequence[int], budget: int, cost: Cost) -> int:
    """The number of the first of these samples that cost no more than a budget together, at least 1."""
    # A sample more never costs less, so the last that fits is found by halving.
    counts = range(1, len(lengths) + 1)
    return max(1, bisect.bisect_right(counts, budget, key=lambda count: cost(lengths[:count])))


SHRINK = 0.75
"""Factor of the budget after a pass that did not fit; that pass itself is done in halves."""


GROWTH, CLEAN_PASSES = 1.1, 100
"""The budget grows by this factor after this many passes that fit: at worst, one pass of a hundred is tried in vain."""


UNBOUNDED = sys.maxsize


class MemoryBudget:
    """The budget of a forward pass in padded tokens.

    Args:
        most: what it starts with and grows back to; 0 if only samples bound a pass.

    Attributes:
        tokens: what it is now; `UNBOUNDED` if nothing bounds it.
    """

    def __init__(self, most: int) -> None:
        self._start = most or UNBOUNDED
        self._most = self._start
        self.tokens = self._start
        self._clean = 0

    def was_too_small(self, tokens: int) -> None:
        """A pass of `tokens` padded tokens did not fit."""
        if self.tokens == UNBOUNDED:
            self._most = tokens
        self.tokens = max(1, int(SHRINK * min(self.tokens, tokens)))
        self._clean = 0

    def was_enough(self) -> bool:
        """A pass fitted. Gives True if the budget is now what it was before anything did not fit."""
        if self.tokens == self._start:
            return False
        self._clean += 1
        if self._clean < CLEAN_PASSES:
            return False
        self._clean = 0
        self.tokens = min(self._most, math.ceil(GROWTH * self.tokens))
        if self.tokens >= self._most:
            self.tokens = self._start
        return self.tokens == self._start
