"""Thumbnails on disk, bounded in bytes: those that were used longest ago are evicted.

```
CACHE/thumbnails/ab/abcdef...   a JPEG, named by the hash of what it is of; its time is that of the last use
```

Several servers share the folder. Each counts what it writes, and looks at the whole folder before it evicts.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from embq.core.service.log import Events

THUMBNAIL_MAX_BYTES = 1 << 20
"""A JPEG of 320x320 pixels has at most a third of that."""

KEPT_SHARE = 0.9
"""Share of the bound that an eviction leaves, so that the next one is not due at once."""

LOOK_WRITES = 5_000
"""Thumbnails written between two looks at the folder: other servers write there as well."""

LEFTOVER_S = 3600.0
"""Age at which an unfinished file belongs to a process that was killed."""

_log = Events("serve")


class ThumbnailCache:
    """Thread-safe.

    Args:
        most_bytes: of all thumbnails together.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._lock = threading.Lock()
        self._bytes, self._writes = 0, LOOK_WRITES
        self._reported = False

    def get(self, name: str) -> bytes | None:
        """The thumbnail of a name of hex digits; None if there is none, or a damaged one."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                data = file.read(THUMBNAIL_MAX_BYTES + 1)
            os.utime(path)
        except OSError:
            return None
        # A power cut can leave a file of its length without its content.
        is_complete = data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")
        return data if is_complete and len(data) <= THUMBNAIL_MAX_BYTES else None

    def put(self, name: str, data: bytes) -> None:
        """Keep a thumbnail; a folder that cannot be written is reported once."""
        if len(data) > THUMBNAIL_MAX_BYTES:
            return
        path = self._path(name)
        temporary = path.with_name(f".{name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._reported:
                self._reported = True
                _log.warning("thumbnails_not_cached", folder=str(self.folder), why=error.strerror or str(error))
            return
        with self._lock:
            self._bytes += len(data)
            self._writes += 1
            if self._bytes > self.most_bytes or self._writes > LOOK_WRITES:
                self._evict()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _evict(self) -> None:
        """Count what is there, and if that is too much remove the thumbnails that were used longest ago."""
        thumbnails: list[tuple[float, int, str]] = []
        for folder, _, names in os.walk(self.folder):
            for name in names if len(os.path.basename(folder)) == 2 else ():
                path = os.path.join(folder, name)
                with suppress(OSError):
                    status = os.lstat(path)
                    if not name.startswith("."):
                        thumbnails.append((status.st_mtime, status.st_size, path))
                    elif status.st_mtime < time.time() - LEFTOVER_S:
                        os.unlink(path)
        self._bytes, self._writes = sum(size for _, size, _ in thumbnails), 0
        if self._bytes <= self.most_bytes:
            return
        for _, size, path in sorted(thumbnails):
            if self._bytes <= KEPT_SHARE * self.most_bytes:
                return
            with suppress(OSError):
                os.unlink(path)
            self._bytes -= size
