"""Estimate of the tokens that are left of a run, learned from its finished units.

The tokens of a unit are unknown before it was embedded, but planning knows its samples and bytes. Their cost in tokens
is fitted for each kind of input: bytes distinguish long texts from short ones, so that inputs sorted by length,
or a large file after small ones, do not mislead; samples have a cost beside their text, such as special tokens, or the
names of fields in a line of JSON, which cost nothing.
"""

from __future__ import annotations

import math

from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.manifest import Manifest
from embq.core.run.unit_sizes import UnitSize

DOUBT, DOUBT_TOKENS = 0.5, 5.0
"""Tokens are in proportion to bytes, give or take this share and this many tokens a sample, whichever is less, until
units that are done say something else. How fast they do depends on how well their tokens follow from their bytes. What
a sample costs beside its bytes is little, and long texts hardly tell it: a line through them that goes on to short
ones could end anywhere."""
LEAST_EXAMPLES = 5
"""Fewer lie on a line by chance."""
LEAST_EXPLAINED = 0.5
REMEMBERED = 50
"""Records that a writer learns from which goes on with a run: enough to learn from, and few to read."""


class TokenEstimate:
    """The units of a run that are not committed.

    Attributes:
        remaining: kind of input -> what they hold together.
    """

    def __init__(self) -> None:
        self._fits: dict[str, _Fit] = {}
        self.remaining: dict[str, UnitSize] = {}

    def count(self, manifest: Manifest, state: LogState) -> None:
        """Take what is left from the manifest, also when it has grown."""
        self.remaining = manifest.sizes_left(bytes(state.done))

    def remember(self, manifest: Manifest, log: CommitLog, state: LogState) -> None:
        """Learn from the last records of a run that was begun before."""
        for commit in log.read(after=max(0, state.n - REMEMBERED)):
            for unit in commit.units:
                self.learn(manifest.unit_size(unit.u), unit.tokens)

    def committed(self, extent: UnitSize, tokens: int) -> None:
        """A unit is done, and had `tokens` tokens; 0 if that is not known."""
        self.remaining[extent.kind] -= extent
        self.learn(extent, tokens)

    def learn(self, extent: UnitSize, tokens: int) -> None:
        """Take what a unit cost as an example; one of 0 tokens says nothing."""
        if tokens:
            self._fits.setdefault(extent.kind, _Fit()).add(extent, tokens)

    @property
    def tokens_left(self) -> int | None:
        """Tokens of the units that are not committed; None before anything is known."""
        if not self._fits:
            return None
        samples = sum(fit.samples for fit in self._fits.values())
        of_each = sum(fit.tokens for fit in self._fits.values()) / samples
        return round(
            sum(
                self._fits[kind].tokens_of(extent) if kind in self._fits else of_each * extent.samples
                for kind, extent in self.remaining.items()
            )
        )


class _Fit:
    """Least squares of the mean tokens of a unit's samples by their mean bytes, weighted by their number."""

    def __init__(self) -> None:
        self.samples = self.tokens = 0
        self._examples = self._bytes = 0
        self._bytes_squared = self._tokens_squared = self._products = 0.0

    def add(self, extent: UnitSize, tokens: int) -> None:
        self._examples += 1
        self.samples += extent.samples
        self.tokens += tokens
        self._bytes += extent.bytes
        self._bytes_squared += extent.bytes**2 / extent.samples
        self._tokens_squared += tokens**2 / extent.samples
        self._products += extent.bytes * tokens / extent.samples

    def tokens_of(self, extent: UnitSize) -> float:
        """About how many tokens some units have together."""
        of_byte = self._of_byte()
        of_sample = (self.tokens - of_byte * self._bytes) / self.samples
        return max(0.0, of_sample * extent.samples + of_byte * extent.bytes)

    def _of_byte(self) -> float:
        """Tokens that one more byte brings: the slope, which tends to that of a line through 0 while it is in doubt."""
        if not self._bytes:
            return 0.0
        in_proportion = self.tokens / self._bytes
        spread = self._bytes_squared - self._bytes**2 / self.samples
        if self._examples < LEAST_EXAMPLES or spread < 1e-9 * self._bytes_squared:  # of lengths that are all the same
            return in_proportion
        together = max(0.0, self._products - self._bytes * self.tokens / self.samples)
        varies = self._tokens_squared - self.tokens**2 / self.samples
        if varies <= 0.0:
            return 0.0
        explained = min(1.0, together**2 / spread / varies)
        # A unit of which planning knows no samples counts as one, and may have any number.
        is_counted = self.samples > self._examples
        doubt = min(DOUBT, DOUBT_TOKENS * self.samples / self.tokens) if is_counted else DOUBT
        noise = (1.0 - explained) * varies / (self._examples - 2) / (doubt * in_proportion) ** 2
        # Texts of as many tokens differ in bytes as well, which flattens a line of least squares. The one in the middle
        # between those of both directions is steeper; where the two hardly go together, it would be too steep.
        steeper = together / math.sqrt(max(explained, LEAST_EXPLAINED))
        return (steeper + noise * in_proportion) / (spread + noise)
