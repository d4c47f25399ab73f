"""Decides whether a worker process may take part in the build of an index."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from embq.core.errors import EmbqError
from embq.core.service.log import Events
from embq.core.storage.paths import is_inside, place
from embq.index.workers.builds import IndexBuild, read_nonce

LOOK_AGAIN_S = 2.0
PATIENCE_S = 10.0
"""A folder that was just made may not be seen at once through a network file system."""


class IndexAccess:
    """Decides for each build whether this process may take part, and logs once why it may not.

    Args:
        roots: folders and URLs that workers may read from or below; empty allows all.
    """

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots
        self._able: set[IndexBuild] = set()
        self._first_seen: dict[IndexBuild, float] = {}
        self._looked: dict[IndexBuild, float] = {}
        self._logged: set[IndexBuild] = set()
        self._log = Events("worker")

    def able(self, build: IndexBuild) -> bool:
        """Whether units of the build can be done here; checked again every `LOOK_AGAIN_S` if they cannot."""
        now = time.monotonic()
        if build in self._able:
            return True
        if now - self._looked.get(build, float("-inf")) < LOOK_AGAIN_S:
            return False
        self._looked[build] = now
        first = self._first_seen.setdefault(build, now)
        why, for_good = self._why_not(build)
        if not why:
            self._able.add(build)
            return True
        if build not in self._logged and (for_good or now - first > PATIENCE_S):
            self._logged.add(build)
            self._log.warning("index_refused", index=build.index, build=build.build, why=why)
        return False

    def _why_not(self, build: IndexBuild) -> tuple[str, bool]:
        """(reason or "", whether the reason is permanent)."""
        if importlib.util.find_spec("faiss") is None:
            return "faiss is not installed here: pip install 'embq[index]'", True
        if self._roots and not any(is_inside(build.index, root) for root in self._roots):
            return f"{build.index} is outside of EMBQ_ROOTS", True
        try:
            folder = place(build.folder)
            nonce = read_nonce(folder)
        except OSError as error:
            return f"{build.folder} cannot be read here: {error.strerror}; an index is built on shared storage", False
        except EmbqError as error:
            return f"{build.folder} cannot be read here: {error.message}", False
        if nonce != build.nonce:
            return f"{folder} is another folder here than where the index is built; mount the same storage", False
        if isinstance(folder, Path) and not os.access(folder, os.W_OK):
            return f"{folder} cannot be written here", False
        return "", False
