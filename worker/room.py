"""How much a forward pass may hold, as the device has shown: less after it was full, and again more after a while."""

from __future__ import annotations

import math
import sys

SHRINK = 0.75
"""What is left of the budget when a pass did not fit; that pass itself is done in halves."""

GROWTH, CLEAN_PASSES = 1.1, 100
"""The budget grows by so much after so many passes that fitted: at worst, one pass of a hundred is tried in vain."""


UNBOUNDED = sys.maxsize


class Room:
    """The budget of a forward pass in padded tokens.

    Args:
        most: what it starts with and grows back to; 0 where only samples bound a pass.

    Attributes:
        tokens: what it is now; `UNBOUNDED` where nothing bounds it.
    """

    def __init__(self, most: int) -> None:
        self._start = most or UNBOUNDED
        self._most = self._start
        self.tokens = self._start
        self._clean = 0

    def was_too_small(self, tokens: int) -> None:
        """A pass of so many padded tokens did not fit."""
        if self.tokens == UNBOUNDED:
            self._most = tokens
        self.tokens = max(1, int(SHRINK * min(self.tokens, tokens)))
        self._clean = 0

    def was_enough(self) -> bool:
        """A pass fitted. Gives True where the budget is now what it was before anything did not fit."""
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
