"""URLs of inputs: allowed schemes, and their parts. Does not use the network.

Only schemes of network storage are read; chained URLs ("zip::...") and fsspec's other protocols are refused, because
a unit comes over the network and some of those run commands or read this machine.
"""

from __future__ import annotations

import posixpath
from urllib.parse import unquote, urlsplit

from embq.core.errors import SourceError
from embq.core.storage.paths import is_url

SCHEMES = {
    "http": "embq[http]",
    "https": "embq[http]",
    "s3": "embq[s3]",
    "s3a": "embq[s3]",
    "gs": "embq[gcs]",
    "gcs": "embq[gcs]",
    "hdfs": "pyarrow and a Hadoop client",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "oci": "ocifs",
    "oss": "ossfs",
    "sftp": "paramiko",
}
"""Scheme -> package to install."""

_WITH_HOST = ("hdfs", "sftp")
"""Schemes whose file systems are of one host, and name files without it."""


def scheme_of(url: str) -> str:
    """The scheme in lower case."""
    return url.partition("://")[0].lower()


def host_of(url: str) -> str:
    """The host with its port, or the bucket."""
    return urlsplit(url).netloc


def is_http(url: str) -> bool:
    """True if the scheme is http or https, where nothing but a file can be relied on: no folders, no listings."""
    return scheme_of(url) in ("http", "https")


def names_host(url: str) -> bool:
    """True if a URL's file system is that of one host, and names files without it."""
    return scheme_of(url) in _WITH_HOST


def walks_itself(url: str) -> bool:
    """True if a folder is walked level by level; other storage lists all below it at once."""
    return is_http(url) or names_host(url)


def check_url(url: str) -> None:
    """Raise SourceError for a URL that is not read: `shard_scheme_denied` by its scheme, else `source_denied`."""
    if "::" in url or scheme_of(url) not in SCHEMES:
        raise SourceError(
            f"{url!r}: URLs of this kind are not read",
            code="shard_scheme_denied",
            next_step=f"name a local path, or a URL that begins with {', '.join(f'{s}://' for s in list(SCHEMES)[:7])}",
        )
    if not urlsplit(url).netloc and scheme_of(url) != "hdfs":
        raise SourceError(
            f"{url!r} names no bucket and no server",
            code="source_denied",
            next_step=f"write {scheme_of(url)}://NAME/PATH",
        )
    if ".." in unquote(urlsplit(url).path).split("/"):
        raise SourceError(f"{url!r}: a URL with '..' in it is not read", code="source_denied")
    try:
        _ = urlsplit(url).port if is_http(url) or names_host(url) else None
    except ValueError as error:
        raise SourceError(f"{url!r}: {error}", code="source_denied", next_step="correct the port") from error


def base_name(url: str) -> str:
    """The last part of the path, without the query of an http URL."""
    return posixpath.basename(path_of(url))


def path_of(url: str) -> str:
    """The URL without the query that an http URL may have; names of other storage may hold a question mark."""
    return url.partition("?")[0] if is_http(url) else url


def is_inside(url: str, root: str) -> bool:
    """True if a URL is `root` or lies below it."""
    return url == root.rstrip("/") or url.startswith(root.rstrip("/") + "/")


def check_source(source: str) -> None:
    """Raise SourceError `shard_scheme_denied` for a command, or a URL of a scheme that is not read."""
    if source.startswith("pipe:"):
        raise SourceError(
            f"{source!r}: commands are not run",
            code="shard_scheme_denied",
            next_step="name the file itself: s3://BUCKET/KEY, gs://BUCKET/KEY, https://HOST/PATH, "
            "hdfs://NAMENODE/PATH, or its path on a disk",
        )
    if is_url(source):
        check_url(source)
