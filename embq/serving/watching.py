"""Looks after the indices while they are served: new versions, and new indices below folders that are followed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from core.errors import EmbqError
from core.service.log import Events
from embq.serving.following import Following
from embq.serving.indices import Indices
from embq.serving.served_index import ServedIndex

LOOK_S = 1.0
"""Between looks at CURRENT: one stat of one small file."""

RETRY_S = 10.0
"""After a version could not be opened: to open one may mean to read all of it."""

_log = Events("serve")


class Watcher:
    """Takes up new versions of all indices, in a thread of its own.

    Args:
        tell: called with an index and "done" or "failed" when there was a new version.
        following: looked at as well; None where no folder is followed.
    """

    def __init__(
        self,
        indices: Indices,
        tell: Callable[[ServedIndex, str], None],
        following: Following | None = None,
        every_s: float = LOOK_S,
    ) -> None:
        self._indices, self._tell, self._following, self._every_s = indices, tell, following, every_s
        self._not_before: dict[ServedIndex, float] = {}
        self._counted: set[ServedIndex] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns when the last look is over."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            if self._following is not None:
                try:
                    self._following.look_when_due()
                except Exception:  # noqa: BLE001 - a folder that embq has a bug with must not end the watch
                    _log.bug("bug")
            for index in self._indices.all:
                if time.monotonic() >= self._not_before.get(index, 0.0):
                    self._look(index)
            served = set(self._indices.all)
            self._counted &= served
            self._not_before = {index: at for index, at in self._not_before.items() if index in served}
            if self._stopped.wait(self._every_s):
                return

    def _look(self, index: ServedIndex) -> None:
        try:
            if index.refresh():
                self._tell(index, "done")
                self._counted.discard(index)
            if index not in self._counted:
                self._counted.add(index)
                index.count()
        except (EmbqError, OSError):
            self._failed(index)
        except Exception:  # noqa: BLE001 - one version that embq has a bug with must not end the watch
            _log.bug("bug", index=index.name)
            self._failed(index)

    def _failed(self, index: ServedIndex) -> None:
        self._not_before[index] = time.monotonic() + RETRY_S
        self._tell(index, "failed")
