"""A queue between two stages, bounded by what its items weigh: one may be a caption, another a shard of rows."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BoundedQueue(Generic[Item]):
    """First in, first out. Each item takes a share of the room, 1.0 being all of it; a larger one passes alone."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._waiting: deque[tuple[Item, float]] = deque()
        self._changed = threading.Condition()

    def put(self, item: Item, share: float, timeout_s: float) -> bool:
        """Append an item; False where there was no room within `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._waiting or self._taken + share <= 1.0, timeout_s):
                return False
            self._waiting.append((item, share))
            self._taken += share
            self._changed.notify_all()
            return True

    def waiting(self) -> list[Item]:
        """The items, first one first."""
        with self._changed:
            return [item for item, _ in self._waiting]

    def get(self, timeout_s: float) -> Item | None:
        """The first item; None where none came within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._waiting:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            item, share = self._waiting.popleft()
            # Rounding must not add up over millions of items.
            self._taken = self._taken - share if self._waiting else 0.0
            self._changed.notify_all()
            return item
