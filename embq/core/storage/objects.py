"""Paths of an output on an object store, with the interface of `pathlib.Path`.

An object store has no folders, rename or locks, and an object is there whole or not at all. An output there is guarded
by the conditional create: of several processes that create one name, one succeeds. `probe` checks that a store does so.

Nothing is cached. Errors are those of a file system (FileNotFoundError, FileExistsError, PermissionError); a store that
does not answer, after some attempts, is AwayError. Credentials come from where the store's own tools take them.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import posixpath
import random
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from embq.core.errors import AwayError, ConfigError, OutputError
from embq.core.storage.object_clients import connect, http_status, translate

PIECE_BYTES = 8 << 20
"""Part of a large upload; S3 takes up to 10,000 of them, so 84 GB."""
AT_ONCE = 4
"""Parts in flight at a time; together they are the memory of an upload."""
BUSY_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses before a retry if another upload of the same name was in progress (409)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Status:
    """Size of an object, and its time by the store's clock in seconds since 1970."""

    st_size: int
    st_mtime: float


class ObjectPath:
    """Path of an object, or of a prefix in place of a folder.

    Methods of `pathlib.Path` do the same here, durably. Others: `create`, `replace`, `upload` and `fetch`;
    `embq.core.storage.durable` chooses between them and the calls for files.
    """

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    # --- names ---

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"ObjectPath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: ObjectPath) -> bool:
        return self._url < other._url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self._url)

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return posixpath.splitext(self.name)[0]

    @property
    def suffix(self) -> str:
        """The suffix of the last part, with its dot."""
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> ObjectPath:
        """The name without its last part."""
        return ObjectPath(posixpath.dirname(self._url))

    # --- reading ---

    def exists(self) -> bool:
        """True if there is such an object."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """True if there is any object below this name."""
        return next(self.iterdir(), None) is not None

    def stat(self) -> Status:
        """Size and time; FileNotFoundError if there is no such object."""
        info = self.call(lambda store, key: store.info(key))
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self._url)
        return _status(info)

    def read_bytes(self) -> bytes:
        """All of it."""
        return bytes(self.call(lambda store, key: store.cat_file(key)))

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of it as text."""
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""
        piece = bytes(self.call(lambda store, key: store.cat_file(key, start=start, end=stop)))
        if len(piece) != stop - start:
            raise AwayError(f"{self}: {len(piece)} bytes came instead of {stop - start}")
        return piece

    def open(self, piece_bytes: int = 1 << 20) -> io.BufferedReader:
        """A file for reading, which can seek; it asks for at least `piece_bytes` at once."""
        return io.BufferedReader(RangedFile(self, self.stat().st_size), piece_bytes)

    def fetch(self, local: Path) -> None:
        """Copy it to a file of this machine."""
        with self.open(PIECE_BYTES) as theirs, open(local, "wb") as ours:
            shutil.copyfileobj(theirs, ours, PIECE_BYTES)

    def listing(self) -> Iterator[tuple[ObjectPath, Status]]:
        """The objects directly below this name, each with its status; none if there are none."""
        try:
            infos = self.call(lambda store, key: store.ls(key, detail=True, refresh=True))
        except FileNotFoundError:
            return
        prefix = key_of(self._url) + "/"
        for info in infos:
            name = info["name"].removeprefix(prefix)
            if info["name"].startswith(prefix) and name:
                yield self / name.rstrip("/"), _status(info)

    def iterdir(self) -> Iterator[ObjectPath]:
        """The names directly below this one."""
        return (path for path, _ in self.listing())

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """The names directly below this one that match."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    # --- writing ---

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Nothing: folders are there as soon as something is in them."""

    def create(self, data: bytes) -> None:
        """Create it; FileExistsError if it is there with other bytes.

        The answer to an earlier attempt may have been lost, so equal bytes are no conflict. Exclusive content must
        therefore be unique to its writer.
        """
        try:
            self.call(lambda store, key: store.pipe_file(key, data, mode="create"))
        except FileExistsError:
            if self.read_bytes() != data:
                raise

    def replace(self, data: bytes) -> None:
        """Write it, in place of what was there."""
        self.call(lambda store, key: store.pipe_file(key, data))

    def upload(self, local: Path, on_progress: Callable[[], None] = lambda: None) -> None:
        """Create it from a file of this machine, whole; FileExistsError if it is there with other bytes.

        The client libraries send a checksum, which the store verifies; the size is compared afterwards.

        Args:
            on_progress: called for each part that was sent.
        """
        from fsspec.callbacks import Callback

        progress = Callback(hooks={"moved": lambda *_, **__: on_progress()})
        options: dict[str, Any] = {"mode": "create", "chunksize": PIECE_BYTES, "callback": progress}
        if self._url.startswith("s3:"):
            options["max_concurrency"] = AT_ONCE
        try:
            self.call(lambda store, key: store.put_file(str(local), key, **options))
        except (FileExistsError, FileNotFoundError):
            # After a lost answer the completion is retried, and the store knows no such upload any more.
            if not (self.exists() and self._equals(local)):
                raise
        size, stored_size = local.stat().st_size, self.stat().st_size
        if size != stored_size:
            raise OutputError(f"{self}: {stored_size} bytes arrived of {size}", code="output")

    def copy(self, url: str) -> None:
        """Copy it to another name of the store, in place of what was there, without its bytes coming here."""
        self.call(lambda store, key: store.cp_file(key, key_of(url)))

    def unlink(self, missing_ok: bool = True) -> None:
        """Remove it; a missing one is no error, because S3 does not report it."""
        with suppress(FileNotFoundError):
            self.call(lambda store, key: store.rm_file(key))

    def _equals(self, local: Path) -> bool:
        if self.stat().st_size != local.stat().st_size:
            return False
        with open(local, "rb") as ours, self.open(PIECE_BYTES) as theirs:
            while piece := ours.read(PIECE_BYTES):
                if theirs.read(len(piece)) != piece:
                    return False
        return True

    def call(self, request: Callable[[Any, str], T]) -> T:
        """The answer to `request`, which gets the client and the key; errors as described above."""
        for pause in (*BUSY_S, None):
            try:
                return request(connect(self._url.partition(":")[0]), key_of(self._url))
            except Exception as error:
                if http_status(error) == 409 and pause is not None:
                    time.sleep(pause * random.uniform(1.0, 1.5))
                    continue
                raise translate(self._url, error) from error
        raise AssertionError("unreachable")


def probe(folder: ObjectPath) -> None:
    """Check that a name can be created only once; ConfigError if the store allows a second creation.

    Errors of writing and reading are raised too, so that a missing permission is reported before any work.
    """
    path = folder / f"probe-{secrets.token_hex(8)}"
    first, second = b"first", b"second"
    path.create(first)
    try:
        path.create(second)
    except FileExistsError:
        return
    finally:
        path.unlink(missing_ok=True)
    raise ConfigError(
        f"{folder} is on a store that lets one name be created twice: it ignores If-None-Match (or ifGenerationMatch), "
        "so two writers could overwrite each other",
        next_step="write to a folder, or to a store with conditional writes (Amazon S3, Google Cloud Storage, MinIO)",
        code="no_conditional_create",
    )


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An incomplete upload: its object, its id, and its begin by the store's clock."""

    path: ObjectPath
    upload: str
    began: float

    def abort(self) -> None:
        """Abort it; a missing one is no error."""
        bucket, _, key = key_of(str(self.path)).partition("/")
        try:
            self.path.call(
                lambda store, _: store.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=self.upload)
            )
        except FileNotFoundError:
            return


def unfinished(folder: ObjectPath) -> list[Unfinished]:
    """Incomplete uploads below a name, such as a killed writer leaves; only S3 keeps them (and bills for them)."""
    if not str(folder).startswith("s3:"):
        return []
    bucket, _, key = key_of(str(folder)).partition("/")
    uploads: list[Unfinished] = []
    marks: dict[str, str] = {}
    while True:
        request = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", **marks}
        page = folder.call(partial(_uploads, request))
        uploads += [
            Unfinished(ObjectPath(f"s3://{bucket}/{item['Key']}"), item["UploadId"], seconds_of(item.get("Initiated")))
            for item in page.get("Uploads") or ()
        ]
        if not page.get("IsTruncated"):
            return uploads
        marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _uploads(request: dict[str, str], store: Any, _: str) -> dict[str, Any]:
    page: dict[str, Any] = store.call_s3("list_multipart_uploads", **request)
    return page


class Ranges(Protocol):
    """Something that can be read in ranges."""

    def read_range(self, start: int, stop: int) -> bytes | memoryview:
        """The bytes from `start` on, at least one and none from `stop` on; `start` is below `stop`."""
        ...


class RangedFile(io.RawIOBase):
    """A seekable file for reading; each read requests a range."""

    def __init__(self, ranges: Ranges, size: int) -> None:
        super().__init__()
        self._ranges, self._size, self._at = ranges, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset; returns the new position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Offset of the next read."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current position; returns the number of bytes read."""
        view = memoryview(buffer).cast("B")
        stop = min(self._size, self._at + len(view))
        if stop <= self._at:
            return 0
        piece = self._ranges.read_range(self._at, stop)
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def key_of(url: str) -> str:
    """Bucket and key, as the client libraries name objects."""
    return url.partition("://")[2]


def _status(info: dict[str, Any]) -> Status:
    return Status(int(info.get("size") or 0), seconds_of(info.get("LastModified") or info.get("updated")))


def seconds_of(when: Any) -> float:
    """Seconds since 1970 of a time as text or datetime; 0 for none."""
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return float(when.timestamp()) if isinstance(when, datetime) else 0.0
