"""Plain files behind URLs, with the part of the interface of `pathlib.Path` that collections need; read in ranges.

Versions, retries, parallel requests and allowed hosts are those of inputs (`embq.sources.access`), imported where a URL
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
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from embq.core.errors import SourceError, UsageError
from embq.core.storage.beneath import require_regular
from embq.core.storage.objects import RangedFile
from embq.core.storage.paths import Place, place

if TYPE_CHECKING:
    from embq.sources.interface import FileStatus

PIECE_BYTES = 1 << 20
"""Bytes of a request; as many as the blocks that are fetched ahead have."""

WHOLE_BYTES = 256 << 20
"""Largest file that is read from a server that sends no ranges: it is in memory."""

SUFFIXES = (".npy", ".parquet", ".h5", ".hdf5")
"""Endings of the names that are files over http, where nothing else tells files and folders apart."""


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
        if self._is_http:
            return self.name.endswith(SUFFIXES)
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

        if self._is_http:
            return not self.is_file() and next(self._entries(), None) is not None
        try:
            return is_folder(self.url)
        except SourceError as error:
            if error.code != "source_missing":
                raise
            return False

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """The files directly below this folder that match, each with its status."""
        entries = [(name, status) for name, status in self._entries() if fnmatch.fnmatchcase(name, pattern)]
        files = [self._file(name, status) for name, status in entries if status is not None]
        return each(RemotePath.resolved, files, remote=True)

    def all_below(self) -> Iterator[RemotePath]:
        """The files at any depth, each with its status where the listing has it."""
        from embq.sources.access.listings import statuses_below

        return (self._file(*entry) for entry in statuses_below(self._folder))

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
        ranges = RangesAhead(self.url, size, first=first, last=last, on_progress=unwatched, most_whole=WHOLE_BYTES)
        return io.BufferedReader(RangedFile(ranges, size), piece_bytes)

    @property
    def _is_http(self) -> bool:
        return self.url.startswith(("http://", "https://"))

    @property
    def _folder(self) -> str:
        return f"{self.url}/" if self._is_http else self.url

    def _entries(self) -> Iterator[tuple[str, FileStatus | None]]:
        from embq.sources.access.listings import list_folder

        try:
            yield from list_folder(self._folder)
        except SourceError as error:
            if error.code != "source_missing":
                raise

    def _file(self, name: str, status: FileStatus) -> RemotePath:
        listed = RemoteStatus(*status) if status.version else None  # a page of http tells names alone
        return RemotePath(f"{self.url}/{name}", listed)


FilePath: TypeAlias = Path | RemotePath
"""A plain file or folder of a collection."""


def located(text: str | Place | RemotePath) -> Place | RemotePath:
    """The place of embeddings that a user names; UsageError for URLs that are not read."""
    if isinstance(text, RemotePath) or not str(text).lower().startswith(("http://", "https://")):
        return text if isinstance(text, RemotePath) else place(text)
    scheme, _, rest = str(text).partition("://")
    if "@" in rest.partition("/")[0] or set("?#") & set(rest):
        raise UsageError(
            f"{scheme.lower()}:// with a user, a key or a query in it is not taken: it would stand in the index",
            next_step="copy the files to a folder or a bucket",
        )
    return RemotePath(f"{scheme.lower()}://{rest.rstrip('/')}")


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
