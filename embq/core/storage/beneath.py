"""Paths that are made from data, resolved below a root folder.

The root is the choice of the user and may be a link itself. A name below it may come from a broker, a record or an
archive, and the folder from another user. So a name has no `..`, no absolute part and no zero byte, and nothing on the
way to it is a symbolic link: each part is opened with O_NOFOLLOW relative to the folder above it, as openat2(2) does
with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS. A name that breaks these rules is an OutsideError. Other errors of the
file system (FileNotFoundError, PermissionError) are OSError.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePath
from typing import IO, TypeVar, cast

from embq.core.errors import MalformedError, OutsideError
from embq.core.storage.objects import ObjectPath

PIECE_BYTES = 64 << 10
"""Read of an object at least, at once: as much as parquet's readers ask for at the end of a file."""

SMALL_BYTES = 64 << 20
"""Limit of a small file unless its reader has another one: settings, records and logs of trainings."""

MOST_NAME_BYTES = 255

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Root = TypeVar("Root", bound=Path | ObjectPath)


def parts_of(root: Path | ObjectPath, name: str | PurePath) -> tuple[str, ...]:
    """The parts of a relative name, at least one; OutsideError if it could lead out of `root`."""
    text = str(name)
    parts = tuple(text.split("/"))
    for part in parts:
        if part in ("", ".", "..") or "\0" in part:
            raise _outside(root, text, f"{part!r} is no name of a file")
        try:
            length = len(os.fsencode(part))
        except UnicodeEncodeError as error:
            raise _outside(root, text, "this locale cannot name it; set LC_ALL=C.UTF-8") from error
        if length > MOST_NAME_BYTES:
            raise _outside(root, text[:MOST_NAME_BYTES], "no file system has names of that length")
    return parts


def below(root: Root, name: str | PurePath) -> Root:
    """The path `root / name`, where neither it nor a folder on the way is a link; it may be missing.

    For code that needs a path. Files that another user can change meanwhile are opened with the functions below, which
    leave no time between check and use.
    """
    parts = parts_of(root, name)
    path: Path | ObjectPath = root
    for part in parts:
        path = path / part
        if isinstance(path, Path) and path.is_symlink():
            raise _link(root, name, part)
    return cast(Root, path)


@contextmanager
def folder(root: Path, name: str | PurePath = "", *, make: bool = False, mode: int = 0o777) -> Iterator[int]:
    """A descriptor of the folder `root / name`, for `dir_fd=`; "" is the root itself.

    Args:
        make: create the folders of `name` that are missing, with `mode`.
    """
    descriptor = os.open(root, _FOLDER)
    try:
        for part in parts_of(root, name) if str(name) not in ("", ".") else ():
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, mode, dir_fd=descriptor)
            below_it = _opened(root, name, part, _FOLDER, 0, descriptor)
            os.close(descriptor)
            descriptor = below_it
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def parent(root: Path, name: str | PurePath, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """(descriptor of the folder that holds `root / name`, the last part of the name), for `dir_fd=`."""
    *above, last = parts_of(root, name)
    with folder(root, "/".join(above), make=make) as descriptor:
        yield descriptor, last


def open_file(root: Path, name: str | PurePath, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of the regular file `root / name`, opened with `flags` (of `os.open`).

    OutsideError for a pipe, a device or a socket, which a reader could wait for without end.
    """
    with parent(root, name) as (above, last):
        try:
            descriptor = _opened(root, name, last, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, above)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe that nobody reads; a socket; a folder to write to
                raise _outside(root, name, "it is no regular file") from error
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _outside(root, name, "it is no regular file")
    return descriptor


def open_appending(path: Path) -> int:
    """A descriptor of the regular file `path` to append to, created if it is missing; OutsideError if it is a link."""
    return open_file(path.parent, path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


@contextmanager
def written(root: Path, name: str | PurePath, *, temporary: str) -> Iterator[IO[bytes]]:
    """A new file, called `temporary` until it gets the name `root / name` at the end of the block; none after an error.
    What has either name in that folder is replaced."""
    with parent(root, name) as (above, last):
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=above)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o666, dir_fd=above), "wb") as file:
                yield file
            os.rename(temporary, last, src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=above)
            raise


def reader(root: Path | ObjectPath, name: str | PurePath) -> BufferedReader:
    """The regular file, or object, `root / name`, open for reading."""
    if isinstance(root, ObjectPath):
        return below(root, name).open(PIECE_BYTES)
    return open(open_file(root, name), "rb")


def read_bytes(root: Path | ObjectPath, name: str | PurePath, *, most_bytes: int) -> bytes:
    """The content of the regular file, or object, `root / name`; MalformedError if it has more than `most_bytes`."""
    if isinstance(root, ObjectPath):
        return below(root, name).read_bytes()
    with reader(root, name) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise MalformedError(f"{root / name} has more than {most_bytes:,} bytes")
    return data


def open_regular(path: Path) -> BufferedReader:
    """The regular file at a path of the user's choice, which may be a link, open for reading.

    OSError for anything else: a pipe, a terminal or a device would be read without end. What is opened by a library is
    checked with `require_regular`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def require_regular(path: Path) -> Path:
    """The path; OSError if it is no regular file, or no link to one."""
    _refuse_special(os.stat(path).st_mode, path)
    return path


def read_small(path: Path, *, most_bytes: int = SMALL_BYTES) -> bytes:
    """The content of a small file; OSError as of `open_regular`, and if it has more than `most_bytes`."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return data


def listing(root: Path, name: str | PurePath = "") -> list[tuple[str, os.stat_result]]:
    """`entries` of the folder `root / name`."""
    with folder(root, name) as descriptor:
        try:
            return entries(descriptor)
        except OSError as error:
            if isinstance(error.filename, int):
                error.filename = str(root / name)  # not the number of the descriptor
            raise


def entries(descriptor: int) -> list[tuple[str, os.stat_result]]:
    """(name, status) of each entry of an open folder, in no order; links are not followed.

    Entries that disappear meanwhile are left out.
    """
    listed = []
    for name in os.listdir(descriptor):
        with suppress(FileNotFoundError):
            listed.append((name, os.stat(name, dir_fd=descriptor, follow_symlinks=False)))
    return listed


def unlink(root: Path, name: str | PurePath, *, missing_ok: bool = False) -> None:
    """Remove the file or the link `root / name`; a link's target stays."""
    try:
        with parent(root, name) as (above, last):
            os.unlink(last, dir_fd=above)
    except FileNotFoundError:
        if not missing_ok:
            raise


def remove(root: Path, name: str | PurePath) -> None:
    """Remove the file, the link or the folder `root / name` with all that is in it; targets of links stay."""
    with parent(root, name) as (above, last):
        remove_entry(above, last, os.stat(last, dir_fd=above, follow_symlinks=False))


def remove_entry(descriptor: int, name: str, status: os.stat_result) -> None:
    """`remove` for what `entries` gave of an open folder."""
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=descriptor)
    else:
        os.unlink(name, dir_fd=descriptor)


def _opened(root: Path, name: str | PurePath, part: str, flags: int, mode: int, above: int) -> int:
    try:
        return os.open(part, flags | os.O_NOFOLLOW, mode, dir_fd=above)
    except FileNotFoundError:
        raise
    except OSError as error:
        _refuse_link(root, name, part, above)
        error.filename = str(root / name)  # not only `part`, which is relative to `above`
        raise


def _refuse_link(root: Path, name: str | PurePath, part: str, above: int) -> None:
    try:
        is_link = stat.S_ISLNK(os.stat(part, dir_fd=above, follow_symlinks=False).st_mode)
    except FileNotFoundError:  # it could not be made: the caller knows why
        return
    if is_link:
        raise _link(root, name, part)


def _link(root: Path | ObjectPath, name: str | PurePath, part: str) -> OutsideError:
    return _outside(root, name, f"{part!r} is a symbolic link")


def _refuse_special(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _outside(root: Path | ObjectPath, name: str | PurePath, why: str) -> OutsideError:
    return OutsideError(
        f"{str(name)!r} does not stay below {root}: {why}",
        next_step="embq makes no such entry: find out where it comes from, and remove it",
    )
