"""A private certificate authority, and the broker's server certificate.

Clients check the server's certificate against `ca/ca.crt` alone; users log in by passwords, so clients have no
certificates. X.509 as in RFC 5280, keys on the curve P-256, which every TLS library has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

from embq.core.errors import ConfigError, UsageError
from embq.core.extras import missing
from embq.core.service.progress_line import moment
from embq.core.storage.durable import overwrite

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
except ImportError as error:
    raise missing(
        "cryptography", "certificates are made with the package cryptography, which is not installed"
    ) from error

CA_DAYS = 3650
"""Validity of the authority. Its certificate is on every machine, so it should never need renewal."""
RENEW = timedelta(days=30)
"""A server certificate that ends sooner is renewed; a short-lived one in its last half."""
Issued: TypeAlias = "tuple[x509.Certificate, ec.EllipticCurvePrivateKey]"
"""A certificate and its key."""
USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
CLOCK_ROOM = timedelta(days=1)
"""New certificates are valid since yesterday, for clients whose clock is behind."""


def make(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Create the authority and the server's certificate if they are missing, or renew the latter.

    Files, mode 0600 in folders of mode 0700: `ca/ca.crt`, `ca/ca.key` (who has it can pass for the broker: it stays
    where it is), `broker/tls/server.crt`, `broker/tls/server.key`. The authority is never made anew. The server's is
    when it lacks one of `hosts` (it keeps the names that it has), ends within 30 days, or was not signed by this
    authority for this key; a running server has to be restarted.

    Args:
        folder: created if it is missing.
        hosts: names and IP addresses by which clients call the server.
        days: life of a server certificate that is made now, in days; it ends with the authority at the latest.

    Returns:
        the files that were written.

    Raises:
        ConfigError: `cryptography` is not installed, or the authority has lost its key, or has ended.
        UsageError: a host that is neither a name nor an address.
    """
    names = list(dict.fromkeys(_host(name) for name in hosts))
    try:
        return _make(folder, names, days, datetime.now(UTC))
    except PermissionError as error:
        raise ConfigError(
            f"{error.filename} belongs to somebody else: {error.strerror}",
            next_step=f"run it as the user whom {folder} belongs to, or as root",
        ) from error


def _make(folder: Path, names: Sequence[str], days: int, now: datetime) -> list[Path]:
    authority, written = _authority(folder / "ca", now)
    certificate, key = folder / "broker" / "tls" / "server.crt", folder / "broker" / "tls" / "server.key"
    present = _names_of(certificate, key, authority[0])
    all_names = list(dict.fromkeys([*present, *names]))
    if present and all_names == present and not _ends_soon(certificate, now):
        return written
    end = min(now + timedelta(days=days), authority[0].not_valid_after_utc)
    _write_pair(certificate, key, _server_certificate(all_names, authority, now, end))
    return [*written, certificate, key]


def _host(name: str) -> str:
    """The host as a certificate names it; UsageError for an invalid one."""
    try:
        return str(ip_address(name))
    except ValueError:
        pass
    if not name or len(name) > 253 or not name.isascii() or not all(c.isalnum() or c in "-._*" for c in name):
        raise UsageError(
            f"{name!r} is neither a host name nor an IP address",
            next_step="for example --server-name gpu-box.example.org or --server-name 10.0.0.5, without a port",
        )
    return name.lower()


def _authority(folder: Path, now: datetime) -> tuple[Issued, list[Path]]:
    """The authority, and the files that were written for it."""
    certificate, key = folder / "ca.crt", folder / "ca.key"
    written: list[Path] = []
    if not certificate.exists() and not key.exists():
        _write_pair(certificate, key, _new_authority(now))
        written = [certificate, key]
    anew = f"move {folder} away to have another one made, and give its ca.crt to every machine"
    try:
        authority, authority_key = x509.load_pem_x509_certificate(certificate.read_bytes()), _read_key(key)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(
            f"the certificate authority cannot be used: {certificate} or {key.name} is missing or damaged",
            next_step=f"bring both back from a backup, or {anew}",
        ) from error
    if authority.public_key() != authority_key.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}", next_step=f"bring back its own, or {anew}")
    if authority.not_valid_after_utc <= now:
        raise ConfigError(f"{certificate} ended on {moment(authority.not_valid_after_utc.timestamp())}", next_step=anew)
    return (authority, authority_key), written


def _new_authority(now: datetime) -> Issued:
    extensions = {x509.BasicConstraints(ca=True, path_length=0): True, _usage("key_cert_sign", "crl_sign"): True}
    # With its day, so that two authorities are told apart in a list.
    return _issued(f"embq broker CA {now:%Y-%m-%d}", extensions, None, now, now + timedelta(days=CA_DAYS))


def _server_certificate(names: Sequence[str], authority: Issued, now: datetime, end: datetime) -> Issued:
    """A certificate for `names` with a new key."""
    extensions = {
        x509.SubjectAlternativeName([_general_name(name) for name in names]): False,
        x509.BasicConstraints(ca=False, path_length=None): True,
        _usage("digital_signature"): True,
        x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH]): False,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority[1].public_key()): False,
    }
    return _issued("embq broker", extensions, authority, now, end)


def _issued(
    common_name: str,
    extensions: Mapping[x509.ExtensionType, bool],
    authority: Issued | None,
    now: datetime,
    end: datetime,
) -> Issued:
    """A certificate with a new key, signed by `authority`, or by itself.

    Args:
        extensions: of the certificate, and whether each is critical.
        end: of its validity.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.OID_COMMON_NAME, common_name)])
    issuer, issuer_key = (name, key) if authority is None else (authority[0].subject, authority[1])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_ROOM)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, hashes.SHA256()), key


def _usage(*granted: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in granted for usage in USAGES})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _names_of(path: Path, key: Path, authority: x509.Certificate) -> list[str]:
    """The hosts of a server certificate that this authority has signed for this key; none without such a one."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        certificate.verify_directly_issued_by(authority)
        if certificate.public_key() != _read_key(key).public_key():
            return []
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names]


def _ends_soon(path: Path, now: datetime) -> bool:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    half = (certificate.not_valid_after_utc - certificate.not_valid_before_utc - CLOCK_ROOM) / 2
    return certificate.not_valid_after_utc - now < min(RENEW, half)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is no key on an elliptic curve")
    return key


def _write_pair(path: Path, key_path: Path, issued: Issued) -> None:
    """Write both with mode 0600, in folders that are created with mode 0700."""
    certificate, key = issued
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode=0o700)
    # The key first: a certificate beside a key that is not its own is made anew the next time.
    overwrite(key_path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
    overwrite(path, certificate.public_bytes(Encoding.PEM), mode=0o600)
