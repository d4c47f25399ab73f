"""Images that queries name by URL: fetched from a real server with its own certificate, never from where none may."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from embq.retrieval.serving import image_url
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.image_url import fetch_image

LARGE = 3000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificate of localhost, with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    plain = serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture(scope="module")
def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/to":
            self.send_response(302)
            self.send_header("Location", query)
            self.end_headers()
            return
        if path == "/slow":
            self.send_response(200)
            self.end_headers()
            try:
                while not self.server.over.wait(0.02):  # type: ignore[attr-defined]
                    self.wfile.write(b".")
            except OSError:
                pass
            return
        self.send_response(200 if path in ("/image", "/large") else 404)
        self.end_headers()
        self.wfile.write(b"x" * LARGE if path == "/large" else f"image {query}".encode())


@pytest.fixture(scope="module")
def url(certificate: Path) -> Iterator[str]:
    """URL of a server on loopback that speaks TLS."""

    class Server(ThreadingHTTPServer):
        over = threading.Event()

        daemon_threads = False

        def finish_request(self, request: Any, client_address: Any) -> None:
            with context.wrap_socket(request, server_side=True) as secure:
                super().finish_request(secure, client_address)

        def handle_error(self, *of: object) -> None:
            pass  # clients that do not trust the certificate, and those that leave

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"https://localhost:{server.server_address[1]}"
    Server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def fetch(trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bytes]:
    """Fetches from loopback too, by IPv4: the server listens there only."""
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *of, **by: [f for f in found(*of, **by) if ":" not in f[4][0]])
    return lambda url: fetch_image(url, allowed=lambda address: address == "127.0.0.1", context=trusting)


def refused(fetch: Callable[[str], bytes], url: str) -> str:
    with pytest.raises(HttpError) as error:
        fetch(url)
    return f"{error.value.code}: {error.value.message}"


def test_an_image_is_fetched_with_its_query(fetch: Callable[[str], bytes], url: str) -> None:
    assert fetch(f"{url}/image?size=2&x=%20") == b"image size=2&x=%20"


def test_redirects_are_followed_some_times(fetch: Callable[[str], bytes], url: str) -> None:
    assert fetch(f"{url}/to?{url}/to?/image") == b"image "
    assert "more than 3 redirects" in refused(fetch, f"{url}/to?/to?/to?/to?/image")


def test_a_redirect_leads_to_no_host_that_could_not_be_asked_at_once(fetch: Callable[[str], bytes], url: str) -> None:
    assert refused(fetch, f"{url}/to?https://127.0.0.2/image").startswith("image_url_refused: ")
    assert refused(fetch, f"{url}/to?http://localhost/image").startswith("image_url_refused: ")
    assert refused(fetch, f"{url}/to?file:///etc/hostname").startswith("image_url_refused: ")


def test_loopback_is_not_asked(url: str, trusting: ssl.SSLContext) -> None:
    assert "not a public host" in refused(lambda url: fetch_image(url, context=trusting), f"{url}/image")


def test_a_host_must_have_a_certificate_of_its_name(url: str, fetch: Callable[[str], bytes]) -> None:
    anywhere = {"allowed": lambda address: True}
    assert "image_url_failed" in refused(lambda url: fetch_image(url, **anywhere), f"{url}/image")
    assert "image_url_failed" in refused(fetch, f"{url}/image".replace("localhost", "127.0.0.1"))


def test_more_than_the_bound_is_not_read(
    fetch: Callable[[str], bytes], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(fetch(f"{url}/large")) == LARGE
    monkeypatch.setattr(image_url, "MOST_BYTES", LARGE - 1)
    assert "larger than" in refused(fetch, f"{url}/large")


def test_a_server_that_drips_is_left(fetch: Callable[[str], bytes], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_url, "MOST_SECONDS", 0.5)
    assert "localhost did not send it within 0.5 s" in refused(fetch, f"{url}/slow")


def test_what_is_not_there_is_said(fetch: Callable[[str], bytes], url: str) -> None:
    assert "localhost answered 404" in refused(fetch, f"{url}/nothing")
    assert "image_url_failed" in refused(fetch, "https://localhost:1/image")
    assert "not known" in refused(fetch, "https://nowhere.invalid/x.jpg")


@pytest.mark.parametrize(
    "bad",
    [
        "http://example.org/x.jpg",
        "ftp://example.org/x.jpg",
        "file:///etc/passwd",
        "https:///x.jpg",
        "https://user:secret@example.org/x.jpg",
        "https://example.org/a b.jpg",
        "https://example.org/a\r\nX: y",
        "https://example.org/\u00e9.jpg",
        "https://example.org:99999/x.jpg",
        "https://[::1/x.jpg",
        "data:image/png;base64,AAAA",
        "//example.org/x.jpg",
    ],
)
def test_only_plain_https_urls_are_asked(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(*of: object, **by: object) -> None:
        raise AssertionError("a name was resolved")

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert refused(fetch_image, bad).startswith("image_url_refused: ")
