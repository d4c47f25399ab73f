"""fsspec file systems, one for each scheme and host, and the translation of their errors.

Credentials come from where each storage's own tools take them.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from functools import cache
from typing import Any, TypeGuard

from embq.core.errors import SourceError
from embq.core.storage.object_clients import own_status, s3_client
from embq.core.storage.paths import is_url
from embq.sources.access.allowed_hosts import RefusedHost, current, endpoint
from embq.sources.access.urls import SCHEMES, check_url, host_of, is_http, names_host, scheme_of

CONNECT_S, ANSWER_S = 10, 20
"""Seconds without a connection, and without an answer, after which a request has failed."""


def filesystem(url: str) -> Any:
    """The file system of a URL, the same one for all threads of this process.

    Raises SourceError `shard_scheme_denied` or `source_denied`; ImportError if a package is missing.
    """
    check_url(url)
    return _connect(scheme_of(url), host_of(url) if names_host(url) else "")


def bare(url: str) -> str:
    """The URL as its file system wants it."""
    if names_host(url):  # fsspec takes a question mark in a path for a query, also if it stands for a character
        return "/" + url.partition("://")[2].partition("/")[2]
    return str(filesystem(url)._strip_protocol(url))


def url_of(like: str, name: str) -> str:
    """The URL of the file `name` in the file system of the URL `like`; the inverse of `bare`."""
    if is_url(name):
        return name
    host = host_of(like) + "/" if names_host(like) else ""
    return f"{scheme_of(like)}://{host}{name.lstrip('/')}"


@cache
def _connect(scheme: str, host: str) -> Any:
    """One file system for each scheme and host, for all threads of this process."""
    import fsspec

    if scheme in ("http", "https"):
        from embq.sources.access.clients.http import HttpClient

        return HttpClient(connect_s=CONNECT_S, answer_s=ANSWER_S)
    if scheme in ("s3", "s3a"):
        return s3_client(connect_s=CONNECT_S, answer_s=ANSWER_S, attempts=2)
    if scheme in ("gs", "gcs"):
        from embq.sources.access.clients.gcs import GcsClient

        return GcsClient(connect_s=CONNECT_S, answer_s=ANSWER_S)
    if host:
        return fsspec.core.url_to_fs(f"{scheme}://{host}/", **_connected(scheme, host))[0]
    return fsspec.filesystem(scheme)


def _connected(scheme: str, host: str) -> dict[str, Any]:
    """Options that keep the client of a host to an address that may be connected to; RefusedHost if it has others.

    libhdfs connects by itself, to hosts that Hadoop's configuration of this machine may know by other names.
    """
    name, port = endpoint(f"{scheme}://{host}")
    if scheme == "hdfs":
        with suppress(OSError):
            current().resolve(name, port or 0)
        return {}
    (address, *_) = current().resolve(name, port or 0)
    return {"sock": socket.create_connection((address, port or 0), CONNECT_S)}


os.register_at_fork(after_in_child=_connect.cache_clear)  # fsspec refuses clients of a parent process


# --- errors ---


def translate(url: str, error: Exception) -> SourceError:
    """The SourceError for an error of fsspec or a client library; `transient` if another attempt may help."""
    if isinstance(error, ImportError):
        needed = SCHEMES.get(scheme_of(url), "")
        return SourceError(
            f"{url}: reading {scheme_of(url)}:// needs a package that is not installed: {error}",
            code="storage_missing",
            next_step=f"pip install '{needed}'",
        )
    if scheme_of(url) == "hdfs" and "Unable to load lib" in str(error):
        return SourceError(
            f"{url}: reading hdfs:// needs the native library of a Hadoop client (libhdfs) and a Java runtime, "
            "and this machine has none",
            code="storage_missing",
            next_step="set JAVA_HOME and HADOOP_HOME, or copy the files to a disk with hdfs dfs -get",
        )
    if isinstance(error, RefusedHost):
        return SourceError(f"{url}: {error}", code="source_denied", next_step=error.next_step)
    if is_unreached(error):
        has_host = is_http(url) or names_host(url)
        return SourceError(
            f"{url}: no connection to {host_of(url) if has_host else 'the storage'}: "
            f"{getattr(error, 'strerror', None) or _one_line(error)}",
            code="source_unreadable",
            next_step=f"check {'the host in the name' if has_host else 'the credentials'}, the network, "
            "and that the server runs",
            transient=True,
        )
    status = own_status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return missing(url)
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
    certain |= any(cls.__name__ == "InvalidURL" for cls in type(error).__mro__)  # of aiohttp
    return SourceError(
        f"{url}: cannot be read: {_one_line(error)}",
        code="source_unreadable",
        next_step="check the network and the server",
        transient=not certain and not isinstance(error, (TypeError, NotImplementedError)),
    )


def is_unreached(error: Exception) -> TypeGuard[OSError]:
    """True if no connection was made: it was refused, or the name of the host is unknown (`socket.gaierror`)."""
    number = error.errno if isinstance(error, OSError) else None
    return number is not None and (number < 0 or number in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH))


def missing(url: str) -> SourceError:
    """The error for a file that does not exist."""
    return SourceError(f"{url}: does not exist", code="source_missing", next_step="check the name with the storage")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300] if type(error).__name__ not in text else text[:300]
