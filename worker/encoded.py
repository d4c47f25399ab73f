"""How many bytes of encoded images wait for the threads that decode them."""

from __future__ import annotations

import threading


class EncodedAhead:
    """Room for encoded images between the reader and the threads that decode them. Safe to use from any thread.

    What is decoded is far smaller than what it was read as, or the other way round, so each is bounded for itself.

    Args:
        most_bytes: more do not wait, but for a single chunk that is larger.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait, or are being decoded."""
        with self._changed:
            return self._held

    def take(self, size: int) -> None:
        """Wait until there is room for so many bytes, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._most_bytes)
            self._held += size

    def give_back(self, size: int) -> None:
        """What took so many bytes is decoded, or never will be."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()
