"""The client libraries of object stores: one client for each scheme, and what its errors mean.

Credentials come from where each store's own tools take them; none is held here.
"""

from __future__ import annotations

import errno
from functools import cache
from typing import Any

from core.errors import AwayError, ConfigError, OutputError

NEEDED = {"s3": "embq[s3]", "gs": "embq[gcs]"}
"""Scheme -> what has to be installed to write there."""

CONNECT_S, ANSWER_S = 10, 60
"""Seconds without a connection, and without an answer, after which a request has failed."""
ATTEMPTS = 5
"""Of one request; the client libraries wait up to 20 s between them, and longer each time."""


@cache
def connect(scheme: str) -> Any:
    """The client of a scheme, the same one for all threads of this process; ConfigError where it is not installed."""
    try:
        if scheme == "s3":
            import s3fs

            return s3fs.S3FileSystem(
                use_listings_cache=False,
                skip_instance_cache=True,
                config_kwargs={
                    "connect_timeout": CONNECT_S,
                    "read_timeout": ANSWER_S,
                    "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
                },
            )
        import aiohttp
        from gcsfs.core import GCSFileSystem

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S)
        # Not gcsfs's class for zonal buckets, which asks another service about the bucket before each call.
        return GCSFileSystem(
            use_listings_cache=False, skip_instance_cache=True, requests_timeout=timeout, consistency="md5"
        )
    except ImportError as error:
        raise ConfigError(
            f"writing to {scheme}:// needs a package that is not installed: {error}",
            next_step=f"pip install '{NEEDED[scheme]}'",
        ) from error


def translate(url: str, error: Exception) -> Exception:
    """What a client library's error is to embq; `url` has no credentials in it."""
    status, told = http_status(error), _one_line(error)
    if isinstance(error, (ConfigError, AwayError, TypeError, AttributeError, LookupError, NotImplementedError)):
        return error  # told already, or a bug
    if isinstance(error, FileExistsError) or status == 412:
        return FileExistsError(errno.EEXIST, "it is there already", url)
    if isinstance(error, FileNotFoundError) or status == 404:
        bucket = "bucket" in told and "exist" in told
        return FileNotFoundError(
            errno.ENOENT, "the bucket does not exist" if bucket else "there is no such object", url
        )
    if isinstance(error, PermissionError) or status in (401, 403) or told.startswith("Forbidden"):
        return PermissionError(errno.EACCES, told, url)
    if type(error).__name__ in ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError"):
        return PermissionError(errno.EACCES, f"this machine has no credentials for {url.partition(':')[0]}://", url)
    if status is not None and 400 <= status < 500 and status not in (408, 409, 429):
        return OutputError(f"{url}: the store refuses the request: {told}")
    if isinstance(error, OSError) and error.errno not in (None, errno.EBUSY, errno.EIO, errno.ETIMEDOUT):
        return error  # of this machine's own files
    return AwayError(f"{url}: the store does not answer: {told}", next_step="check the network and the store")


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status that an error of aiohttp, botocore or gcsfs carries, or the one that it was made of."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = next((s for name in ("status", "code") if isinstance(s := getattr(error, name, None), int)), None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
