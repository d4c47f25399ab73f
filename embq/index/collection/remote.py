"""Plain files in buckets, with the part of the interface of `pathlib.Path` that collections need; read in ranges.

Versions, retries and parallel requests are those of inputs (`embq.sources.access`), imported where a URL
is read.
"""

from __future__ import annotations

import fnmatch
import io
import posixpath
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias, TypeVar

from embq.core.errors import SourceError, UsageError
from embq.core.storage.beneath import require_regular
from embq.core.storage.objects import RangedFile
from embq.core.storage.paths import Place, is_in_bucket, is_url, place

PIECE_BYTES = 1 << 20
"""Bytes of a request; as many as the blocks that are fetched ahead have."""

AT_ONCE = 16
"""Remote files that are looked at at a time."""

T = TypeVar("T")
R = TypeVar("R")


class RemoteStatus(NamedTuple):
    """Size of a remote file, and its version in place of a time: ETag or generation."""

    st_size: int
    st_mtime_ns: str


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or folder behind a URL, which has no slash at its end.

    Attributes:
        listed_status: status by a listing or an earlier look, which reading takes for granted; `stat` asks.
    """

    url: str
    listed_status: RemoteStatus | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self.url)

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> RemotePath:
        """The name without its last part."""
        return RemotePath(posixpath.dirname(self.url))

    def stat(self) -> RemoteStatus:
        """Size and version now; FileNotFoundError, or SourceError if the storage does not answer."""
        try:
            return RemotePath(self.url).status()
        except SourceError as error:
            if error.code == "source_missing":
                raise FileNotFoundError(error.message) from error
            raise

    def status(self) -> RemoteStatus:
        """The known status, or the one of now; SourceError if there is no such file, or the storage fails."""
        from embq.sources.access.listings import stat

        return self.listed_status or RemoteStatus(*stat(self.url))

    def resolved(self) -> RemotePath:
        """The same file with a known status; SourceError as of `status`."""
        return RemotePath(self.url, self.status())

    def is_file(self) -> bool:
        """True for a file; SourceError if the storage does not answer."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        except SourceError as error:
            if error.code == "not_a_file":
                return False
            raise
        return True

    def is_dir(self) -> bool:
        """True for a folder in which there is anything; SourceError as of `is_file`."""
        from embq.sources.access.listings import is_folder

        try:
            return is_folder(self.url)
        except SourceError as error:
            if error.code != "source_missing":
                raise
            return False

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """The files directly below this folder that match, each with its status."""
        from embq.sources.access.listings import list_folder

        for name, status in list_folder(self.url):
            if status is not None and fnmatch.fnmatchcase(name, pattern):
                yield RemotePath(f"{self.url}/{name}", RemoteStatus(*status))

    def all_below(self) -> Iterator[RemotePath]:
        """The files at any depth, each with its status."""
        from embq.sources.access.listings import statuses_below

        for name, status in statuses_below(self.url):
            yield RemotePath(f"{self.url}/{name}", RemoteStatus(*status))

    def open(self, first: int = 0, last: int | None = None, piece_bytes: int = PIECE_BYTES) -> io.BufferedReader:
        """A seekable file for reading. SourceError if the storage fails.

        Args:
            first, last: the part that is read ahead, up to the end where `last` is None.
            piece_bytes: fewest bytes of a request outside of it.
        """
        from embq.sources.access.ranged_reads import RangesAhead
        from embq.sources.interface import unwatched

        size = self.status().st_size
        last = size if last is None else min(last, size)
        ranges = RangesAhead(self.url, size, first=first, last=last, on_progress=unwatched)
        return io.BufferedReader(RangedFile(ranges, size), piece_bytes)


FilePath: TypeAlias = Path | RemotePath
"""A plain file or folder of a collection."""


def located(text: str | Place) -> Place:
    """The place of embeddings that a user names; UsageError for URLs that are in no bucket."""
    if is_url(str(text)) and not is_in_bucket(str(text)):
        scheme = str(text).partition(":")[0].lower()
        raise UsageError(
            f"an index is made of embeddings in folders and buckets, not over {scheme}://",
            next_step="copy the files to a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, and name that",
        )
    return place(text)


@contextmanager
def readable(path: FilePath) -> Iterator[str | IO[bytes]]:
    """A file in the form in which libraries that read parts of it take it: its path, or an open object.

    Raises OSError if a remote file is another one than it was known to be, at the end of the block.
    """
    if isinstance(path, Path):
        yield str(require_regular(path))
        return
    path = path.resolved()
    with path.open() as file:
        yield file
    require_same(path)


def require_same(path: RemotePath) -> None:
    """Raise OSError if a file is another one than it was known to be."""
    if path.listed_status is not None and path.stat() != path.listed_status:
        raise OSError(f"it was written again while it was read: its version was {path.listed_status.st_mtime_ns}")


def each(call: Callable[[T], R], items: Sequence[T], *, remote: bool) -> Iterator[R]:
    """The result of `call` for each item, in order; if they are remote, several at a time."""
    if not remote:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(call, items)


def name_below(folder: Place | RemotePath, path: Place | RemotePath) -> str:
    """The path of a file relative to a folder that it is in."""
    return str(path).removeprefix(str(folder)).lstrip("/")
