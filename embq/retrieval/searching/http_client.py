"""JSON requests to an `embq serve` over http or https, with an error for each way in which they fail."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from embq.core.answers import opener
from embq.core.errors import EmbqError, InputError, ServerError, TryLaterError, UsageError
from embq.core.networks import is_loopback

MOST_ANSWER = 256 * 2**20
"""Bytes; 10,000 results with long captions have a tenth of it."""

DEFAULT_PORT = 1234
"""Default port of `embq serve`."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server.

    Attributes:
        url: http:// or https://, with a path if a proxy has one, without a slash at the end.
    """

    url: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse what a user enters; UsageError if it is not such a URL."""
        try:
            parts = urlsplit(url)
            usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise UsageError(f"{url[:200]!r} is not the address of a server", next_step="such as http://localhost:1234")
        if parts.username is not None:
            raise UsageError(
                "a user or password in a URL can be read in the list of processes, and embq serve knows neither",
                next_step=f"{parts.scheme}://{parts.hostname}:{parts.port or DEFAULT_PORT}",
            )
        return cls(url.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    @property
    def is_loopback(self) -> bool:
        """True if it is this machine, or a tunnel that starts here."""
        return is_loopback(urlsplit(self.url).hostname or "")

    def unreachable(self, why: str) -> ServerError:
        """The error if nothing answers."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        tunnel = f"ssh -N -L {port}:127.0.0.1:{DEFAULT_PORT} BOX"
        if self.is_loopback:
            step = f"{tunnel}, where `embq serve` runs on BOX; or start `embq serve OUT --port {port}` here"
        else:
            tunnel = tunnel.replace(f"-L {port}:", f"-L {DEFAULT_PORT}:").replace("BOX", str(parts.hostname))
            step = f"`embq serve` listens on its own machine alone: {tunnel}, then ask http://localhost:{DEFAULT_PORT}"
        return ServerError(f"no embq serve answers at {self}: {why}", next_step=step)

    def not_embq(self, why: str) -> ServerError:
        """The error if something else answers."""
        return ServerError(
            f"the server at {self} is not an embq serve: {why}",
            next_step="check the address and the port; embq serve prints its own when it starts",
            code="other_server",
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A search is a POST, which would become a GET of something else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def fetch_json(address: Address, path: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> dict[str, Any]:
    """The JSON object that a server answers; GET, or POST if there is a body.

    Raises ServerError if no server answers or it is not embq; an error of the server is raised with its code and
    next step.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address.url + path, data, {"Content-Type": "application/json"} if data else {})
    # A proxy does not know the end of a tunnel.
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    handlers += [urllib.request.ProxyHandler({})] if address.is_loopback else []
    try:
        with opener(timeout_s, *handlers).open(request) as answer:
            return _object(address, answer.read(MOST_ANSWER))
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(address, error.code, error.read(2**20)) from error
    except TimeoutError as error:
        raise address.unreachable(f"no answer within {timeout_s:g} s") from error
    except (urllib.error.URLError, OSError, HTTPException, UnicodeError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _unreachable(address, reason, timeout_s) from error


def _unreachable(address: Address, reason: object, timeout_s: float) -> ServerError:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return ServerError(
            f"the certificate of {address} is not trusted here: {reason.verify_message}",
            next_step="name the file of its authority: SSL_CERT_FILE=ca.pem embq search ...",
            code="untrusted_server",
        )
    if isinstance(reason, ssl.SSLError):
        return address.not_embq("it does not speak TLS; embq serve is http://, unless a proxy terminates TLS")
    if isinstance(reason, TimeoutError):
        return address.unreachable(f"no answer within {timeout_s:g} s")
    return address.unreachable(getattr(reason, "strerror", None) or str(reason) or type(reason).__name__)


def _object(address: Address, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise address.not_embq("it does not answer in JSON") from error
    if not isinstance(answer, dict):
        raise address.not_embq("its answer is not a JSON object")
    return answer


def _refused(address: Address, status: int, data: bytes) -> EmbqError:
    """The error of an HTTP error response, with the message of the server if it has one."""
    try:
        fields = json.loads(data)
        code, message, step = (_plain(fields[name]) for name in ("code", "message", "next"))
    except (ValueError, RecursionError, KeyError, TypeError):
        return address.not_embq(f"it answers with HTTP {status}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", code):
        return address.not_embq(f"it answers with HTTP {status}")
    kind = InputError if 400 <= status < 500 else TryLaterError if status == 503 else ServerError
    return kind(f"{address}: {message}", next_step=step, code=code)


def _plain(text: str) -> str:
    """A text of a server made safe for a terminal: one printable line of limited length."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[:500]
