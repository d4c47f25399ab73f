"""TLS to the broker: the check of its certificate, and the diagnosis where certificate or port are wrong.

redis-py reports all of these as a failed connection. The diagnosis repeats the handshake on a connection of its own.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

from embq.core.errors import ConfigError
from embq.core.service.progress_line import moment

HANDSHAKE_S = 3.0
"""A server that speaks TLS answers within a round trip or two; one that does not may wait for the end of a line."""

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python has no name for."""

EXPIRED, NOT_YET_VALID, OTHER_NAMES, UNKNOWN_CA = 10, 9, (62, 64), (18, 19, 20, 21)
"""X509_V_ERR_* of OpenSSL, as in `ssl.SSLCertVerificationError.verify_code`."""
CLIENT_CERTIFICATE_REQUIRED = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE")
"""Alerts of a server to a client without a certificate, in TLS 1.3 and before. Redis requires one by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """Version and certificate of a TLS connection.

    Attributes:
        version: such as "TLSv1.3".
        names: host names and addresses that its certificate is for.
        begins, ends: its validity, seconds since 1970.
    """

    version: str
    names: tuple[str, ...]
    begins: float
    ends: float


@lru_cache(maxsize=8)
def context(ca: str) -> ssl.SSLContext:
    """Context that checks the server's name, and its certificate against the file `ca` alone, or the system's CAs.

    One for all connections, because reading the CAs takes longer than a handshake. ConfigError if `ca` holds none.
    """
    try:
        return ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as error:
        raise _refused(
            f"EMBQ_BROKER_CA names {ca}, in which there is no certificate that can be read",
            "point it to the ca.crt that `embq broker init` made for this broker",
        ) from error


def shake_hands(host: str, port: int, ca: str) -> Handshake:
    """Connect as every client does, up to the answer to a first command.

    Raises:
        ConfigError: the certificate is invalid, one of the client is required, or the port does not speak TLS.
        OSError: no server answers, or the connection broke.
    """
    try:
        with _secured(host, port, context(ca)) as connection:
            # Since TLS 1.3 a server that requires a client certificate says so only now; it may have hung up already.
            with suppress(ssl.SSLEOFError, ConnectionError):
                connection.sendall(b"PING\r\n")
            connection.recv(1)
            return _handshake_of(connection)
    except ssl.SSLCertVerificationError as error:
        raise _rejected(error, host, port, ca) from error
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason in CLIENT_CERTIFICATE_REQUIRED:
            raise _refused(
                f"{_at(host, port)} does not finish the handshake: it seems to want a certificate of its clients",
                "start the server with --tls-auth-clients no: clients of embq show a password, not a certificate",
            ) from error
        if not isinstance(error, ConnectionRefusedError) and _speaks_plain(host, port):
            raise _refused(
                f"{_at(host, port)} speaks plain Redis, and not TLS as rediss:// asks for",
                "take the port at which the broker listens for TLS (in the stack 6380), or "
                "redis:// where the network is your own",
            ) from error
        raise


def speaks_tls(host: str, port: int) -> bool:
    """True if a server answers a TLS handshake, with any certificate."""
    unchecked = ssl.create_default_context()
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE
    try:
        with _secured(host, port, unchecked):
            return True
    except OSError:
        return False


@contextmanager
def _secured(host: str, port: int, trust: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection((host, port), timeout=HANDSHAKE_S) as plain,
        trust.wrap_socket(plain, server_hostname=host) as secured,
    ):
        yield secured


def _handshake_of(secured: ssl.SSLSocket) -> Handshake:
    shown = secured.getpeercert() or {}
    names = tuple(str(name) for _, name in shown.get("subjectAltName", ()))  # type: ignore[str-unpack]
    begins, ends = (str(shown.get(key, "")) for key in ("notBefore", "notAfter"))
    return Handshake(
        version=secured.version() or "",
        names=names,
        begins=ssl.cert_time_to_seconds(begins) if begins else 0.0,
        ends=ssl.cert_time_to_seconds(ends) if ends else 0.0,
    )


def _speaks_plain(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=HANDSHAKE_S) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _rejected(error: ssl.SSLCertVerificationError, host: str, port: int, ca: str) -> ConfigError:
    """The error for a certificate that failed the check."""
    where, code = _at(host, port), error.verify_code
    if code in UNKNOWN_CA:
        return _refused(
            f"{where} shows a certificate of an authority that is not known here",
            f"EMBQ_BROKER_CA={ca} is of another one: copy ca.crt from the secrets of this broker again"
            if ca
            else "set EMBQ_BROKER_CA to the ca.crt that `embq broker init` made for this broker",
        )
    shown = _shown(host, port, ca)
    if code in OTHER_NAMES and shown is not None:
        return _refused(
            f"the certificate of {where} is for {', '.join(shown.names) or 'no name at all'}",
            f"put one of these names into the broker's URL, or run `embq broker init --server-name {host}` where its "
            "secrets are, and restart the broker",
        )
    now = f"this machine's clock says {moment(time.time())}"
    if code == EXPIRED and shown is not None and shown.ends < time.time():
        return _refused(
            f"the certificate of {where} ended on {moment(shown.ends)}",
            f"run `embq broker init` where its secrets are, which renews it, and restart the broker; {now}",
        )
    if code == NOT_YET_VALID and shown is not None:
        return _refused(f"the certificate of {where} begins on {moment(shown.begins)}", f"set the clock: {now}")
    return _refused(
        f"the certificate of {where} cannot be taken: {error.verify_message}",
        f"look at it with `openssl s_client -connect {where}`; {now}",
    )


def _shown(host: str, port: int, ca: str) -> Handshake | None:
    """The handshake with a certificate of a known authority whose name or validity is wrong."""
    lenient = ssl.create_default_context(cafile=ca or None)
    lenient.check_hostname = False
    lenient.verify_flags = ssl.VerifyFlags(lenient.verify_flags | _NO_CHECK_TIME)
    try:
        with _secured(host, port, lenient) as connection:
            return _handshake_of(connection)
    except OSError:
        return None


def _refused(what: str, next_step: str) -> ConfigError:
    return ConfigError(what, next_step=next_step, code="tls")


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
