"""A private certificate authority, and the broker's server certificate.

Clients check the server's certificate against `ca/ca.crt` alone; users log in by passwords, so clients have no
certificates. X.509 as in RFC 5280, keys on the curve P-256, which every TLS library has.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from embq.core.errors import ConfigError, UsageError
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
    raise ConfigError(
        "certificates are made with the package cryptography, which is not installed",
        next_step="pip install 'embq[broker]'",
    ) from error

CA_DAYS = 3650
"""Validity of the authority. Its certificate is on every machine, so it should never need renewal."""
RENEW = timedelta(days=30)
"""A server certificate that ends sooner is renewed; a short-lived one in its last half."""
CLOCK_ROOM = timedelta(days=1)
"""New certificates are valid since yesterday, for clients whose clock is behind."""


def make(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Create the authority and the server's certificate where they are missing, or renew the latter.

    Files, mode 0600 in folders of mode 0700: `ca/ca.crt`, `ca/ca.key` (who has it can pass for the broker: it stays
    where it is), `broker/tls/server.crt`, `broker/tls/server.key`. The authority is never made anew. The server's is
    when it lacks one of `hosts` (it keeps the names that it has), ends within 30 days, or was not signed by this
    authority for this key; a running server has to be told.

    Args:
        folder: made where it is missing.
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
    authority, authority_key, written = _authority(folder / "ca", now)
    certificate, key = folder / "broker" / "tls" / "server.crt", folder / "broker" / "tls" / "server.key"
    kept = _names_kept(certificate, key, authority)
    wanted = list(dict.fromkeys([*kept, *names]))
    if kept and wanted == kept and not _ends_soon(certificate, now):
        return written
    end = min(now + timedelta(days=days), authority.not_valid_after_utc)
    made, made_key = _server_certificate(wanted, authority, authority_key, now, end)
    # The key first: a certificate beside a key that is not its own is made anew the next time.
    _write(key, _key_pem(made_key))
    _write(certificate, _pem(made))
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
            next_step="for example --host gpu-box.example.org or --host 10.0.0.5, without a port",
        )
    return name.lower()


def _authority(folder: Path, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, list[Path]]:
    """The authority, its key, and the files that were written for it."""
    certificate, key = folder / "ca.crt", folder / "ca.key"
    written: list[Path] = []
    if not certificate.exists() and not key.exists():
        made, made_key = _new_authority(now)
        _write(key, _key_pem(made_key))
        _write(certificate, _pem(made))
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
        raise ConfigError(f"{certificate} ended on {authority.not_valid_after_utc:%Y-%m-%d}", next_step=anew)
    return authority, authority_key, written


def _new_authority(now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # With its day, so that two authorities are told apart in a list.
    name = _common_name(f"embq broker CA {now:%Y-%m-%d}")
    signing = _usage(key_cert_sign=True, crl_sign=True)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_ROOM)
        .not_valid_after(now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(key, hashes.SHA256()), key


def _server_certificate(
    names: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: datetime,
    end: datetime,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate for `names` with a new key."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_common_name("embq broker"))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_ROOM)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_key, critical=False)
    )
    return builder.sign(authority_key, hashes.SHA256()), key


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.OID_COMMON_NAME, text)])


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _names_kept(certificate: Path, key: Path, authority: x509.Certificate) -> list[str]:
    """The hosts of a server certificate that this authority has signed for this key; none where there is none."""
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        found.verify_directly_issued_by(authority)
        if found.public_key() != _read_key(key).public_key():
            return []
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names]


def _ends_soon(certificate: Path, now: datetime) -> bool:
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    half = (found.not_valid_after_utc - found.not_valid_before_utc - CLOCK_ROOM) / 2
    return found.not_valid_after_utc - now < min(RENEW, half)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is no key on an elliptic curve")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes) -> None:
    """Write a file of mode 0600, whole or not at all, in folders that are made with mode 0700."""
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode=0o700)
    overwrite(path, data, mode=0o600)
