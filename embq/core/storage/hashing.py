"""SHA-256 computed in a thread beside the reading or writing of a file."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from embq.core.storage import beneath
from embq.core.storage.durable import begin_sync

STEP_BYTES = 1 << 20
"""Read at once, and hashed while the next is read."""

MOST_PENDING = 2
"""Written pieces that wait to be hashed: enough that writing need not wait, and few enough to hold in memory."""

BEHIND_BYTES = 8 << 20
"""Written before the disk is asked to take them: while the next are written, and not all in the fsync at the end."""

_BESIDE = ThreadPoolExecutor(1, thread_name_prefix="hashing")
"""One for both: the writer reads results and writes parts one after the other."""


def read_hashed(folder: Path, name: str, most_bytes: int) -> tuple[memoryview, str]:
    """The bytes of a file and their hex SHA-256; OSError if it cannot be read, or is longer than `most_bytes`.

    Raises OutsideError if the name or the folder is a link, or the file is no regular one.
    """
    digest = hashlib.sha256()
    with open(beneath.open_file(folder.parent, f"{folder.name}/{name}"), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, at most {most_bytes} are read", name)
        # Of numpy, because a bytearray would be filled with zeros first.
        data = np.empty(size, np.uint8).data
        hashed = []
        end = 0
        while read := file.readinto(data[end : end + STEP_BYTES]):
            hashed.append(_BESIDE.submit(digest.update, data[end : end + read]))
            end += read
    for piece in hashed:
        piece.result()
    return data[:end], digest.hexdigest()


class HashingFile:
    """A file object that hashes what it writes, so that a part is read by nobody to be hashed. Also one for pyarrow.

    Args:
        on_progress: called after each write.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, file: IO[bytes], on_progress: Callable[[], object] = lambda: None) -> None:
        self._file = file
        self._on_progress = on_progress
        self._digest = hashlib.sha256()
        self._pending: deque[Future[None]] = deque()
        self.size = self._behind = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Write a bytes-like object, which must not change any more: it is hashed beside.

        Raises ValueError if the file below is closed, before the hashing thread is asked: the garbage collector may
        end a pyarrow writer of a failed file inside `submit`, whose lock this thread then holds already.
        """
        if self._file.closed:
            raise ValueError("write to a closed file")
        view = memoryview(data)
        self._pending.append(_BESIDE.submit(self._digest.update, view))
        if len(self._pending) > MOST_PENDING:
            self._pending.popleft().result()
        written = self._file.write(view)
        self.size += written
        if self.size - self._behind >= BEHIND_BYTES:
            begin_sync(self._file.fileno(), self._behind)
            self._behind = self.size
        self._on_progress()
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self.size

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Note that pyarrow is done; the opener of the file closes it."""
        self.closed = True

    def hexdigest(self) -> str:
        """Hex SHA-256 of what was written."""
        while self._pending:
            self._pending.popleft().result()
        return self._digest.hexdigest()

    def readable(self) -> bool:
        """False."""
        return False

    def writable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """False."""
        return False
