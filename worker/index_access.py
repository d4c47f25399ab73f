"""Whether this machine can do index units: it sees the index's folder, may write there, and has faiss."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from core.queue.index_builds import SHARED, IndexBuild
from core.service.log import Events

LOOK_AGAIN_S = 2.0
PATIENCE_S = 10.0
"""A folder that was just made may not be seen at once through a network file system."""


class IndexAccess:
    """Says of each build whether this process may take part, and logs once why it may not.

    Args:
        roots: folders that workers may read from or below; empty allows all.
    """

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = [Path(root) for root in roots if "://" not in root]
        self._restricted = bool(roots)
        self._able: set[IndexBuild] = set()
        self._first_seen: dict[IndexBuild, float] = {}
        self._looked: dict[IndexBuild, float] = {}
        self._told: set[IndexBuild] = set()
        self._log = Events("worker")

    def able(self, build: IndexBuild) -> bool:
        """Whether units of the build can be done here; looked at again from time to time where they cannot."""
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
        if build not in self._told and (for_good or now - first > PATIENCE_S):
            self._told.add(build)
            self._log.warning("index_refused", index=build.index, build=build.build, why=why)
        return False

    def _why_not(self, build: IndexBuild) -> tuple[str, bool]:
        """Why not, and whether time will not mend it; "" where the build can be served."""
        if importlib.util.find_spec("faiss") is None:
            return "faiss is not installed here: pip install 'embq[index]'", True
        folder = Path(build.folder)
        if self._restricted and not any(Path(build.index).is_relative_to(root) for root in self._roots):
            return f"{build.index} is outside of EMBQ_ROOTS", True
        try:
            nonce = (folder / SHARED).read_text(encoding="utf-8").strip()
        except OSError as error:
            return f"{folder} cannot be read here: {error.strerror}; an index is built on shared storage", False
        if nonce != build.nonce:
            return f"{folder} is another folder here than where the index is built; mount the same storage", False
        if not os.access(folder, os.W_OK):
            return f"{folder} cannot be written here", False
        return "", False
