"""Files that a library writes: a full disk must be an error, and must be told from others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.errors import OutputError
from core.storage.durable import output_error
from indexer.faiss_module import faiss

PIECE_BYTES = 1 << 20
NO_ROOM_BYTES = 1 << 20
"""Where less is left on a disk, a write that failed without a reason failed for that."""

_NEXT_STEPS = {
    "no_space": "make room, then give the same command again: what is done stays",
    "not_writable": "give write permission, or build the index in another folder: --to",
}


def write_by_faiss(path: Path, write: Callable[[Any], None]) -> None:
    """Have faiss write a file; OSError where the disk refuses.

    Not by faiss's own writer: where a disk fills up with the last bytes of a file, that says so on stderr only, and the
    file is cut (faiss 1.15, `FileIOWriter::~FileIOWriter`).

    Args:
        write: is given the writer.
    """
    with open(path, "wb", buffering=PIECE_BYTES) as file:
        try:
            write(faiss().PyCallbackIOWriter(file.write, PIECE_BYTES))
        except RuntimeError as error:
            raise with_reason(OSError(str(error).splitlines()[0]), path.parent) from error


def disk_error(error: OSError, path: Path) -> OutputError:
    """The error that a failed write to an index means for the user."""
    return output_error(with_reason(error, path if path.is_dir() else path.parent), path, next_steps=_NEXT_STEPS)


def with_reason(error: OSError, folder: Path) -> OSError:
    """An error of a library that says only how much it wrote (as numpy), with its reason: there is no room, or EIO."""
    if error.errno is not None:
        return error
    free = os.statvfs(folder)
    number = errno.ENOSPC if free.f_bavail * free.f_frsize < NO_ROOM_BYTES else errno.EIO
    return OSError(number, f"{os.strerror(number)} ({error})", str(folder))
