"""Status of files, content of folders and matches of patterns behind URLs."""

from __future__ import annotations

import posixpath
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from embq.core.errors import SourceError
from embq.sources.access.filesystems import bare, filesystem, missing, url_of
from embq.sources.access.patterns import matcher, simplified
from embq.sources.access.ranged_reads import with_retries
from embq.sources.access.urls import is_http, path_of, walks_itself
from embq.sources.interface import FileStatus

LISTED_AFTER = 8
"""Files of a folder that are looked up one by one, before the folder is listed once for all of them."""

_VERSIONS = (
    *("generation", "ETag", "etag", "md5Hash", "Content-MD5"),
    *("LastModified", "Last-Modified", "mtime", "modificationTime"),
)
"""Properties of a file that change whenever its content does, the surest first. At Google an ETag changes with the
metadata as well, a generation does not."""


def stat(url: str) -> FileStatus:
    """The file's status, asked for now, unless within `cached_listings`; SourceError if there is no such file."""
    cache = _CACHE.get()
    return _stat_now(url) if cache is None else cache.stat(url)


@contextmanager
def cached_listings() -> Iterator[None]:
    """Cache listings within the block: a folder of an object store is listed once for many of its files.

    For planning: a status may be as old as the listing.
    """
    token = _CACHE.set(_ListingCache())
    try:
        yield
    finally:
        _CACHE.reset(token)


def _stat_now(url: str) -> FileStatus:
    info = with_retries(url, lambda: filesystem(url).info(bare(url)))
    if info.get("type") == "directory":
        raise SourceError(f"{url}: is a folder", code="not_a_file", next_step="name a file")
    return _status(url, info)


def is_folder(url: str) -> bool:
    """True if a URL names a folder. Over http, only a name that ends in a slash does: others are files."""
    if is_http(url):
        return path_of(url).endswith("/")
    return bool(with_retries(url, lambda: filesystem(url).info(bare(url))).get("type") == "directory")


def list_folder(url: str) -> Iterator[tuple[str, FileStatus | None]]:
    """(name, status) of the entries of a folder, by name; None as the status of a folder in it."""
    infos = with_retries(url, lambda: filesystem(url).ls(bare(url), detail=True))
    for info in sorted(infos, key=lambda info: str(info["name"])):
        path = path_of(str(info["name"])).rstrip("/")
        # A page that lists a folder may link to itself, in another order.
        if (name := posixpath.basename(path)) and path != path_of(url).rstrip("/"):
            yield name, None if info.get("type") == "directory" else _status(url, info, certain=False)


def walk(url: str) -> Sequence[tuple[str, int]]:
    """(path relative to the folder, bytes) of every file below it, sorted by path."""
    cache = _CACHE.get()
    return _walk_now(url) if cache is None else cache.walk(url)


def _walk_now(url: str) -> list[tuple[str, int]]:
    return [(relative, status.size) for relative, status in statuses_below(url)]


def statuses_below(url: str) -> list[tuple[str, FileStatus]]:
    """(path relative to the folder, status) of every file below it, sorted by path; none if there is no folder.

    Over http a page tells names alone: sizes are 0 and versions "".
    """
    if walks_itself(url):
        return sorted(_below(url, sys.maxsize))
    infos = with_retries(url, lambda: filesystem(url).find(bare(url), detail=True))
    root = bare(url).rstrip("/") + "/"
    return [(str(name).removeprefix(root), _status(url, infos[name], certain=False)) for name in sorted(infos)]


def match(pattern: str) -> list[str]:
    """The URLs of the files that a pattern with *, ** or [] matches, sorted."""
    if walks_itself(pattern):
        return _match_below(pattern)
    fits, simple = matcher(bare(pattern)), simplified(bare(pattern))
    infos = with_retries(pattern, lambda: filesystem(pattern).glob(simple, detail=True))
    files = (str(name) for name, info in infos.items() if info.get("type") != "directory")
    return sorted(url_of(pattern, name) for name in files if fits(name))


def _below(url: str, depth: int, relative: str = "") -> Iterator[tuple[str, FileStatus]]:
    """(path relative to where it began, status) of every file in a folder, and below it up to a depth.

    Instead of fsspec's own walk, which leaves out the folders that it cannot list.
    """
    for name, status in list_folder(url):
        if status is not None:
            yield relative + name, status
        elif depth > 1:
            folder = f"{url.rstrip('/')}/{name}" + ("/" if is_http(url) else "")
            yield from _below(folder, depth - 1, f"{relative}{name}/")


def _match_below(pattern: str) -> list[str]:
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    root = literal[: literal.rindex("/") + 1]
    rest = pattern.removeprefix(root)
    fits = matcher(rest)
    depth = sys.maxsize if "**" in rest else rest.count("/") + 1
    try:
        return sorted(root + relative for relative, _ in _below(root, depth) if fits(relative))
    except SourceError as error:
        if error.code == "source_missing":
            return []
        raise


class _ListingCache:
    """Listings of the folder whose files are looked up, and of everything below the folder that was walked last."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._listed: dict[str, dict[str, FileStatus]] = {}
        self._walked: tuple[str, list[tuple[str, int]]] = ("", [])

    def stat(self, url: str) -> FileStatus:
        folder, _, name = url.rpartition("/")
        if is_http(url):
            return _stat_now(url)
        if folder not in self._listed:
            self._requests[folder] += 1
            if self._requests[folder] <= LISTED_AFTER:
                return _stat_now(url)
            # One folder at a time: inputs are named folder by folder, and a listing can be large.
            self._listed = {folder: _statuses(folder)}
        try:
            return self._listed[folder][name]
        except KeyError:
            raise missing(url) from None

    def walk(self, url: str) -> list[tuple[str, int]]:
        if self._walked[0] != url:
            self._walked = (url, _walk_now(url))
        return self._walked[1]


def _statuses(folder: str) -> dict[str, FileStatus]:
    try:
        return {name: status for name, status in list_folder(folder) if status is not None}
    except SourceError as error:
        if error.code != "source_missing":
            raise
        return {}


_CACHE: ContextVar[_ListingCache | None] = ContextVar("_CACHE", default=None)


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
    for name in _VERSIONS:
        if info.get(name):
            version = info[name].isoformat() if hasattr(info[name], "isoformat") else str(info[name])
            return FileStatus(int(size), f"{version.strip(chr(34))}-{size}")
    return FileStatus(int(size), f"-{size}")
