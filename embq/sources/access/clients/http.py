"""fsspec client of http:// and https://, within the allowed hosts and with bounded bodies."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import ResolveResult
from fsspec.implementations.http import HTTPFileSystem

from embq.core.answers import BYTES_PER_S, GRACE_S, Deadline
from embq.core.errors import SourceError
from embq.core.networks import numeric
from embq.sources.access import allowed_hosts

LISTING_MAX_BYTES = 64 * 2**20
"""Longest page that lists a folder: a million names."""


class HttpClient(HTTPFileSystem):  # type: ignore[misc]
    """fsspec's own client with checked hosts and bounded bodies.

    Args:
        connect_s, answer_s: seconds without a connection, and without an answer.
    """

    def __init__(self, *, connect_s: float, answer_s: float, **options: Any) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=answer_s)
        # A shard that the server compresses on the way would have another length than it says.
        headers = {"Accept-Encoding": "identity"}
        client = {"timeout": timeout, "headers": headers}
        super().__init__(
            use_listings_cache=False,
            client_kwargs=client,
            get_client=partial(_session, connect_s + answer_s),
            **options,
        )

    async def _cat_file(
        self, url: str, start: int | None = None, end: int | None = None, *, most: int | None = None, **options: Any
    ) -> bytes:
        """The bytes of a file from `start` up to `end`, and one more where the server sends more.

        A server that knows no ranges sends the file from its start, which is read up to `end`.

        Args:
            most: bytes of a file of which all is asked for.
        """
        headers = {}
        if end is not None:
            headers["Range"] = f"bytes={start or 0}-{end - 1}"
        session = await self.set_session()
        async with session.get(self.encode_url(url), headers=headers, **options) as answer:
            self._raise_not_found_for_status(answer, url)
            if end is not None:
                most = end - (start or 0) if answer.status == 206 else end
            return await _bounded(answer, most)

    async def _info(self, url: str, **options: Any) -> dict[str, Any]:
        try:
            info: dict[str, Any] = await super()._info(url, **options)
            return info
        except FileNotFoundError as error:  # which fsspec raises for every failure of its last request
            if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
                raise
            raise error.__cause__ from None


async def _bounded(answer: aiohttp.ClientResponse, most: int | None) -> bytes:
    """The body, of which at most `most` bytes and one more are read."""
    body, deadline = bytearray(), Deadline(GRACE_S, BYTES_PER_S)
    async for chunk in answer.content.iter_any():
        body += chunk
        deadline.receive(len(chunk))
        deadline.remaining_s()
        if most is not None and len(body) > most:
            answer.close()
            return bytes(body[: most + 1])
    return bytes(body)


class _Answer(aiohttp.ClientResponse):
    """An answer whose whole body is a listing."""

    async def read(self) -> bytes:
        self._body = await _bounded(self, LISTING_MAX_BYTES)
        if len(self._body) > LISTING_MAX_BYTES:
            raise SourceError(
                f"{self.url}: this page has more than {LISTING_MAX_BYTES:,} bytes", code="source_unreadable"
            )
        return self._body


class _Resolver(aiohttp.ThreadedResolver):
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        results = await super().resolve(host, port, family)
        allowed_hosts.current().check_addresses(host, port, [each["host"] for each in results])
        return results


async def _checked(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send one request, the first or one of a redirect. Names are checked where they are resolved."""
    url = request.url
    allowed_hosts.current().check(str(url))
    if (address := numeric(url.host or "")) is not None:  # aiohttp resolves names alone
        allowed_hosts.current().check_addresses(url.host or "", url.port, [address])
    return await send(request)


async def _session(headers_s: float, **options: Any) -> aiohttp.ClientSession:
    async def timed(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        async with asyncio.timeout(headers_s):
            return await _checked(request, send)

    connector = aiohttp.TCPConnector(resolver=_Resolver(), loop=options["loop"])
    return aiohttp.ClientSession(connector=connector, middlewares=(timed,), response_class=_Answer, **options)
