"""Planted secrets are nowhere to be found afterwards: not in logs, outputs, the broker, or what `ps` shows."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import psutil
import pyarrow.parquet as pq
import pytest

from embq.app.broker_admin.certificates import make
from embq.app.cli import entry_point
from embq.core.errors import Exit
from tests.e2e.session import Command, await_in, called, process_ended, started, write_shards
from tests.support.servers.storage import serving
from tests.support.servers.tls import HOSTS, TlsServer, free_ports, needs_tls_server, tls_server

PASSWORD = "PLANTEDbrokerpassword"
SIGNATURE = "PLANTEDsignature0123456789abcdef"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "PLANTEDACCESSKEYID",
    "AWS_SECRET_ACCESS_KEY": "PLANTED/secret+access/key",
    "AWS_SESSION_TOKEN": "PLANTEDsessiontoken",
    "HF_TOKEN": "hf_PLANTEDhuggingfacetoken0123456789",
}
PLANTED = (PASSWORD, SIGNATURE, *ENVIRONMENT.values())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    """A server of this test alone, which wants a password."""
    make(tmp_path / "secrets", HOSTS, 825)
    with tls_server(tmp_path / "data", tmp_path / "secrets", f"requirepass {PASSWORD}") as server:
        yield server


@contextmanager
def store_that_signs() -> Iterator[str]:
    """A server of files that sends who asks on to a signed URL, as Hugging Face does, and refuses it there."""

    class Signing(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "10240")
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()

        def do_GET(self) -> None:
            if "X-Amz-Signature" in self.path:
                self.send_error(403)
                return
            self.send_response(302)
            self.send_header("Location", f"{self.path}?X-Amz-Credential=me&X-Amz-Signature={SIGNATURE}&x=1")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with serving(Signing) as port:
        yield f"http://127.0.0.1:{port}"


class ProcessList:
    """Command lines of the processes below a command, as `ps` shows them, looked at again and again."""

    def __init__(self, command: Command) -> None:
        self.seen: set[str] = set()
        self._command = command
        self._own = psutil.Process(command.process.pid)  # of a process that has ended none is made
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> ProcessList:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for process in [self._own, *self._command.descendants()]:
                try:
                    self.seen.add(" ".join(process.cmdline()))
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue


def found_in(data: bytes) -> list[str]:
    """The secrets that stand in some bytes, packed or not."""
    texts = [data]
    if data[:2] == b"\x1f\x8b":
        texts.append(gzip.decompress(data))
    if data[:1] == b"\x78":
        texts.append(zlib.decompress(data))
    return [secret for secret in PLANTED if any(secret.encode() in text for text in texts)]


def found_below(folder: Path) -> dict[str, list[str]]:
    """File -> secrets in it, tables as they read."""
    found = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        secrets = found_in(path.read_bytes())
        if path.suffix == ".parquet":
            secrets += found_in(json.dumps(pq.read_table(path).to_pylist(), default=str).encode())
        if secrets:
            found[str(path.relative_to(folder))] = secrets
    return found


@needs_tls_server
def test_no_planted_secret_is_found_after_a_run(server: TlsServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD)
    write_shards(tmp_path / "shards", 2, 5)
    environment = {
        **ENVIRONMENT,
        "EMBQ_BROKER_URL": server.url(),
        "EMBQ_BROKER_PASSWORD_FILE": str(tmp_path / "password"),
        "EMBQ_BROKER_CA": server.ca,
        "EMBQ_LEASE_S": "4",
        "EMBQ_BEAT_S": "0.5",
    }
    out = tmp_path / "out"
    with store_that_signs() as url:
        arguments = ["run", tmp_path / "shards", f"{url}/00000.tar", "-o", out, "-m", "stub:8?ms_per_sample=20"]
        with started(*arguments, environment=environment) as command, ProcessList(command) as shown:
            assert command.wait() == Exit.SOME_FAILED, command.said
            said = command.stdout + command.stderr
    failed = [called("failures", out, *options, environment=environment) for options in ([], ["--json"])]
    assert "source_denied" in failed[0][1], "the store's refusal was met"
    assert "X-Amz-Signature=****" in str(failed[1]), "and told of, without what was signed"
    status = [called("status", out, *options, environment=environment) for options in ([], ["--json"])]
    doctor = process_ended("doctor", "-o", out, environment=environment)
    for text in (said, *map(str, failed), *map(str, status), str(doctor), *shown.seen):
        assert found_in(text.encode()) == [], text
    assert len(shown.seen) >= 4, "the services were seen"
    assert found_below(out) == {}
    assert any((server.folder / "appendonlydir").iterdir())
    assert found_below(server.folder) == {"server.conf": [PASSWORD]}, "which has it from us, and the AOF has it not"


# --- off the command line ---


@pytest.mark.parametrize("verb", [["status", "--watch"], ["worker", "--devices", "cpu"], ["producer"]])
@pytest.mark.parametrize("url", [f"rediss://me:{PASSWORD}@host:1", f"redis://host:1?db=0&password={PASSWORD}"])
def test_a_password_on_the_command_line_is_refused(verb: list[str], url: str) -> None:
    status, _, said = called(*verb, "--broker", url)
    assert status == Exit.USAGE
    assert "EMBQ_BROKER_PASSWORD_FILE" in said
    assert PASSWORD not in said


@needs_tls_server
def test_neither_metrics_nor_health_nor_the_log_hold_a_secret(server: TlsServer, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"rediss://default:{PASSWORD}@localhost:{server.tls_port}"
    environment = {"EMBQ_BROKER_CA": server.ca, "EMBQ_BROKER_URL": url, "EMBQ_LOG": "json", **ENVIRONMENT}
    with started("producer", "--metrics", str(port), environment=environment) as command:
        await_in(command, lambda: asked(port, "healthz").startswith("200"))
        said = [asked(port, "metrics"), asked(port, "healthz")]
        assert "embq_broker_up" in said[0]
        server.process.kill()
        await_in(command, lambda: asked(port, "healthz").startswith("503"))
        await_in(command, lambda: "broker_awaited" in command.stderr)
        said += [asked(port, "metrics"), asked(port, "healthz"), command.stderr]
    for text in said:
        assert found_in(text.encode()) == [], text


def asked(port: int, path: str) -> str:
    """Status and text of an answer; "" where there is none."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except HTTPError as error:
        with error:
            return f"{error.code} {error.read().decode()}"
    except URLError:
        return ""


def test_the_report_of_a_bug_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"redis://user:{PASSWORD}@host and https://x/y?X-Amz-Signature={SIGNATURE}&z=1")

    monkeypatch.setattr(entry_point.cli, "main", fail)
    assert entry_point.run(["status"]) == Exit.BUG
    told = capsys.readouterr().err
    report = Path(told.split("details are in ")[1].splitlines()[0])
    try:
        written = report.read_text()
    finally:
        report.unlink()
    assert "ZeroDivisionError: redis://user:****@host" in written
    assert found_in((told + written).encode()) == []
