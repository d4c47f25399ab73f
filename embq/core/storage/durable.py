"""Durable files: complete under their final name, or absent. On POSIX file systems and object stores
(`embq.core.storage.objects`).

The order in folders: temporary name on the same file system, write, fsync, rename or link, fsync of the folder. An
error drops the temporary file; fsync is never tried again on the same descriptor, because after a failed fsync the
kernel may already have marked the pages clean. On an object store a complete upload is durable and an incomplete one
absent; the temporary file is on this machine.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from embq.core.errors import EmbqError, InputError, OutputError, OutsideError, TryLaterError, UsageError
from embq.core.storage import beneath
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place

_libc = ctypes.CDLL(None, use_errno=True)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FEW_INODES, FEW_BYTES = 16, 1 << 20
"""Left after a write failed: what it had begun is removed, and its inode is free again."""
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Errors of the operating system that a user can resolve."""
FAILING = (errno.EIO, errno.EREMOTEIO, errno.ESTALE)
"""Errors of a disk or share that fails: no fault of embq, whichever call meets them."""
UNUSABLE = {
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "remove the link that leads back to itself, or choose another name",
    errno.ENOTDIR: "check the path: a part of it is a file and no folder",
}
"""Errors of a path that no permission mends -> what can be done."""
DENIED = (errno.EACCES, errno.EPERM)
"""Errors of a read that the permissions forbid: nothing is damaged."""


def fsync_folder(folder: Place) -> None:
    """Make the names in `folder` durable; on an object store they are already."""
    if isinstance(folder, ObjectPath):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_sync(descriptor: int, start: int = 0) -> None:
    """Begin to write a file from byte `start` on to its disk, so that an fsync waits for less. It promises nothing."""
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(0), 2)  # 2: SYNC_FILE_RANGE_WRITE


def fsync_file(path: Path) -> None:
    """Make the content of a closed file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Place, data: bytes, *, temporary: Path) -> None:
    """Create `path` with `data`, complete and durable; FileExistsError if it is there already.

    A hard link refuses an existing name (a plain rename would replace it) and the file behind it is complete (which
    O_EXCL followed by writing would not promise). On an object store the data must be like no other writer's.
    """
    if isinstance(path, ObjectPath):
        path.create(data)
        return
    try:
        _write_synced(temporary, data)
        os.link(temporary, path)
        fsync_folder(path.parent)
    finally:
        drop(temporary)


def claim(path: Place, owner: str) -> None:
    """Create a file as a claim to its name; FileExistsError if another owner was first."""
    if isinstance(path, ObjectPath):
        path.create(owner.encode())
    else:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))


def overwrite(path: Place, data: bytes, *, temporary: Path | None = None, mode: int = 0o666) -> None:
    """Write `path`, complete and durable, in place of what was there.

    Args:
        temporary: None for a name of its own beside `path`.
        mode: of the file, less the umask.
    """
    if isinstance(path, ObjectPath):
        path.replace(data)
        return
    temporary = temporary or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_synced(temporary, data, mode)
        os.rename(temporary, path)
        fsync_folder(path.parent)
    except OSError:
        drop(temporary)
        raise


def _write_synced(temporary: Path, data: bytes, mode: int = 0o666) -> None:
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def reserve(path: Path, size: int) -> None:
    """Allocate room for the first `size` bytes of a file without changing its length.

    OSError if there is no room. File systems without fallocate allocate nothing; `trim` frees what is not used.
    """
    if not hasattr(_libc, "fallocate"):
        return
    descriptor = os.open(path, os.O_WRONLY)
    try:
        if _libc.fallocate(descriptor, 1, ctypes.c_int64(0), ctypes.c_int64(size)):  # 1: FALLOC_FL_KEEP_SIZE
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)


def trim(path: Path) -> None:
    """Free the room behind a file's end that `reserve` allocated."""
    os.truncate(path, path.stat().st_size)


def drop(path: Place) -> None:
    """Remove a temporary file that may be missing. A failure is ignored: it must not hide the error before it."""
    with suppress(OSError, OutputError):
        path.unlink(missing_ok=True)


def names_in(folder: Place) -> list[str]:
    """The names of the entries of an output's folder, none if it is missing.

    OutsideError if it is a link, OutputError `not_readable` if it may not be read, and `output` if it cannot be.
    """
    try:
        with reading(folder):
            if isinstance(folder, ObjectPath):
                return [path.name for path in folder.iterdir()]
            return [name for name, _ in beneath.listing(folder.parent, folder.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{folder} cannot be read: {error.strerror or error}") from error


def drop_in(folder: Place, name: str) -> None:
    """`drop` an entry of an output's folder, where the folder is no link."""
    if isinstance(folder, ObjectPath):
        drop(folder / name)
        return
    with suppress(OSError, OutputError):
        beneath.unlink(folder.parent, f"{folder.name}/{name}")


def publish(temporary: Path, path: Place, on_progress: Callable[[], None] = lambda: None) -> None:
    """Give a finished, closed temporary file its final name, durably.

    An orphan of that name, left by a dead writer, is replaced; on an object store it raises FileExistsError.

    Args:
        on_progress: called on progress, where the file is sent over a network.
    """
    if isinstance(path, ObjectPath):
        path.upload(temporary, on_progress)
        drop(temporary)
        return
    fsync_file(temporary)
    os.rename(temporary, path)
    fsync_folder(path.parent)


NOT_LINKABLE = (errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP)
"""Another user's file (Linux with fs.protected_hardlinks), or file systems that do not link between folders."""


def link(staged: Place, path: Place, temporary: Path) -> None:
    """Give a finished file a second name, or an object a copy; an orphan of that name, left by a dead writer, is
    replaced. Not durable yet in a folder, which must be synced. OutsideError if `staged` or its folder is a link, or
    no regular file.

    A file of a user who may not write to the folder of `path` is copied: its owner could change it ever after.

    Args:
        temporary: name for a copy, where the file cannot be linked.
    """
    if isinstance(staged, ObjectPath) or isinstance(path, ObjectPath):
        ObjectPath(str(staged)).copy(str(path))
        return
    name = f"{staged.parent.name}/{staged.name}"
    with suppress(FileNotFoundError):
        os.unlink(path)
    with beneath.parent(staged.parents[1], name) as (above, last):
        owner = os.stat(last, dir_fd=above, follow_symlinks=False).st_uid
        linked = owner in (os.geteuid(), os.stat(path.parent).st_uid)
        try:
            if linked:
                os.link(last, path, src_dir_fd=above, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NOT_LINKABLE:
                raise
            linked = False
    try:
        if linked:
            os.close(beneath.open_file(path.parent, path.name))  # OutsideError if `staged` is no regular file
            return
        with beneath.reader(staged.parent.parent, name) as file, open(temporary, "xb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        os.rename(temporary, path)
    except (OSError, OutsideError):
        drop(path if linked else temporary)
        raise


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed, or this process ends; False if another process has the lock.

    A `shared` lock goes with others of its kind. OSError if the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_sha256(path: Place) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open() if isinstance(path, ObjectPath) else open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_NEXT_STEPS = {
    "no_space": "make room, then run `embq resume` on the output folder; committed rows are safe",
    "not_writable": "give write permission, or choose another --output",
}
"""Code -> next step for a run's output folder."""


def _used_up(path: Place) -> str:
    """What a file system without room for `path` has none of: space, or inodes while it has space."""
    with suppress(OSError):
        stats = os.statvfs(os.path.dirname(str(path)))
        if stats.f_files and stats.f_favail < FEW_INODES and stats.f_bavail * stats.f_frsize > FEW_BYTES:
            return "inode (a file system has a limited number of files, see `df -i`)"
    return "space"


def output_error(error: OSError, path: Place, *, next_steps: Mapping[str, str] = _NEXT_STEPS) -> OutputError:
    """The error of a failed write, with the code `no_space`, `not_writable`, or `output` for anything else.

    Args:
        next_steps: by code, for other files than those of a run's output folder.
    """
    if error.errno in NO_SPACE and isinstance(path, ObjectPath):
        return OutputError(
            f"no space left on this machine for {path} on its way to the store",
            next_step="make room, or set EMBQ_SPOOL to a folder on a larger disk; then run `embq resume` on the output",
            code="no_space",
        )
    if error.errno in DENIED and isinstance(path, ObjectPath):
        return OutputError(
            f"{path} may not be written: {error.strerror}",
            next_step="give this machine credentials for reading and writing there, as for the store's own tools",
            code="not_writable",
        )
    if error.errno in NO_SPACE:
        code, message = "no_space", f"no {_used_up(path)} left for {path}"
    elif error.errno in NOT_WRITABLE:
        code, message = "not_writable", f"{path} cannot be written: {error.strerror}"
    else:
        code, message = "output", f"{path}: {error.strerror or error}"
    unusable = error.errno in (errno.ENOENT, errno.EEXIST)  # of a folder that is made: /proc, a link that leads nowhere
    next_step = UNUSABLE.get(error.errno or 0) or next_steps.get(code, "name another folder" if unusable else "")
    return OutputError(message, next_step=next_step, code=code)


@contextmanager
def writing(path: Place, *, next_steps: Mapping[str, str] = _NEXT_STEPS) -> Iterator[None]:
    """A block that writes `path`: an OSError of it is raised as its `output_error`."""
    try:
        yield
    except OSError as error:
        raise output_error(error, path, next_steps=next_steps) from error


def denied(error: Exception, path: object) -> EmbqError | None:
    """The error of a read that the permissions forbid: `not_readable`, of a store `source_denied`; None for others."""
    if not isinstance(error, OSError) or error.errno not in DENIED:
        return None
    if "://" in str(path):
        return InputError(
            f"{path} may not be read: {error.strerror}",
            next_step="give this machine credentials for reading and listing there, as for the store's own tools",
            code="source_denied",
        )
    return OutputError(
        f"{path} cannot be read: {os.strerror(error.errno)}", next_step="give read permission", code="not_readable"
    )


def unusable(error: Exception, path: object) -> UsageError | None:
    """The error for a path that the file system cannot follow, see `UNUSABLE`; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of Path.resolve
        number = errno.ELOOP
    if number not in UNUSABLE:
        return None
    return UsageError(f"{path} cannot be used: {os.strerror(number)}", next_step=UNUSABLE[number])


@contextmanager
def reading(path: Place) -> Iterator[None]:
    """A block that reads at or below `path`: an OSError because of permissions is raised as `denied` tells it."""
    try:
        yield
    except OSError as error:
        below = str(error.filename or "").startswith(str(path))
        if (refused := denied(error, error.filename if below else path)) is not None:
            raise refused from error
        raise


def is_unreadable(path: Path) -> bool:
    """True if this process may not read the file or folder `path`, or one of the folders above it."""
    for above in reversed(path.absolute().parents):
        if not os.access(above, os.X_OK, effective_ids=True):
            return True
    return os.path.lexists(path) and not os.access(path, os.R_OK, effective_ids=True)


def write_first(path: Place, data: bytes, *, temporary: Path) -> None:
    """`write_new` for what several processes may plan at a time; TryLaterError if another one was first."""
    try:
        write_new(path, data, temporary=temporary)
    except FileExistsError as error:
        raise TryLaterError(
            f"{path} was written by another process at the same time", next_step="give the same command again"
        ) from error
    except OSError as error:
        raise output_error(error, path) from error
