"""Files that are either complete under their final name or not there. Local and network POSIX file systems.

The order everywhere: temporary name on the same file system, write, fsync, rename or link, fsync of the folder. An
error drops the temporary file; fsync is never tried again on the same descriptor, because after a failed fsync the
kernel may already have marked the pages clean.
"""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from core.errors import OutputError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Refusals of the operating system that a user can mend, whatever was being written."""


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of a closed file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, data: bytes, *, temporary: Path) -> None:
    """Create `path` with `data`, complete and durable; FileExistsError where it is there already.

    A hard link refuses an existing name (a plain rename would replace it) and the file behind it is complete (which
    O_EXCL followed by writing would not promise).
    """
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
        fsync_folder(path.parent)
    finally:
        drop(temporary)


def drop(path: Path) -> None:
    """Remove a file that nobody needs and that may not be there. One that stays is litter, and hides no other error."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished, closed temporary file its final name, durably."""
    fsync_file(temporary)
    os.rename(temporary, path)
    fsync_folder(path.parent)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def output_error(error: OSError, path: Path) -> OutputError:
    """The error that a failed write to the output means for the user."""
    if error.errno in NO_SPACE:
        return OutputError(
            f"no space left for {path}",
            next_step="make room, then run `embq resume` on the output folder; committed rows are safe",
            code="no_space",
        )
    if error.errno in NOT_WRITABLE:
        return OutputError(
            f"{path} cannot be written: {error.strerror}",
            next_step="give write permission, or choose another --output",
            code="not_writable",
        )
    return OutputError(f"{path}: {error.strerror or error}", code="output")
