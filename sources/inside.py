"""One file that must lie inside a folder, whatever the links on its way say."""

from __future__ import annotations

import errno
import os
import stat

from core.errors import SampleError, SourceError
from sources.base import Moved
from sources.storage import SAMPLE_MAX_BYTES, WatchedFile, read_all

_PERMANENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of one file; any other says something about the disk, and the unit is worth another try."""


def read_inside(root: str, relative: str, size: int | None, moved: Moved) -> bytes:
    """The bytes of a plain file under `root`, of `size` bytes where that is known.

    Raises SampleError `outside_root`, `source_missing`, `source_denied`, `source_changed`, `unsupported_member` or
    `too_large`; SourceError where the storage fails.
    """
    path = os.path.join(root, relative)
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(root, "")):
        raise SampleError("outside_root", f"{path} leads to {real}, outside of the folder {root}")
    try:
        status = os.stat(real)
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for its writer
            raise SampleError("unsupported_member", f"{path} is not a regular file")
        if size is not None and status.st_size != size:
            raise SampleError("source_changed", f"{path} had {size} bytes when planned, now {status.st_size}")
        if status.st_size > SAMPLE_MAX_BYTES:
            raise SampleError("too_large", f"{path} has {status.st_size} bytes, more than {SAMPLE_MAX_BYTES}")
        with WatchedFile(real, moved) as file:
            data = read_all(file, status.st_size)
    except PermissionError as error:
        raise SampleError("source_denied", f"{path} may not be read by this user") from error
    except OSError as error:
        if error.errno in _PERMANENT:
            raise SampleError("source_missing", f"{path}: {error.strerror}") from error
        raise SourceError(
            f"{path}: cannot be read: {error.strerror or error}", code="source_unreadable", transient=True
        ) from error
    if len(data) != status.st_size:
        raise SampleError("source_changed", f"{path} changed while it was read")
    return data


def read_if_there(root: str, relative: str, moved: Moved) -> bytes | None:
    """The file's bytes, or None where there is no such file."""
    if not os.path.lexists(os.path.join(root, relative)):
        return None
    return read_inside(root, relative, None, moved)
