"""Clients of object stores, one for each scheme and process, and the translation of their errors.

Credentials come from where each store's own tools take them; none is held here.
"""

from __future__ import annotations

import errno
from functools import cache
from typing import Any

from embq.core.errors import AwayError, ConfigError, OutputError
from embq.core.extras import missing

NEEDED = {"s3": "s3fs", "gs": "gcsfs"}
"""Scheme -> the package that has to be installed to write there, or to open an index there."""

CONNECT_S, ANSWER_S = 10, 60
"""Seconds without a connection, and without an answer, after which a request has failed."""
ATTEMPTS = 5
"""Attempts of one request; the client libraries wait up to 20 s between them, and longer each time."""


@cache
def connect(scheme: str) -> Any:
    """The client of a scheme, the same one for all threads of this process; ConfigError if it is not installed."""
    try:
        if scheme == "s3":
            return s3_client(connect_s=CONNECT_S, answer_s=ANSWER_S, attempts=ATTEMPTS)
        import aiohttp
        from gcsfs.core import GCSFileSystem

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S)
        # Not gcsfs's class for zonal buckets, which asks another service about the bucket before each call.
        return GCSFileSystem(
            use_listings_cache=False, skip_instance_cache=True, requests_timeout=timeout, consistency="md5"
        )
    except ImportError as error:
        raise missing(
            NEEDED[scheme],
            f"{scheme}:// needs a package that is not installed: {error}",
        ) from error


def s3_client(*, connect_s: float, answer_s: float, attempts: int) -> Any:
    """A new client of S3 that caches no listings; ImportError if s3fs is not installed."""
    import s3fs

    return s3fs.S3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={
            "connect_timeout": connect_s,
            "read_timeout": answer_s,
            "retries": {"mode": "standard", "total_max_attempts": attempts},
        },
    )


def translate(url: str, error: Exception) -> Exception:
    """The error that embq raises for an error of a client library; `url` has no credentials in it."""
    status, message = http_status(error), _one_line(error)
    if isinstance(error, (ConfigError, AwayError, TypeError, AttributeError, LookupError, NotImplementedError)):
        return error  # translated already, or a bug
    if isinstance(error, FileExistsError) or status == 412:
        return FileExistsError(errno.EEXIST, "it is there already", url)
    if isinstance(error, FileNotFoundError) or status == 404:
        bucket = "bucket" in message and "exist" in message
        return FileNotFoundError(
            errno.ENOENT, "the bucket does not exist" if bucket else "there is no such object", url
        )
    if isinstance(error, PermissionError) or status in (401, 403) or message.startswith("Forbidden"):
        return PermissionError(errno.EACCES, message, url)
    if type(error).__name__ in ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError"):
        return PermissionError(errno.EACCES, f"this machine has no credentials for {url.partition(':')[0]}://", url)
    if status is not None and 400 <= status < 500 and status not in (408, 409, 429):
        return OutputError(f"{url}: the store refuses the request: {message}")
    if isinstance(error, OSError) and error.errno not in (None, errno.EBUSY, errno.EIO, errno.ETIMEDOUT):
        return error  # of this machine's own files
    return AwayError(f"{url}: the store does not answer: {message}", next_step="check the network and the store")


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status of an error, or of the first error among its causes that has one."""
    while error is not None:
        if (status := own_status(error)) is not None:
            return status
        error = error.__cause__
    return None


def own_status(error: BaseException) -> int | None:
    """The HTTP status that an error of aiohttp, botocore, gcsfs or requests carries itself."""
    for name in ("status", "code"):  # aiohttp's second warns of its age
        if isinstance(status := getattr(error, name, None), int):
            return status
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
