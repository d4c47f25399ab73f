"""Reading a file and hashing what is read, at the same time."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

STEP_BYTES = 1 << 20
"""Read at once, and hashed while the next is read."""

_BESIDE = ThreadPoolExecutor(1, thread_name_prefix="hashing")


def read_hashed(path: Path) -> tuple[memoryview, str]:
    """The bytes of a file and their hex SHA-256; OSError where it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        # Of numpy, because a bytearray would be filled with zeros first.
        data = np.empty(path.stat().st_size, np.uint8).data
        hashed = []
        end = 0
        while read := file.readinto(data[end : end + STEP_BYTES]):
            hashed.append(_BESIDE.submit(digest.update, data[end : end + read]))
            end += read
    for piece in hashed:
        piece.result()
    return data[:end], digest.hexdigest()
