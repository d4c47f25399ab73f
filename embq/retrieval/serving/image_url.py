"""Fetches the image of a query by URL: https from public hosts only, bounded in size, redirects and time.

A server that fetches URLs of its clients can be abused to reach its own network. So the host of every hop is resolved
here, refused if any of its addresses is not public, and connected to by the address that was checked: a second
answer of the name server cannot lead elsewhere.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

from embq.core.answers import Deadline
from embq.core.networks import is_public
from embq.retrieval.serving.http_errors import HttpError

MOST_BYTES = 10_000_000
MOST_SECONDS = 10.0
MOST_HOPS = 3

_CHUNK = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)


def fetch_image(
    url: str, *, allowed: Callable[[str], bool] = is_public, context: ssl.SSLContext | None = None
) -> bytes:
    """The bytes at a URL.

    Args:
        allowed: whether an IP address may be connected to.
        context: trusted certificates; the system's by default.

    Raises:
        HttpError: `image_url_refused` if it may not be fetched, `image_url_failed` if it cannot.
    """
    context = context or ssl.create_default_context()
    deadline = Deadline(MOST_SECONDS)
    for _ in range(MOST_HOPS + 1):
        host, port, target = _checked(url)
        connection = _Pinned(host, port, _address(host, port, allowed), context, deadline)
        try:
            connection.request("GET", target, headers={"User-Agent": "embq", "Accept": "image/*"})
            with connection.getresponse() as answer:
                if answer.status in _REDIRECTS and (location := answer.getheader("Location")):
                    url = urljoin(url, location)
                    continue
                if answer.status != http.client.OK:
                    raise _failed(f"{host} answered {answer.status}")
                return _body(answer)
        except TimeoutError as error:
            raise _failed(f"{host} did not send it within {MOST_SECONDS:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _failed(f"{host}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
    raise _failed(f"more than {MOST_HOPS} redirects")


def _checked(url: str) -> tuple[str, int, str]:
    """Host, port and path of a URL, checked by its syntax."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 443
    except ValueError as error:
        raise _refused(f"it is not a URL: {error}") from error
    if parts.scheme != "https" or not host:
        raise _refused("it does not begin with https://")
    if parts.username is not None or parts.password is not None:
        raise _refused("it holds a user name")
    if any(character <= " " or character == "\x7f" for character in url) or not url.isascii():
        raise _refused("it holds characters that are to be percent-encoded")
    return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _address(host: str, port: int, allowed: Callable[[str], bool]) -> str:
    """An address of a host; all of its addresses must be allowed."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _failed(f"{host} is not known to the name server") from error
    addresses = [str(where[4][0]) for where in resolved]
    if not addresses or not all(allowed(address) for address in addresses):
        raise _refused(f"{host} is not a public host")
    return addresses[0]


class _Pinned(http.client.HTTPSConnection):
    """A connection to a checked address, with the certificate verified for the host's name."""

    def __init__(self, host: str, port: int, address: str, context: ssl.SSLContext, end: Deadline) -> None:
        super().__init__(host, port, context=context)
        self._address, self._tls, self._end = address, context, end
        end.keep(self)

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self._end.remaining_s())
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


def _body(answer: http.client.HTTPResponse) -> bytes:
    body = bytearray()
    while True:
        chunk = answer.read1(_CHUNK)
        if not chunk:
            return bytes(body)
        body += chunk
        if len(body) > MOST_BYTES:
            raise _refused(f"it is larger than {MOST_BYTES:,} bytes")


def _refused(why: str) -> HttpError:
    return HttpError(
        f"the image at image_url is not fetched: {why}",
        code="image_url_refused",
        next_step="send the image itself, in base64, as `image`",
        status=403,
    )


def _failed(why: str) -> HttpError:
    return HttpError(
        f"the image at image_url cannot be fetched: {why}",
        code="image_url_failed",
        next_step="send the image itself, in base64, as `image`",
        status=502,
    )
