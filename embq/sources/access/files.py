"""Input files on this machine or behind URLs: status, version, listings, and reading the planned version."""

from __future__ import annotations

import errno
import glob
import io
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from embq.core.errors import SampleError, SourceError
from embq.core.process.limits import decoded_bytes
from embq.core.storage.objects import RangedFile
from embq.core.storage.paths import is_url
from embq.core.units import FILE_NAME, Unit
from embq.sources.access import listings, ranged_reads, read_ahead, urls
from embq.sources.interface import FILE_UNITS_MAX, SAMPLE_MAX_BYTES, FileStatus, Memory, Moved

PIECE_BYTES = 1 << 20
"""Size of a read: storage that delivers 25 kB/s still moves within a worker's time for one step."""


def etag(status: os.stat_result) -> str:
    """The version of a file: modification time in ns and size in bytes. A rewrite that keeps both goes unseen."""
    return f"{status.st_mtime_ns}-{status.st_size}"


@contextmanager
def source_errors(path: str) -> Iterator[None]:
    """Translate errors of the operating system about `path` into SourceError.

    Codes: `source_missing`, `source_denied`, `too_large` if memory is short, and `source_unreadable`, which alone is
    transient: the storage may come back.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(
            f"{path}: does not exist",
            code="source_missing",
            next_step="check the path, and that its disk is mounted on this machine",
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{path}: may not be read by this user",
            code="source_denied",
            next_step="give the user that runs embq the right to read it",
        ) from error
    except BrokenPipeError:  # of the pipe to the parent process, not of the source
        raise
    except (MemoryError, OSError) as error:
        if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
            raise beyond_memory(path) from error
        raise SourceError(
            f"{path}: cannot be read: {error.strerror or error}",
            code="source_unreadable",
            next_step="check the disk or the network share",
            transient=True,
        ) from error


def beyond_memory(path: str, what: str = "reading it") -> SourceError:
    """The error for a file of which a reader would hold more than `embq.core.process.limits.decoded_bytes`."""
    return SourceError(
        f"{path}: {what} takes more memory than a reader may have here, {decoded_bytes():,} bytes",
        code="too_large",
        next_step="split it into smaller files or row groups, or give the worker more memory; then embq retry",
    )


def beyond_units(path: str) -> SourceError:
    """The error for a file with more units than one file may have."""
    return SourceError(
        f"{path}: has more than {FILE_UNITS_MAX:,} units",
        code="too_large",
        next_step="split it into smaller files, or plan it with a larger --unit-size",
    )


def stat_file(path: str) -> FileStatus:
    """The status of a regular file; SourceError if it is missing, denied or something else."""
    if is_url(path):
        return listings.stat(path)
    with source_errors(path):
        status = os.stat(path)
    require_regular(path, status)
    return FileStatus(status.st_size, etag(status))


def exists(path: str) -> bool:
    """True if anything has that name, a broken link included; SourceError if the storage does not answer."""
    if not is_url(path):
        return os.path.lexists(path)
    try:
        listings.stat(path)
    except SourceError as error:
        if error.code not in ("source_missing", "not_a_file"):
            raise
        return error.code == "not_a_file"
    return True


def is_folder(path: str) -> bool:
    """True if a path or URL names a folder; SourceError if there is nothing of that name."""
    if is_url(path):
        return listings.is_folder(path)
    with source_errors(path):
        return stat.S_ISDIR(os.stat(path).st_mode)


def list_names(path: str) -> list[str]:
    """The names in a folder, sorted; SourceError if it cannot be listed."""
    if is_url(path):
        return [name for name, _ in listings.list_folder(path)]
    with source_errors(path):
        return sorted(os.listdir(path))


def join(folder: str, name: str) -> str:
    """The path or URL of a name, or relative path, in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def absolute(path: str) -> str:
    """A path made absolute; a URL as it is."""
    return path if is_url(path) else os.path.abspath(path)


def has_magic(text: str) -> bool:
    """True if a path or URL is a pattern with *, ? or []; in an http URL the question mark begins the query."""
    return glob.has_magic(urls.path_of(text))


def match(pattern: str) -> list[str]:
    """The paths or URLs that a pattern matches, sorted; "**" stands for any number of folders."""
    return listings.match(pattern) if is_url(pattern) else sorted(glob.glob(pattern, recursive=True))


def base_name(path: str) -> str:
    """The last part of a path or URL."""
    return urls.base_name(path) if is_url(path) else os.path.basename(path)


def name_of(unit: Unit) -> str:
    """The name of a unit's file in its keys: its path below the named folder, or the last part of its path."""
    return dict(unit.options).get(FILE_NAME, "") or base_name(unit.source)


def with_name(unit: Unit, name: str) -> Unit:
    """The unit with that name of its file; "" for the last part of its path."""
    options = tuple(pair for pair in unit.options if pair[0] != FILE_NAME)
    return replace(unit, options=tuple(sorted((*options, (FILE_NAME, name)))) if name else options)


class WatchedFile(io.FileIO):
    """A file open for reading that calls `on_progress` for each piece that comes in."""

    def __init__(self, path: str, on_progress: Moved) -> None:
        super().__init__(path, "r")
        self._on_progress = on_progress

    def readinto(self, buffer: Any) -> int:
        """As the base class does; the number of bytes read."""
        count = super().readinto(buffer)
        if count:
            self._on_progress()
        return count


def read_all(file: WatchedFile, expected: int) -> bytes:
    """All of a file of about `expected` bytes, in pieces, and never twice in memory."""
    buffer = io.BytesIO()
    piece = memoryview(bytearray(min(PIECE_BYTES, expected + 1)))
    while count := file.readinto(piece):
        buffer.write(piece[:count])
    return buffer.getvalue()


def load(file: WatchedFile, size: int) -> Memory:
    """The first `size` bytes of a file, or all if it is shorter, in pieces.

    Each piece is read into its final place, in fresh large pages: more than twice as fast as `read`.
    """
    if size == 0:
        return b""
    memory = _memory(size)
    at = 0
    with memoryview(memory) as view:
        while at < size and (count := file.readinto(view[at : at + PIECE_BYTES])):
            at += count
    return memory if at == size else memory[:at]


class _FileMemory(mmap.mmap):
    """Private memory of a whole file, which can be made longer; shared memory, which mmap makes by itself, cannot."""


_spare: list[_FileMemory] = []
SPARES = 2
"""Memories that are kept: images of one may still wait to be decoded when the file after it is read."""
SPARE_BYTES, SPARE_SHARE = 512 << 20, 8
"""Longest memory that is kept for the next file, and what part of a reader's memory it is at most."""


def _memory(size: int) -> _FileMemory:
    """Memory for a file; that of one before, if it was given back and nothing is a view of it."""
    for _ in range(SPARES):
        try:
            memory = _spare.pop(0)
            memory.resize(size)
            return memory
        except BufferError:  # of which there are views
            _spare.append(memory)
        except (IndexError, ValueError, OSError, SystemError):  # there is none, or it cannot grow on this system
            break
    memory = _FileMemory(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give_back(memory: Memory) -> None:
    """Keep the memory of a file that nobody reads any more for the next one: the kernel takes twice as long to clear
    fresh pages as a copy to them takes."""
    if isinstance(memory, _FileMemory) and _may_stay(memory) and len(_spare) < SPARES:
        _spare.append(memory)


def view_of(memory: Memory) -> Memory | memoryview:
    """A view, whose slices copy nothing, and each of which keeps all of the memory; large memory is itself."""
    return memoryview(memory).toreadonly() if _may_stay(memory) else memory


def _may_stay(memory: Memory) -> bool:
    return len(memory) <= min(SPARE_BYTES, decoded_bytes() // SPARE_SHARE)


@contextmanager
def open_unchanged(unit: Unit, code: str, on_progress: Moved) -> Iterator[io.BufferedReader[Any]]:
    """The unit's file, open for reading, which must be the version that was planned before and after the block.

    Args:
        code: of the error if it is another version.
        on_progress: called for each piece that comes in.

    Raises SourceError with `code` if the file differs from `unit.etag`, else as `source_errors` does.
    """
    with open_current(unit, code, on_progress) as (version, file):
        require_same(unit, version, code)
        yield file


@contextmanager
def open_current(unit: Unit, code: str, on_progress: Moved) -> Iterator[tuple[str, io.BufferedReader[Any]]]:
    """The version of the unit's file as it is now, and the file, which must not change in the block.

    Args and errors are those of `open_unchanged`.
    """
    if is_url(unit.source):
        status = listings.stat(unit.source)
        end = unit.stop or status.size
        ranges = ranged_reads.RangesAhead(unit.source, status.size, first=unit.start, last=end, on_progress=on_progress)
        with io.BufferedReader(RangedFile(ranges, status.size), PIECE_BYTES) as file:
            yield status.version, file
        require_same(replace(unit, etag=status.version), listings.stat(unit.source).version, code)
        return
    with source_errors(unit.source):
        # Before opening it, which would wait for the writer of a named pipe.
        require_regular(unit.source, os.stat(unit.source))
        with io.BufferedReader(WatchedFile(unit.source, on_progress), PIECE_BYTES) as local:
            version = etag(os.fstat(local.fileno()))
            yield version, local
            require_same(replace(unit, etag=version), etag(os.fstat(local.fileno())), code)


def load_unchanged(unit: Unit, code: str, on_progress: Moved) -> Memory:
    """All of the unit's file in memory, in the planned version; less if it became shorter.

    Raises as `open_unchanged` does, and SourceError `too_large` if that is more than a reader may hold.
    """
    if is_url(unit.source):
        data = read_ahead.fetched(unit, on_progress)
        if data is None:
            status = listings.stat(unit.source)
            require_same(unit, status.version, code)
            _require_room(unit.source, status.size)
            data = ranged_reads.load(unit.source, status.size, on_progress)
        require_same(unit, listings.stat(unit.source).version, code)
        return data
    with open_unchanged(unit, code, on_progress) as file:
        raw = file.raw
        assert isinstance(raw, WatchedFile)
        size = os.fstat(raw.fileno()).st_size
        _require_room(unit.source, size)
        return load(raw, size)


def forget_cached(path: str) -> None:
    """Drop a file from the page cache, where the system can, so that the next read asks the storage."""
    if not is_url(path) and hasattr(os, "posix_fadvise"):  # macOS has none
        with source_errors(path), open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


NOT_STREAMED = "write standard input or a pipe into a file first: inputs are read more than once"


def require_regular(path: str, status: os.stat_result) -> None:
    """Raise SourceError `not_a_file` for a folder, and for what may be waited on for ever, such as a pipe."""
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        raise SourceError(
            f"{path}: is {'a folder' if is_folder else 'not a regular file'}",
            code="not_a_file",
            next_step="name a file" if is_folder else NOT_STREAMED,
        )


def _require_room(path: str, size: int) -> None:
    if size > decoded_bytes():
        raise beyond_memory(path, f"holding its {size:,} bytes at once")


def require_same(unit: Unit, version: str, code: str) -> None:
    """SourceError with `code` if `version` is not the one that was planned."""
    if version != unit.etag:
        what = "ETag, generation or time" if is_url(unit.source) else "modification time in ns"
        raise SourceError(
            f"{unit.source}: changed since the run was planned: it was {unit.etag} and is {version} "
            f"({what}, size in bytes)",
            code=code,
            next_step="put the planned file back, or plan a new run",
        )


_PERMANENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of one file; any other concerns the disk, and the unit may be tried again."""


def read_inside(root: str, relative: str, size: int | None, on_progress: Moved) -> bytes:
    """The bytes of a plain file under `root`, of `size` bytes if that is known.

    Raises as `check_inside` does, and SampleError `source_changed` if it changes meanwhile.
    """
    path = os.path.join(root, relative)
    real, size = check_inside(root, relative, size)
    with _of_sample(path), WatchedFile(real, on_progress) as file:
        data = read_all(file, size)
    if len(data) != size:
        raise SampleError("source_changed", f"{path} changed while it was read")
    return data


def check_inside(root: str, relative: str, size: int | None) -> tuple[str, int]:
    """Real path and size of a plain file under `root`, which must have `size` bytes if that is known.

    Raises SampleError `outside_root`, `source_missing`, `source_denied`, `source_changed`, `unsupported_member` or
    `too_large`; SourceError if the storage fails.
    """
    path = os.path.join(root, relative)
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(root, "")):
        raise SampleError("outside_root", f"{path} leads to {real}, outside of the folder {root}")
    with _of_sample(path):
        status = os.stat(real)
    if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for its writer
        raise SampleError("unsupported_member", f"{path} is not a regular file")
    if size is not None and status.st_size != size:
        raise SampleError("source_changed", f"{path} had {size} bytes when planned, now {status.st_size}")
    if status.st_size > SAMPLE_MAX_BYTES:
        raise SampleError("too_large", f"{path} has {status.st_size} bytes, more than {SAMPLE_MAX_BYTES}")
    return real, status.st_size


@contextmanager
def _of_sample(path: str) -> Iterator[None]:
    """Errors of the file as those of one sample, those of the disk as SourceError."""
    try:
        yield
    except PermissionError as error:
        raise SampleError("source_denied", f"{path} may not be read by this user") from error
    except OSError as error:
        if error.errno in _PERMANENT:
            raise SampleError("source_missing", f"{path}: {error.strerror}") from error
        raise SourceError(
            f"{path}: cannot be read: {error.strerror or error}", code="source_unreadable", transient=True
        ) from error
