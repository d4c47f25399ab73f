"""How fast the device of this process has been."""

from __future__ import annotations

KEPT = 0.8
"""Share that one measurement leaves of those before it: some ten of them count."""


class Pace:
    """Samples and tokens per second, of late. One thread measures, any thread may ask.

    Attributes:
        samples_per_s, tokens_per_s: 0.0 until something was measured.
    """

    def __init__(self) -> None:
        self._samples = self._tokens = self._seconds = 0.0
        self.samples_per_s = self.tokens_per_s = 0.0

    def measured(self, *, samples: int, tokens: int, seconds: float) -> None:
        """Take note of a window's work."""
        self._samples = KEPT * self._samples + samples
        self._tokens = KEPT * self._tokens + tokens
        self._seconds = KEPT * self._seconds + seconds
        if self._seconds > 0:
            self.samples_per_s, self.tokens_per_s = self._samples / self._seconds, self._tokens / self._seconds
