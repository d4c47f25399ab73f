"""Files behind URLs, through fsspec: read by parallel ranged requests, each checked for its length.

Only schemes of network storage are read; chained URLs ("zip::...") and fsspec's other protocols are refused, because
a unit comes over the network and some of those run commands or read this machine.
"""

from __future__ import annotations

import io
import mmap
import posixpath
import random
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from core.errors import SourceError
from sources.base import FileStatus, Moved, unwatched

SCHEMES = {
    "http": "embq[http]",
    "https": "embq[http]",
    "s3": "embq[s3]",
    "s3a": "embq[s3]",
    "gs": "embq[gcs]",
    "gcs": "embq[gcs]",
    "hdfs": "pyarrow and a Hadoop client",
    "webhdfs": "requests",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "oci": "ocifs",
    "oss": "ossfs",
    "sftp": "paramiko",
}
"""Scheme -> what has to be installed to read it."""

PARALLEL = 8
"""Requests at a time for one file, as object stores need several connections to fill a network card."""

SMALL_BYTES, LARGE_BYTES = 1 << 20, 8 << 20
"""A range begins small, so that a slow line still moves within a worker's time for one step, and grows on fast ones."""

FAST_S = 1.0
"""A range that came within this time may be twice as long next."""

PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Before a request is made again, each with up to half of it more at random. The worker's reader waits longer."""

LISTED_AFTER = 8
"""Files of one folder are asked for one by one up to this number, then the folder is listed once for all of them."""

_WITH_HOST = ("hdfs", "webhdfs", "sftp")
"""Schemes whose file systems are of one host, and name files without it."""

SAMPLE_MAX_BYTES = 32_000_000
"""Largest file, member or line that is taken as one sample; images.md gives 32 MB as the limit of an encoded image."""

_TIMEOUTS = {"connect": 10, "read": 20}
"""Seconds without an answer after which a request is made again."""

Memory = bytes | mmap.mmap
"""A file in memory: for both, a slice is bytes and an item is a number."""

T = TypeVar("T")


def is_url(path: str) -> bool:
    """Whether a source is a URL and no path of this machine."""
    return "://" in path


def scheme_of(url: str) -> str:
    """The scheme in lower case."""
    return url.partition("://")[0].lower()


def check_url(url: str) -> None:
    """Raise SourceError `shard_scheme_denied` for a URL that is not read, whatever stands behind it."""
    scheme = scheme_of(url)
    if "::" in url or scheme not in SCHEMES:
        raise SourceError(
            f"{url!r}: URLs of this kind are not read",
            code="shard_scheme_denied",
            next_step=f"name a local path, or a URL that begins with {', '.join(f'{s}://' for s in list(SCHEMES)[:7])}",
        )
    if ".." in unquote(urlsplit(url).path).split("/"):
        raise SourceError(f"{url!r}: a URL with '..' in it is not read", code="source_denied")


def base_name(url: str) -> str:
    """The last part of the path, without the query of an http URL."""
    return posixpath.basename(path_of(url))


def path_of(url: str) -> str:
    """The URL without the query that an http URL may have; names of other storage may hold a question mark."""
    return url.partition("?")[0] if scheme_of(url) in ("http", "https") else url


def is_inside(url: str, root: str) -> bool:
    """Whether a URL is `root` or lies below it."""
    return url == root.rstrip("/") or url.startswith(root.rstrip("/") + "/")


# --- what there is ---


def stat(url: str) -> FileStatus:
    """The file's status, asked for now, unless `listings` is in use; SourceError where there is no such file."""
    listings = _LISTINGS.get()
    return _stat_now(url) if listings is None else listings.stat(url)


@contextmanager
def listings() -> Iterator[None]:
    """Within the block, the statuses of many files of one folder of an object store come from one listing of it.

    For planning: an answer may be as old as the listing.
    """
    before = _LISTINGS.set(_Listings())
    try:
        yield
    finally:
        _LISTINGS.reset(before)


def _stat_now(url: str) -> FileStatus:
    info = _asked(url, lambda: _filesystem(url).info(_bare(url)))
    if info.get("type") == "directory":
        raise SourceError(f"{url}: is a folder", code="not_a_file", next_step="name a file")
    return _status(url, info)


def is_folder(url: str) -> bool:
    """Whether a URL names a folder. Over http, only a name that ends in a slash does: others are files."""
    if scheme_of(url) in ("http", "https"):
        return path_of(url).endswith("/")
    return bool(_asked(url, lambda: _filesystem(url).info(_bare(url))).get("type") == "directory")


def list_folder(url: str) -> Iterator[tuple[str, FileStatus | None]]:
    """(name, status) of what a folder holds, by name; None as the status of a folder in it."""
    found = _asked(url, lambda: _filesystem(url).ls(_bare(url), detail=True))
    for info in sorted(found, key=lambda info: str(info["name"])):
        name = posixpath.basename(path_of(str(info["name"])).rstrip("/"))
        if name:
            yield name, None if info.get("type") == "directory" else _status(url, info, certain=False)


def walk(url: str) -> Iterator[tuple[str, int]]:
    """(path relative to the folder, bytes) of every file below it, sorted by path."""
    found = _asked(url, lambda: _filesystem(url).find(_bare(url), detail=True))
    root = _bare(url).rstrip("/") + "/"
    for name in sorted(found):
        yield str(name).removeprefix(root), int(found[name].get("size") or 0)


def match(pattern: str) -> list[str]:
    """The URLs of the files that a pattern with *, ** or [] matches, sorted."""
    found = _asked(pattern, lambda: _filesystem(pattern).glob(_bare(pattern), detail=True))
    return sorted(_url_of(pattern, str(name)) for name, info in found.items() if info.get("type") != "directory")


class _Listings:
    """What the folders hold of which many files were asked for."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._listed: dict[str, dict[str, FileStatus]] = {}

    def stat(self, url: str) -> FileStatus:
        folder, _, name = url.rpartition("/")
        if scheme_of(url) in ("http", "https"):
            return _stat_now(url)
        if folder not in self._listed:
            self._asked[folder] += 1
            if self._asked[folder] <= LISTED_AFTER:
                return _stat_now(url)
            # One folder at a time: inputs are named folder by folder, and a listing can be large.
            self._listed = {folder: {n: status for n, status in list_folder(folder) if status is not None}}
        try:
            return self._listed[folder][name]
        except KeyError:
            raise _missing(url) from None


_LISTINGS: ContextVar[_Listings | None] = ContextVar("_LISTINGS", default=None)


def _status(url: str, info: dict[str, Any], *, certain: bool = True) -> FileStatus:
    size = info.get("size")
    if size is None:
        if not certain:
            return FileStatus(0, "")
        raise SourceError(
            f"{url}: the server does not say how long this file is",
            code="source_unreadable",
            next_step="serve it with a Content-Length, and without a Content-Encoding",
        )
    for name in ("ETag", "etag", "md5Hash", "Content-MD5", "generation", "LastModified", "Last-Modified", "mtime"):
        if info.get(name):
            version = info[name].isoformat() if hasattr(info[name], "isoformat") else str(info[name])
            return FileStatus(int(size), f"{version.strip(chr(34))}-{size}")
    return FileStatus(int(size), f"-{size}")


# --- bytes ---


def load(url: str, size: int, moved: Moved = unwatched) -> Memory:
    """All `size` bytes of a file, by parallel requests; SourceError where other bytes came."""
    if size == 0:
        return b""
    if _host(url) in _WITHOUT_RANGES:
        return _load_at_once(url, size)
    whole = mmap.mmap(-1, size)
    with memoryview(whole) as view:
        for start, piece in _pieces(url, 0, size):
            view[start : start + len(piece)] = piece
            moved()
    return whole


def _pieces(url: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of the ranges between two offsets, in order, with `PARALLEL` of them under way."""
    under_way: deque[tuple[int, Future[bytes]]] = deque()
    length = SMALL_BYTES

    def timed(at: int, end: int) -> bytes:
        nonlocal length
        began = time.monotonic()
        data = read_range(url, at, end)
        fast = time.monotonic() - began < FAST_S
        length = min(LARGE_BYTES, 2 * (end - at)) if fast else SMALL_BYTES
        return data

    try:
        if start < stop:  # alone: it tells whether the server knows ranges
            end = min(stop, start + length)
            yield start, timed(start, end)
            start = end
        while start < stop or under_way:
            while start < stop and len(under_way) < PARALLEL:
                end = min(stop, start + length)
                under_way.append((start, _pool().submit(timed, start, end)))
                start = end
            at, future = under_way.popleft()
            yield at, future.result()
    finally:
        for _, future in under_way:
            future.cancel()


def read_range(url: str, start: int, stop: int) -> bytes:
    """The bytes from `start` up to `stop`; SourceError `source_unreadable` (transient) where others came."""
    if start >= stop:
        return b""

    def request() -> bytes:
        data = _filesystem(url).cat_file(_bare(url), start=start, end=stop)
        if len(data) != stop - start:
            # More than was asked for: the server knows no ranges, and has sent all of it.
            if scheme_of(url) in ("http", "https") and len(data) >= stop:
                _WITHOUT_RANGES.add(_host(url))
                return bytes(data[start:stop])
            raise EOFError(f"{len(data)} bytes came instead of {stop - start}")
        return bytes(data)

    return _asked(url, request)


def _load_at_once(url: str, size: int) -> bytes:
    """All of a file from a server that knows no ranges."""

    def request() -> bytes:
        data = bytes(_filesystem(url).cat_file(_bare(url)))
        if len(data) != size:
            raise EOFError(f"{len(data)} bytes came instead of {size}")
        return data

    return _asked(url, request)


class RemoteFile(io.RawIOBase):
    """A file for reading, which fetches ahead while it is read in order.

    Args:
        url: what to read.
        size: its bytes.
        first, last: the part that will be read in order; nothing beyond it is fetched ahead.
        moved: called for each range that has come in.
    """

    _AHEAD = 3
    _KEPT = 8

    def __init__(self, url: str, size: int, *, first: int, last: int, moved: Moved) -> None:
        super().__init__()
        self._url, self._size, self._moved = url, size, moved
        self._first, self._last = first, last
        self._at = 0
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._whole: Memory | None = None

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As every file does."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As every file does; the number of bytes read."""
        view = memoryview(buffer).cast("B")
        if self._at >= self._size or not len(view):
            return 0
        if self._whole is None and _host(self._url) in _WITHOUT_RANGES:
            self._whole = load(self._url, self._size, self._moved)
        data: memoryview | bytes
        if self._whole is not None:
            data = self._whole[self._at : self._at + len(view)]
        elif self._first <= self._at < self._last:
            number, inside = divmod(self._at - self._first, SMALL_BYTES)
            block = self._block(number)
            data = memoryview(block)[inside : inside + len(view)]
        else:
            data = read_range(self._url, self._at, min(self._size, self._at + len(view)))
            self._moved()
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _block(self, number: int) -> bytes:
        in_order = number - 1 in self._blocks or not self._blocks
        for wanted in range(number, number + (self._AHEAD if in_order else 0) + 1):
            start = self._first + wanted * SMALL_BYTES
            if wanted not in self._blocks and start < self._last:
                stop = min(self._last, start + SMALL_BYTES)
                self._blocks[wanted] = _pool().submit(read_range, self._url, start, stop)
        future = self._blocks[number]
        fresh = not future.done()
        data = future.result()
        if fresh:
            self._moved()
        while len(self._blocks) > self._KEPT:
            self._blocks.popitem(last=False)
        return data


# --- asking, again where that may help ---


def _asked(url: str, ask: Callable[[], T]) -> T:
    """What `ask` gives, after a few more attempts where the storage may only be busy; else SourceError."""
    for pause in (*PAUSES_S, None):
        try:
            return ask()
        except SourceError:
            raise
        except Exception as error:
            translated = _translate(url, error)
            if not translated.transient or pause is None:
                raise translated from error
            time.sleep(pause * random.uniform(1.0, 1.5))
    raise AssertionError("unreachable")


def _translate(url: str, error: Exception) -> SourceError:
    if isinstance(error, ImportError):
        needed = SCHEMES.get(scheme_of(url), "")
        return SourceError(
            f"{url}: reading {scheme_of(url)}:// needs a package that is not installed: {error}",
            code="storage_missing",
            next_step=f"pip install '{needed}'",
        )
    status = _http_status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return _missing(url)
    if isinstance(error, PermissionError) or status in (401, 403):
        return SourceError(
            f"{url}: may not be read: {_one_line(error)}",
            code="source_denied",
            next_step="check the credentials of this machine, and the rights of the bucket or server",
        )
    if status == 412:
        return SourceError(f"{url}: changed while it was being read", code="source_changed")
    if type(error).__name__ == "NoCredentialsError":
        return SourceError(
            f"{url}: this machine has no credentials for {scheme_of(url)}://",
            code="source_denied",
            next_step="set them up as for the storage's own tools, for instance AWS_ACCESS_KEY_ID",
        )
    certain = status is not None and 400 <= status < 500 and status not in (408, 429)
    return SourceError(
        f"{url}: cannot be read: {_one_line(error)}",
        code="source_unreadable",
        next_step="check the network and the server",
        transient=not certain and not isinstance(error, (TypeError, NotImplementedError)),
    )


def _http_status(error: Exception) -> int | None:
    """The HTTP status that an error of aiohttp, botocore or gcsfs carries."""
    for name in ("status", "code"):  # aiohttp's second warns of its age
        if isinstance(status := getattr(error, name, None), int):
            return status
    response = getattr(error, "response", None)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    return status if isinstance(status, int) else None


def _missing(url: str) -> SourceError:
    return SourceError(f"{url}: does not exist", code="source_missing", next_step="check the name with the storage")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300] if type(error).__name__ not in text else text[:300]


# --- connections ---

_WITHOUT_RANGES: set[str] = set()
"""Servers that send the whole file whatever range is asked for."""


def _host(url: str) -> str:
    return urlsplit(url).netloc


def _filesystem(url: str) -> Any:
    check_url(url)
    scheme = scheme_of(url)
    host = urlsplit(url).netloc if scheme in _WITH_HOST else ""
    return _connect(scheme, host)


@cache
def _connect(scheme: str, host: str) -> Any:
    """One file system for each scheme and host, for all threads of this process."""
    import fsspec

    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUTS["connect"], sock_read=_TIMEOUTS["read"])
        # A shard that the server compresses on the way would have another length than it says.
        headers = {"Accept-Encoding": "identity"}
        options = {"use_listings_cache": False, "client_kwargs": {"timeout": timeout, "headers": headers}}
    elif scheme in ("s3", "s3a"):
        timeouts = {"connect_timeout": _TIMEOUTS["connect"], "read_timeout": _TIMEOUTS["read"]}
        options = {
            "use_listings_cache": False,
            "config_kwargs": {**timeouts, "retries": {"mode": "standard", "total_max_attempts": 2}},
        }
    elif scheme in ("gs", "gcs"):
        options = {"use_listings_cache": False}
    elif host:
        return fsspec.core.url_to_fs(f"{scheme}://{host}/")[0]
    return fsspec.filesystem(scheme, **options)


def _url_of(like: str, name: str) -> str:
    """The URL of what a file system of the URL `like` calls `name`; the inverse of `_bare`."""
    if is_url(name):
        return name
    host = urlsplit(like).netloc + "/" if scheme_of(like) in _WITH_HOST else ""
    return f"{scheme_of(like)}://{host}{name.lstrip('/')}"


def _bare(url: str) -> str:
    """The URL as its file system wants it."""
    return str(_filesystem(url)._strip_protocol(url))


_POOL_LOCK = threading.Lock()
_POOL: list[ThreadPoolExecutor] = []


def _pool() -> ThreadPoolExecutor:
    """The threads of all requests of this process: enough for two files at a time."""
    with _POOL_LOCK:
        if not _POOL:
            _POOL.append(ThreadPoolExecutor(2 * PARALLEL, thread_name_prefix="embq-storage"))
    return _POOL[0]


def fetch_all(urls: list[str], sizes: list[int | None], moved: Moved) -> Iterator[bytes | SourceError]:
    """The content of many small files in order, several at a time; an error in the place of one that cannot be read.

    Args:
        sizes: bytes of each, more than which are not fetched; None fetches what there is.
    """
    ask = [partial(_small, url, size) for url, size in zip(urls, sizes, strict=True)]
    under_way: deque[Future[bytes | SourceError]] = deque()
    for number, call in enumerate(ask):
        under_way.append(_pool().submit(call))
        if number >= 2 * PARALLEL:
            yield under_way.popleft().result()
            moved()
    while under_way:
        yield under_way.popleft().result()
        moved()


def _small(url: str, size: int | None) -> bytes | SourceError:
    def request() -> bytes:
        return bytes(_filesystem(url).cat_file(_bare(url)))

    try:
        return b"" if size is not None and size > SAMPLE_MAX_BYTES else _asked(url, request)
    except SourceError as error:
        return error
