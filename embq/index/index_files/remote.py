"""Copies of indexes on object stores in a bounded cache of this machine, so that their files can be memory-mapped.

```
CACHE/indexes/HASH/       an index with one version, HASH by its URL; payloads are files/SHA256, whatever the names of
                          their objects, and stay as long as the newest version has them
CACHE/indexes/HASH-BUILD/ payloads of a build that is under way in a bucket, under their own paths
CACHE/indexes/HASH.lock   held while it is fetched, or a unit of the build is done; its time is that of the last use
```
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

from embq.core.errors import EmbqError, OutputError, TryLaterError
from embq.core.service.progress_line import size_text
from embq.core.settings import cache_folder, index_cache_bytes
from embq.core.storage.beneath import below, open_file
from embq.core.storage.durable import drop, publish, try_lock
from embq.core.storage.objects import PIECE_BYTES, ObjectPath
from embq.index.index_files.files import (
    FILES,
    File,
    asking,
    damaged,
    disk_error,
    read_json,
    read_small,
    write_current,
)
from embq.index.index_files.publication import names_below
from embq.index.index_files.version import CURRENT, CURRENT_BYTES, NAME, RECORD, Version, parsed_name, parsed_version

AT_ONCE = 4
"""Files that are fetched at a time."""

IN_USE_S = 600.0
"""After its last use an index is not evicted for so long: `embq serve` uses its indexes every 30 s."""

ATTEMPTS = 3
"""Attempts to fetch the current version where another one is published meanwhile."""

F = TypeVar("F", bound=File)


def fetched(
    source: ObjectPath, *, on_load: Callable[[str], None] | None = None, on_progress: Callable[[], None] = lambda: None
) -> Path:
    """The folder of this machine with the current version of an index, after fetching what is missing of it.

    The size and SHA-256 of each payload are checked. Indexes that were used longest ago are evicted, so that all take
    at most `index_cache_bytes` together; processes that fetch at the same time may exceed that.

    Args:
        source: of the index.
        on_load: called with what is fetched, if that takes long.
        on_progress: called again and again meanwhile; what it raises ends the fetch.

    Raises InputError `no_index` and `source_denied`, OutputError `index_damaged` for an object that is missing or not
    what the version's record says, and `no_space`; AwayError if the store does not answer.
    """
    folder = _cached(source)
    try:
        with _locked(folder, on_progress):
            for _ in range(ATTEMPTS):
                name = _current(source)
                try:
                    _fetch_version(source, name, folder, on_load, on_progress)
                    return folder
                except EmbqError as error:
                    if error.code != "index_damaged" or _current(source) == name:
                        raise
    except OSError as error:
        raise disk_error(error, folder.parent) from error
    raise TryLaterError(f"{source} changes faster than it can be fetched", next_step="try again")


def _cached(source: ObjectPath) -> Path:
    return cache_folder() / "indexes" / hashlib.sha256(str(source).encode()).hexdigest()[:32]


def _current(source: ObjectPath) -> str:
    """Name of the current version."""
    return parsed_name(read_small(source / CURRENT, CURRENT_BYTES), source / CURRENT)


def _fetch_version(
    source: ObjectPath,
    name: str,
    folder: Path,
    on_load: Callable[[str], None] | None,
    on_progress: Callable[[], None],
) -> None:
    """Make a version the current one of the cached folder; the caller holds its lock."""
    where = source / name / RECORD
    version = parsed_version(folder, read_json(where), str(where))
    cached = replace(
        version,
        name=name,
        trained=_named(version.trained),
        groups=tuple(tuple(map(_named, group)) for group in version.groups),
        rows=tuple(map(_named, version.rows)),
        identity=tuple(map(_named, version.identity)),
        deleted_file=None if version.deleted_file is None else _named(version.deleted_file),
    )
    files = folder / FILES
    files.mkdir(exist_ok=True)
    for other in names_below(folder, FILES):
        if other.startswith("."):  # of a fetch that was killed
            drop(files / other)
    missing = {file.sha256: file for file in version.files() if _size(files / file.sha256) != file.bytes}
    if missing:
        count = sum(file.bytes for file in missing.values())
        _make_room(folder, count)
        if on_load is not None:
            on_load(f"{size_text(count)} of {source}")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda file: _fetch(source, file, files / file.sha256, on_progress), missing.values()):
                pass
    _make_current(cached, name)


def _named(file: F) -> F:
    return replace(file, path=f"{FILES}/{file.sha256}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _fetch(source: ObjectPath, file: File, target: Path, on_progress: Callable[[], None]) -> None:
    """Copy a payload, whole and checked."""
    path = below(source, file.path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    digest = hashlib.sha256()
    file.check_size(path)
    try:
        with open(temporary, "xb") as ours:
            for start in range(0, file.bytes, PIECE_BYTES):
                on_progress()
                with asking(path):
                    piece = path.read_range(start, min(file.bytes, start + PIECE_BYTES))
                ours.write(piece)
                digest.update(piece)
        if digest.hexdigest() != file.sha256:
            raise damaged(f"{path} has other bytes than when it was written: its SHA-256 differs from its record")
        publish(temporary, target)
    finally:
        drop(temporary)


def _make_current(version: Version, name: str) -> None:
    """Name the version in CURRENT, unless it is there already, and remove what belongs to others only."""
    folder = version.index
    record = folder / name / RECORD
    data = json.dumps(version.record()).encode()
    if _size(folder / CURRENT) < 0 or _size(record) != len(data) or record.read_bytes() != data:
        record.parent.mkdir(exist_ok=True)
        write_current(record, data)
        write_current(folder / CURRENT, f"{name}\n".encode())
    for other in names_below(folder):
        if NAME.fullmatch(other) and other != name:
            shutil.rmtree(folder / other, ignore_errors=True)
    for other in set(names_below(folder, FILES)) - {file.sha256 for file in version.files()}:
        drop(folder / FILES / other)


# --- a build that is under way in a bucket ---


def build_cache(index: ObjectPath, build: str) -> Path:
    """The folder of this machine with copies of what a build has made so far."""
    return _cached(index).with_name(f"{_cached(index).name}-{build}")


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Protect a build's copies from eviction for the length of the block."""
    with _opened_lock(folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        below(folder.parent, folder.name).mkdir(exist_ok=True)  # it may have been evicted meanwhile
        yield
        os.utime(lock.fileno())


def copied(index: ObjectPath, file: File, folder: Path) -> Path:
    """Path of a payload in a build's copies, after fetching it if it is missing; errors of `fetched`."""
    path = below(folder, file.path)
    if _size(path) != file.bytes:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(folder, file.bytes)
        _fetch(index, file, path, lambda: None)
    return path


def sent(temporary: Path, index: ObjectPath, file: File, folder: Path) -> None:
    """Create a payload in the bucket from a file of this machine, which stays as its copy if there is room."""
    below(index, file.path).upload(temporary)
    path = below(folder, file.path)
    try:
        _make_room(folder, 0)
    except OutputError:
        drop(temporary)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.rename(path)


def forget_copies(folder: Path) -> None:
    """Remove a build's copies from this machine."""
    shutil.rmtree(folder, ignore_errors=True)
    drop(_lock_of(folder))


# --- the bound ---


@contextmanager
def _locked(folder: Path, on_progress: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a cached index, and count that as its use."""
    with _opened_lock(folder) as lock:
        while not try_lock(lock):
            on_progress()
            time.sleep(0.1)
        os.utime(lock.fileno())
        below(folder.parent, folder.name).mkdir(exist_ok=True)  # it may have been evicted meanwhile
        yield
        os.utime(lock.fileno())


def _opened_lock(folder: Path) -> IO[bytes]:
    """The lock's file. OutputError if others may write in the cache: they would choose what a search finds."""
    cache, path = folder.parent, _lock_of(folder)
    cache.mkdir(parents=True, exist_ok=True)
    for directory in (cache.parent, cache):
        status = directory.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise OutputError(
                f"{directory}, where indexes are cached, is another user's or may be written by all",
                next_step="remove it or `chmod o-w` it, or set XDG_CACHE_HOME to a folder of your own",
                code="not_writable",
            )
    return open(open_file(cache, path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), "ab")


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _make_room(folder: Path, needed: int) -> None:
    """Evict other indexes until `needed` bytes more fit; OutputError `no_space` if they do not."""
    disk = os.statvfs(folder)
    bound = index_cache_bytes() or disk.f_blocks * disk.f_frsize // 2
    lasts = {path: path.stat().st_mtime for path in folder.parent.glob("*.lock")}
    sizes = {path.with_suffix(""): _bytes_below(path.with_suffix("")) for path in sorted(lasts, key=lasts.__getitem__)}
    free, room = disk.f_bavail * disk.f_frsize, bound - sum(sizes.values())
    for other, size in sizes.items():
        if needed <= min(free, room):
            break
        if other != folder and time.time() - lasts[_lock_of(other)] > IN_USE_S and _evicted(other):
            free, room = free + size, room + size
    if needed > min(free, room):
        raise OutputError(
            f"no space left for {size_text(needed)} of an index in {folder.parent}: {size_text(max(0, free))} are "
            f"free there, and of the {size_text(bound)} of the cache {size_text(max(0, room))}",
            next_step="make room, raise EMBQ_INDEX_CACHE_GB, or set XDG_CACHE_HOME to a folder on a larger disk",
            code="no_space",
        )


def _evicted(folder: Path) -> bool:
    """Remove a cached index, unless a process is fetching it; processes that have it open keep its files."""
    with _opened_lock(folder) as lock:
        if not try_lock(lock):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True


def _bytes_below(folder: Path) -> int:
    count = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may remove it
            count += path.stat().st_size if path.is_file() else 0
    return count
