"""Files of an index: the lock, payloads, JSON records, and the errors of a disk that refuses a write."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from core import wire
from core.errors import MalformedError, OutputError, TryLaterError
from core.storage.beneath import below, open_file
from core.storage.durable import output_error, overwrite, try_lock
from core.wire import Count, RelativePath, Sha256
from indexer.faiss_module import faiss

T = TypeVar("T")

FILES, WORK, LOCK = "files", "_work", "_lock"

PIECE_BYTES = 1 << 20

NO_ROOM_BYTES = 1 << 20
"""Free space below which a write that failed without a reason is taken for a full disk."""

MOST_BYTES = 1 << 26
"""Limit of a record, which may list the files of thousands of units."""

_NEXT_STEPS = {
    "no_space": "make room, then give the same command again: what is done stays",
    "not_writable": "give write permission, or build the index in another folder: --to",
}


@contextmanager
def alone(index: Path) -> Iterator[None]:
    """Hold the index's lock for the length of the block; TryLaterError where another build or change has it.

    OutsideError where the lock is a link.
    """
    try:
        index.mkdir(parents=True, exist_ok=True)
        lock = open(open_file(index, LOCK, os.O_WRONLY | os.O_CREAT, 0o666), "wb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise disk_error(error, index) from error
    with lock:
        if not try_lock(lock):
            raise TryLaterError(
                f"another embq process is at work on the index {index}", next_step="wait for it, or stop it"
            )
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A committed payload.

    Attributes:
        path: relative to the index's folder.
    """

    path: RelativePath
    bytes: Count
    sha256: Sha256

    def check(self, index: Path) -> Path:
        """Path of the payload; OutputError where it is missing or has another size."""
        path = below(index, self.path)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise damaged(f"{path} belongs to the index and is not there") from error
        if size != self.bytes:
            raise damaged(f"{path} has {size} bytes, its record says {self.bytes}")
        return path


def damaged(message: str) -> OutputError:
    """The error for a file of an index that is missing or cannot be read."""
    return OutputError(
        message,
        next_step="restore it, or build the index again with `embq index --rebuild`",
        code="index_damaged",
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of ours; OutputError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return wire.read(dict[str, Any], file.read(MOST_BYTES + 1), what=str(path), most_bytes=MOST_BYTES)
    except (OSError, MalformedError) as error:
        raise OutputError(
            f"{path} cannot be read: {error}",
            next_step="build the index again with `embq index --rebuild`",
            code="index_damaged",
        ) from error


def to_json(record: object) -> Any:
    """JSON-ready values of a record, which is made of dataclasses; `from_json` is the inverse."""
    return msgspec.to_builtins(record, str_keys=True, enc_hook=str)


def from_json(form: type[T], described: object, what: str, *, strict: bool = True) -> T:
    """A record from JSON values; OutputError `index_damaged` where they do not fit its types.

    Args:
        what: noun for the message, such as "sidecar of an index".
        strict: False where keys of a mapping are numbers, which JSON holds as text.
    """
    wire.prepare(form)
    try:
        return msgspec.convert(described, form, strict=strict, dec_hook=lambda type_, value: type_(value))
    except (ValueError, RecursionError, OverflowError) as error:
        raise OutputError(wire.malformed(what, error).message, code="index_damaged") from error


def write_current(path: Path, data: bytes) -> None:
    """Replace a small file as a whole, durably; OutputError where it cannot be written."""
    try:
        overwrite(path, data)
    except OSError as error:
        raise disk_error(error, path) from error


def write_by_faiss(path: Path, write: Callable[[Any], None], *, head: bytes = b"") -> None:
    """Have faiss write a file; OSError where the disk refuses.

    Not by faiss's own writer: where a disk fills up with the last bytes of a file, that says so on stderr only, and the
    file is cut (faiss 1.15, `FileIOWriter::~FileIOWriter`).

    Args:
        write: is given the writer.
        head: bytes before it.
    """
    with open(path, "wb", buffering=PIECE_BYTES) as file:
        file.write(head)
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
