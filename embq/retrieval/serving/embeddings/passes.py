"""Forms forward passes from the texts of many requests: texts of like length together, no request far behind others."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from embq.worker.embedders.base import Embedder, Prepared
from embq.worker.stages.batching import MemoryBudget, fitting

SORTED_PASSES = 32
"""Passes whose texts are sorted by length together."""

TURN_TEXTS = 16
"""Texts that are taken from a request before it is the next one's turn."""

PASS_OVERHEAD = 1 / 16
"""Cost of a pass beside that of its tokens, as a part of the token budget, beyond which a device gains nothing.

With 64 clients of a text each on 2 cores, budget 1,024, with padding: 1/64 gave 184 rows/s, 1/16 195, 1/8 195, 1/4 182,
and full passes 190. Without padding passes are full whatever this is.
"""

Owner = TypeVar("Owner")


class WaitingText(NamedTuple, Generic[Owner]):
    """A text that waits: `place` is that in the request that owns it, `tokens` as `Embedder.length` says."""

    owner: Owner
    place: int
    prepared: Prepared
    tokens: int


Batch = Sequence[WaitingText[Owner]]
"""The texts of one forward pass, longest first."""


class Passes(Generic[Owner]):
    """Gathers texts, and forms passes in sweeps from the longest text to the shortest. For one thread.

    A text that comes during a sweep and is shorter than those of the pass before is taken up by it, others by the next
    sweep. So there is as little padding as in a sorted window of twice as many texts as wait: the windows of workers
    (`embq.worker.stages.batching`), simulated with docstrings, gave 64 clients of a text each 14 % fewer rows/s, 16
    such clients 28 %, and 64 clients of 8 texts 4 %.

    Attributes:
        room: budget of a pass; it is updated by the code that runs the passes.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.room = MemoryBudget(embedder.token_budget)
        self._requests: deque[Iterator[WaitingText[Owner]]] = deque()
        self._sorted: list[tuple[int, int, WaitingText[Owner]]] = []  # minus its sweep, its tokens
        self._to_repeat: list[Batch[Owner]] = []
        self._texts = self._tokens = 0
        self._sorted_tokens = 0
        self._sweep, self._below = 0, 0

    def __len__(self) -> int:
        return self._texts + len(self._to_repeat)

    @property
    def has_full(self) -> bool:
        """Whether what waits fills a pass."""
        embedder = self._embedder
        return bool(self._to_repeat) or self._texts >= embedder.batch_size or 0 < embedder.token_budget <= self._tokens

    def add(self, owner: Owner, prepared: Sequence[Prepared]) -> None:
        """Let the texts of a request wait."""
        entries = [WaitingText(owner, place, text, self._embedder.length(text)) for place, text in enumerate(prepared)]
        self._requests.append(iter(entries))
        self._texts += len(entries)
        self._tokens += sum(entry.tokens for entry in entries)

    def repeat(self, batches: Sequence[Batch[Owner]]) -> None:
        """Let these be the next passes, in this order."""
        self._to_repeat += reversed(batches)

    def next(self) -> Batch[Owner]:
        """The next pass, of at least one text; only if something waits."""
        if self._to_repeat:
            return self._to_repeat.pop()
        self._sort_further()
        self._sweep = -self._sorted[-1][0]
        first = bisect.bisect_left(self._sorted, -self._sweep, key=lambda item: item[0])
        window = [entry for *_, entry in self._sorted[: first - 1 if first else None : -1][: self._embedder.batch_size]]
        lengths = [entry.tokens for entry in window]
        batch = window[: self._worthwhile(lengths[: fitting(lengths, self.room.tokens, self._embedder.cost)])]
        del self._sorted[-len(batch) :]
        tokens = sum(entry.tokens for entry in batch)
        self._texts, self._tokens = self._texts - len(batch), self._tokens - tokens
        self._sorted_tokens -= tokens
        self._below = batch[-1].tokens
        return batch

    def _worthwhile(self, lengths: Sequence[int]) -> int:
        """The number of texts, longest first, for which a pass costs least per token: few waste little on padding.

        A pass costs its tokens, and as much as `PASS_OVERHEAD` of a full one.
        """
        overhead, cost = self._embedder.token_budget * PASS_OVERHEAD, self._embedder.cost
        tokens = list(itertools.accumulate(lengths))
        # Within texts of one length the price only rises or only falls: a pass ends behind the last of them.
        ends = itertools.accumulate(sum(1 for _ in alike) for _, alike in itertools.groupby(lengths))
        return min(ends, key=lambda count: ((cost(lengths[:count]) + overhead) / tokens[count - 1], -count))

    def _sort_further(self) -> None:
        budget = self._embedder.token_budget
        while self._requests and (
            len(self._sorted) < self._embedder.batch_size or self._sorted_tokens < SORTED_PASSES * budget
        ):
            request = self._requests.popleft()
            for entry in (taken := list(itertools.islice(request, TURN_TEXTS))):
                sweep = self._sweep if entry.tokens < self._below else self._sweep + 1
                # Before those of equal length, which have waited for longer.
                bisect.insort_left(self._sorted, (-sweep, entry.tokens, entry), key=lambda item: item[:2])
                self._sorted_tokens += entry.tokens
            if len(taken) == TURN_TEXTS:
                self._requests.append(request)
