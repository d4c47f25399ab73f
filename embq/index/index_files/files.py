"""Files of an index: the lock, payloads, JSON records, and the errors of a disk or a store that refuses."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from embq.core import wire
from embq.core.errors import AwayError, EmbqError, MalformedError, OutputError, TryLaterError, command_line
from embq.core.formats.npy import read_header
from embq.core.redaction import masked
from embq.core.storage.beneath import below, open_file, open_regular, reader
from embq.core.storage.durable import NO_SPACE, denied, output_error, overwrite, try_lock
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place
from embq.core.wire import Count, LongText, RelativePath, Sha256, Word
from embq.index.faiss_module import faiss
from embq.index.index_files.claim import claimed

T = TypeVar("T")

FILES, WORK = "files", "_work"
MAP = "map.parquet"
"""Coordinates of the rows, see `embq.index.atlas.map_file`."""
LOCK = "_lock"
"""A file; in a bucket, a prefix with a claim."""

PIECE_BYTES = 1 << 20

NO_ROOM_BYTES = 1 << 20
"""Free space below which a write that failed without a reason is taken for a full disk."""

MOST_BYTES = 1 << 26
"""Limit of a record, which may list the files of thousands of units."""

_NEXT_STEPS = {
    "no_space": "make room, then give the same command again: what is done stays",
    "not_writable": "give write permission, or build the index in another folder: --output",
}


Check = Callable[[], None]
"""Raises TryLaterError if another process has taken the index over meanwhile."""


LOOK_S = 0.5
"""Time after which the holder of a lock is at work on the index; `attempted` holds it for a moment while it reads."""


@contextmanager
def index_lock(index: Place) -> Iterator[Check]:
    """Hold the index's lock for the length of the block; TryLaterError if another build or change has it.

    OutsideError if the lock is a link. In a bucket the lock is a claim, which others may take over from a process
    that gives no sign of life; see `embq.index.index_files.claim`.
    """
    if isinstance(index, ObjectPath):
        with ExitStack() as held:
            try:
                check = held.enter_context(claimed(index, LOCK))
            except OSError as error:
                raise disk_error(error, index) from error
            yield check
        return
    try:
        index.mkdir(parents=True, exist_ok=True)
        lock = open(open_file(index, LOCK, os.O_WRONLY | os.O_CREAT, 0o666), "wb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise disk_error(error, index) from error
    with lock:
        until_s = time.monotonic() + LOOK_S
        while not try_lock(lock):
            if time.monotonic() >= until_s:
                raise TryLaterError(
                    f"another embq process is at work on the index {index}", next_step="wait for it, or stop it"
                )
            time.sleep(0.05)
        note(index, _begun())
        try:
            yield lambda: None
        except EmbqError as error:
            note(index, error=error.message, next_step=error.next_step)
            raise
        with suppress(OSError):  # the work is done, whether the note of it can be removed or not
            lock.truncate(0)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A build or change of an index that is under way, failed or was interrupted: the content of `LOCK`, for the pages.

    Attributes:
        words: of the command that was given, which goes on with it; none for a call of Python.
        folder: in which it was given, if it names files below; else "".
        stages: name -> (done, all) units, in their order.
        error, next_step: of one that failed.
    """

    words: tuple[LongText, ...] = ()
    folder: LongText = ""
    stages: dict[Word, tuple[Count, Count]] = {}
    error: LongText = ""
    next_step: LongText = ""

    @property
    def command(self) -> str:
        """A command line for a shell that is anywhere, quoted; "" without one.

        The file may come with the index, from anybody: nothing is shown but an `embq index` that replaces nothing and
        writes nowhere else.
        """
        if self.words[:1] != ("index",) or any(word.startswith(("-o", "--output", "--over")) for word in self.words):
            return ""
        line = command_line(*self.words)
        return f"cd {shlex.quote(self.folder)} && {line}" if self.folder else line


def note(index: Place, begun: Attempt | None = None, **changes: Any) -> None:
    """Write down an attempt that begins, or changes of it; not if that is impossible, for only people read it, and
    not in a bucket."""
    with suppress(OSError, EmbqError, ValueError):
        if isinstance(index, Path):
            with open(open_file(index, LOCK, os.O_RDWR), "r+b") as file:
                attempt = begun or wire.read(Attempt, file.read(wire.MOST_BYTES), what=LOCK)
                data = msgspec.json.encode(msgspec.structs.replace(attempt, **changes))
                os.pwrite(file.fileno(), data, 0)
                os.ftruncate(file.fileno(), len(data))


def attempted(index: Path) -> tuple[Attempt, bool] | None:
    """The attempt on an index that has not succeeded, and whether a process is at work on it; None without one."""
    with suppress(OSError, EmbqError), open(open_file(index, LOCK), "rb") as file:
        attempt = wire.read(Attempt, file.read(wire.MOST_BYTES), what=LOCK)
        return attempt, not try_lock(file, shared=True)
    return None


def _begun() -> Attempt:
    """The attempt of this process."""
    program, *words = sys.argv
    if Path(program).name not in ("embq", "__main__.py"):
        return Attempt()
    has_paths = any(not os.path.isabs(word) and os.path.exists(word) for word in words)
    return Attempt(words=tuple(map(masked, words)), folder=os.getcwd() if has_paths else "")


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
        """Path of the payload; OutputError `index_damaged` if it is missing or has another size."""
        path = below(index, self.path)
        self.check_size(path)
        return path

    def check_size(self, path: Place) -> None:
        """OutputError `index_damaged` if the payload, which is at `path`, is missing or has another size."""
        with asking(path):
            if isinstance(path, Path):
                open_regular(path).close()  # faiss and Arrow name no cause if it may not be read
            size = path.stat().st_size
        if size != self.bytes:
            raise damaged(f"{path} has {size} bytes, its record says {self.bytes}")


def damaged(message: str) -> OutputError:
    """The error for a file of an index that is missing or cannot be read."""
    return OutputError(
        message,
        next_step="restore it, or build the index again with `embq index build --overwrite`",
        code="index_damaged",
    )


@contextmanager
def asking(path: Place) -> Iterator[None]:
    """Translate the errors of reading a file of an index, in a folder or a bucket, to those of the index."""
    try:
        yield
    except FileNotFoundError as error:
        raise damaged(f"{path} belongs to the index and is not there") from error
    except OSError as error:
        if (refused := denied(error, path)) is not None:
            raise refused from error
        if not isinstance(path, ObjectPath):
            raise damaged(f"{path} cannot be read: {error.strerror or error}") from error
        raise AwayError(f"{path}: the store does not answer: {error}", next_step="check the network") from error


def read_small(path: Place, most_bytes: int) -> bytes:
    """All bytes of a small file, and of a larger one at least one more than `most_bytes`; errors of `asking`.

    OutsideError if the file, or the folder that it is in, is a link, or it is no regular file.
    """
    with asking(path):
        if isinstance(path, ObjectPath):
            return bytes(path.call(lambda store, key: store.cat_file(key, start=0, end=most_bytes + 1)))
        with reader(path.parent.parent, f"{path.parent.name}/{path.name}") as file:
            return file.read(most_bytes + 1)


def read_json(path: Place) -> dict[str, Any]:
    """A JSON object of ours; OutputError `index_damaged` if it is missing or malformed."""
    try:
        return wire.read(dict[str, Any], read_small(path, MOST_BYTES), what=str(path), most_bytes=MOST_BYTES)
    except MalformedError as error:
        raise damaged(f"{path} cannot be read: {error}") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays that `numpy.savez` wrote, by name. OSError, or ValueError if it did not: `numpy.load` would decompress
    them to any size, and allocate what a header says."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if total > os.fstat(file.fileno()).st_size or any(member.compress_type for member in members):
                raise ValueError("its arrays are compressed")
            return {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}
    except (zipfile.BadZipFile, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _array(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    shape, fortran, dtype = read_header(file)
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C").copy()


def to_json(record: object) -> Any:
    """JSON-ready values of a record, which is made of dataclasses; `from_json` is the inverse."""
    return msgspec.to_builtins(record, str_keys=True, enc_hook=str)


def from_json(form: type[T], described: object, what: str, *, strict: bool = True) -> T:
    """A record from JSON values; OutputError `index_damaged` if they do not fit its types.

    Args:
        what: noun for the message, such as "sidecar of an index".
        strict: False if keys of a mapping are numbers, which JSON holds as text.
    """
    wire.prepare(form)
    try:
        return msgspec.convert(described, form, strict=strict, dec_hook=lambda type_, value: type_(value))
    except (ValueError, RecursionError, OverflowError) as error:
        raise OutputError(wire.malformed(what, error).message, code="index_damaged") from error


def write_current(path: Place, data: bytes) -> None:
    """Replace a small file as a whole, durably; OutputError if it cannot be written."""
    try:
        overwrite(path, data)
    except OSError as error:
        raise disk_error(error, path) from error


def write_by_faiss(path: Path, write: Callable[[Any], None], *, head: bytes = b"") -> None:
    """Have faiss write a file; OSError if the disk refuses.

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


def disk_error(error: OSError, path: Place) -> OutputError:
    """The error that a failed write to an index means for the user; of a full disk it names the file, if known."""
    if isinstance(path, ObjectPath):
        if error.errno in NO_SPACE and error.filename:
            path = Path(error.filename)  # of the copy on this machine
    else:
        error = with_reason(error, path if path.is_dir() else path.parent)
    return output_error(error, path, next_steps=_NEXT_STEPS)


def with_reason(error: OSError, folder: Path) -> OSError:
    """An error of a library that says only how much it wrote (as numpy), with its reason: there is no room, or EIO."""
    if error.errno is not None:
        return error
    free = os.statvfs(folder)
    number = errno.ENOSPC if free.f_bavail * free.f_frsize < NO_ROOM_BYTES else errno.EIO
    return OSError(number, f"{os.strerror(number)} ({error})", str(folder))
