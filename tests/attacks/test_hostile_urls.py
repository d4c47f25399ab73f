"""Inputs behind URLs that a laptop, a table or a server chooses: a worker reads from no host that nobody has named.

127.0.0.2 stands for a host of the public internet where a test needs one, 127.0.0.1 for the network of the worker.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import ConfigError, SourceError
from embq.core.networks import Hosts, is_public
from embq.core.settings import Settings
from embq.core.units import Unit
from embq.sources.access import allowed_hosts, filesystems, ranged_reads
from embq.sources.access.allowed_hosts import Reach
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.e2e.services import Services
from tests.support.servers.storage import serving

TEXTS = b'{"id": "a", "text": "the secret of the worker\'s network"}\n'
MOST = 100_000
"""Most bytes of a sample, so that endless ones are small."""

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No second attempts, and new connections for each test."""
    monkeypatch.setattr(ranged_reads, "PAUSES_S", ())
    monkeypatch.setattr(ranged_reads, "SAMPLE_MAX_BYTES", MOST)
    monkeypatch.setattr(allowed_hosts, "_REACH", [Reach()])
    monkeypatch.setattr(ranged_reads, "_WITHOUT_RANGES", set())
    filesystems._connect.cache_clear()
    yield
    filesystems._connect.cache_clear()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Host:
    """A server that answers every request in one way.

    Attributes:
        asked: the paths that were asked for.
        sent: bytes of bodies.
    """

    def __init__(self, stack: ExitStack, answer: Answer | None = None, address: str = "127.0.0.1") -> None:
        self.asked: list[str] = []
        self.sent = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(handler) -> None:
                self.asked.append(handler.path)
                (answer or self.texts)(handler)

            do_HEAD = do_GET

        self.port = stack.enter_context(serving(Handler, address))
        self.url = f"http://{address}:{self.port}"

    def texts(self, handler: BaseHTTPRequestHandler) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        body = TEXTS[int(found[1]) : int(found[2]) + 1] if found else TEXTS
        handler.send_response(206 if found else 200)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)

    def endless(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        try:
            while self.sent < 50 * MOST:
                handler.wfile.write(bytes(MOST))
                self.sent += MOST
        except ConnectionError:
            pass


def to(url: str) -> Answer:
    """Send to another URL."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def refused(url: str, roots: tuple[str, ...] = ()) -> SourceError:
    unit = Unit(kind="jsonl", source=url, etag=f"1-{len(TEXTS)}", start=0, stop=len(TEXTS), samples=1)
    with pytest.raises(SourceError) as caught:
        list(read(unit, roots))
    assert url in caught.value.message
    return caught.value


def texts_of(url: str, roots: tuple[str, ...] = ()) -> list[str | None]:
    unit = Unit(kind="jsonl", source=url, etag=f"1-{len(TEXTS)}", start=0, stop=len(TEXTS), samples=1)
    return [sample.text for sample in read(unit, roots)]


def images_of(stack: ExitStack, folder: Path, url: str, roots: tuple[str, ...] = ()) -> list[tuple[str, str] | None]:
    """The failure of each row of a table whose only row names a URL."""
    table = folder / "t.csv"
    table.write_text(f"id,url\na,{url}\n")
    (unit,) = SOURCES["csv"].split(str(table), ReadOptions(image_column="url"))
    return [sample.error for sample in read(unit, roots)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[0:0:0:0:0:ffff:7f00:1]", "0.0.0.0"])
def test_a_unit_on_a_private_host_is_refused_before_a_connection(stack: ExitStack, host: str) -> None:
    there = Host(stack)
    error = refused(f"http://{host}:{there.port}/secret.jsonl")
    assert (error.code, error.transient) == ("source_denied", False)
    assert "EMBQ_PRIVATE_HOSTS" in error.next_step
    assert there.asked == []


@pytest.mark.parametrize("host", ["2130706433", "127.1", "127.0.0.1.", "0x7f.0.0.1", "017700000001"])
def test_no_spelling_of_an_address_passes(stack: ExitStack, tmp_path: Path, host: str) -> None:
    there = Host(stack)
    assert not refused(f"http://{host}:{there.port}/secret.jsonl").transient
    assert images_of(stack, tmp_path, f"http://{host}:{there.port}/a.jpg") != [None]
    assert there.asked == []


def test_a_row_of_a_table_reaches_no_private_host(stack: ExitStack, tmp_path: Path) -> None:
    there = Host(stack)
    ((code, message),) = filter(None, images_of(stack, tmp_path, f"{there.url}/latest/meta-data"))
    assert (code, "not public" in message) == ("source_denied", True)
    assert there.asked == []


def test_a_row_of_a_table_that_the_reader_process_reads_reaches_no_private_host(
    stack: ExitStack, tmp_path: Path
) -> None:
    there, table = Host(stack), tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": ["a"], "url": [f"{there.url}/latest/meta-data"]}), table)
    (unit,) = SOURCES["parquet"].split(str(table), ReadOptions(image_column="url"))
    ((code, message),) = [sample.error for sample in read(unit, ()) if sample.error]
    assert (code, "not public" in message) == ("source_denied", True)
    assert there.asked == []


@pytest.mark.parametrize("named", ["127.0.0.1", "127.0.0.0/8", "127.0.0.1:{port}", "[::ffff:127.0.0.1]:{port}"])
def test_a_private_host_that_the_operator_names_is_read(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    there = Host(stack)
    monkeypatch.setenv("EMBQ_PRIVATE_HOSTS", f"files.lan, {named.format(port=there.port)}")
    allowed_hosts.limit(Reach.of((), Settings.from_environment().private_hosts))
    assert texts_of(f"{there.url}/a.jsonl") == ["the secret of the worker's network"]


def test_the_shards_of_the_stack_are_allowed_by_their_url_with_its_port(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, other = Host(stack), Host(stack)
    monkeypatch.setenv("EMBQ_ROOTS", f"/data:/out:{there.url}")
    roots = Settings.from_environment().roots
    assert roots == ("/data", "/out", there.url)
    allowed_hosts.limit(Reach.of(roots, ()))
    assert texts_of(f"{there.url}/a.jsonl", roots) == ["the secret of the worker's network"]
    assert refused(f"{other.url}/a.jsonl", roots).code == "source_denied"
    assert other.asked == []


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("http://10.0.0.5:8080", ("http://10.0.0.5:8080",)),
        ("http://h:8080/a:/b", ("http://h:8080/a", "/b")),
        ("/a:http://[fd00::5]:80:s3://bucket:/c", ("/a", "http://[fd00::5]:80", "s3://bucket", "/c")),
        ("https://:/data", ("https://", "/data")),
        ("http://h:8080:http://i:9000/p/", ("http://h:8080", "http://i:9000/p/")),
    ],
)
def test_ports_and_schemes_do_not_end_a_place(
    monkeypatch: pytest.MonkeyPatch, text: str, places: tuple[str, ...]
) -> None:
    monkeypatch.setenv("EMBQ_ROOTS", text)
    assert Settings.from_environment().roots == places


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "a b/c", "http://host", "host:port", "[::1", "user@host"])
def test_a_list_of_private_hosts_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setenv("EMBQ_PRIVATE_HOSTS", entry)
    with pytest.raises(ConfigError, match="EMBQ_PRIVATE_HOSTS"):
        Settings.from_environment()


def test_a_redirect_does_not_leave_the_roots(stack: ExitStack) -> None:
    secret = Host(stack)
    door = Host(stack, to(f"{secret.url}/secret.jsonl"))
    roots = (door.url,)
    allowed_hosts.limit(Reach.of(roots, ()))
    assert refused(f"{door.url}/a.jsonl", roots).code == "source_denied"
    assert door.asked
    assert secret.asked == []


def test_a_redirect_does_not_lead_from_a_public_host_to_a_private_one(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(allowed_hosts, "is_public", lambda address: address == "127.0.0.2")
    secret = Host(stack)
    public = Host(stack, to(f"{secret.url}/secret.jsonl"), "127.0.0.2")
    assert refused(f"{public.url}/a.jsonl").code == "source_denied"
    ((code, _),) = filter(None, images_of(stack, tmp_path, f"{public.url}/a.jpg"))
    assert code == "source_denied"
    assert len(public.asked) == 3
    assert secret.asked == []


def test_a_redirect_to_a_host_that_the_operator_names_is_followed(stack: ExitStack) -> None:
    there = Host(stack)
    door = Host(stack, to(f"{there.url}/secret.jsonl"))
    roots = (door.url,)
    allowed_hosts.limit(Reach.of(roots, (f"127.0.0.1:{there.port}",)))
    assert texts_of(f"{door.url}/a.jsonl", roots) == ["the secret of the worker's network"]


def test_the_address_that_is_checked_is_the_one_that_is_connected_to(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name server's second answer leads elsewhere (DNS rebinding)."""
    secret = Host(stack)
    answers = iter(["127.0.0.2"])
    resolve = socket.getaddrinfo

    def rebinding(host: Any, *args: Any, **options: Any) -> Any:
        return resolve(next(answers, "127.0.0.1") if host == "rebinding.test" else host, *args, **options)

    monkeypatch.setattr(allowed_hosts, "is_public", lambda address: address == "127.0.0.2")
    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    for _ in range(3):
        refused(f"http://rebinding.test:{secret.port}/secret.jsonl")
    assert secret.asked == []


def test_a_name_with_one_private_address_is_refused(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = Host(stack)
    resolve = socket.getaddrinfo

    def both(host: Any, *args: Any, **options: Any) -> Any:
        if host != "both.test":
            return resolve(host, *args, **options)
        return [one for name in ("127.0.0.2", "127.0.0.1") for one in resolve(name, *args, **options)]

    monkeypatch.setattr(allowed_hosts, "is_public", lambda address: address == "127.0.0.2")
    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert refused(f"http://both.test:{secret.port}/secret.jsonl").code == "source_denied"
    assert secret.asked == []


def test_rows_are_read_below_the_roots_alone(stack: ExitStack, tmp_path: Path) -> None:
    """Rows of a table are as bounded as inputs are."""
    there, other = Host(stack), Host(stack)
    roots = (str(tmp_path), f"{there.url}/images")
    allowed_hosts.limit(Reach.of(roots, ()))
    assert images_of(stack, tmp_path, f"{there.url}/images/a.jpg", roots) == [None]
    for url in (f"{there.url}/a.jpg", f"{there.url}/images/%2e%2e/a.jpg", f"{other.url}/images/a.jpg"):
        ((code, _),) = filter(None, images_of(stack, tmp_path, url, roots))
        assert code == "outside_root"
    assert other.asked == []


@pytest.mark.timeout(30)
def test_an_endless_image_of_a_row_is_one_failure(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = Host(stack, lambda handler: host.endless(handler))
    allowed_hosts.limit(Reach(hosts=Hosts(["127.0.0.1"])))
    ((code, _),) = filter(None, images_of(stack, tmp_path, f"{host.url}/a.jpg"))
    assert code == "too_large"
    assert host.sent < 50 * MOST


@pytest.mark.timeout(30)
@pytest.mark.parametrize("start", [0, 1000])
def test_an_endless_answer_to_a_range_is_read_no_further_than_the_range(stack: ExitStack, start: int) -> None:
    host = Host(stack, lambda handler: host.endless(handler))
    allowed_hosts.limit(Reach(hosts=Hosts(["127.0.0.1"])))
    assert ranged_reads.read_range(f"{host.url}/a", start, 2000) == bytes(2000 - start)
    with pytest.raises(SourceError, match="more bytes came instead of 5000"):
        ranged_reads.load(f"{host.url}/a", 5000)
    assert host.sent < 100 * MOST


def test_an_endless_file_beside_an_image_is_one_failure(stack: ExitStack) -> None:
    host = Host(stack, lambda handler: host.endless(handler))
    allowed_hosts.limit(Reach(hosts=Hosts(["127.0.0.1"])))
    planned, unplanned = ranged_reads.fetch_all([f"{host.url}/a.jpg", f"{host.url}/a.txt"], [1000, None], lambda: None)
    assert isinstance(planned, SourceError)
    assert isinstance(unplanned, SourceError)
    assert (planned.code, unplanned.code) == ("source_changed", "too_large")


@pytest.mark.slow
def test_a_worker_of_the_services_reads_from_no_private_host(
    own_server: EmbeddedServer, short_tmp: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run handed over by a laptop makes a worker ask its own network."""
    monkeypatch.setattr(allowed_hosts, "_REACH", [allowed_hosts.ANYWHERE])  # this process is the laptop
    there, root = Host(stack), short_tmp / "out"
    services = Services(stack, own_server, workers=1, environment={"EMBQ_PRIVATE_HOSTS": ""})
    services.call("enqueue", f"{there.url}/secret.jsonl", "-o", root, "-m", "stub:4")
    planned = len(there.asked)
    services.until(lambda: json.loads(services.call("status", root, "--json"))["state"] == "done")
    (group,) = json.loads(services.call("failures", root, "--json"))["groups"]
    assert group["code"] == "source_denied"
    assert len(there.asked) == planned


RANGES = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32", "192.0.0.170/31", "192.0.2.0/24"),
    *("192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32", "::1/128", "::/128"),
    *(
        "::/96",
        "::ffff:0:0:0/96",
        "::ffff:7f00:0/104",
        "::ffff:a00:0/104",
        "64:ff9b::7f00:0/104",
        "64:ff9b::a9fe:0/112",
    ),
    *("64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:1::1/128", "2001:1::2/128"),
    *("2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48", "2001:10::/28", "2001:20::/28", "2001:30::/28"),
    *(
        "2001:db8::/32",
        "2002::/16",
        "2620:4f:8000::/48",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
    ),
    "ff00::/8",
)
"""IANA's special-purpose registries of IPv4 and IPv6, multicast, and what was withdrawn."""


@pytest.mark.parametrize("text", RANGES)
def test_no_address_of_a_special_range_is_public(text: str) -> None:
    network = ipaddress.ip_network(text)
    for address in (network[0], network[network.num_addresses // 2], network[-1]):
        assert not is_public(str(address))


@pytest.mark.parametrize(
    "address",
    [
        *("1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0"),
        *("169.253.255.255", "172.32.0.0", "192.0.1.0", "192.167.255.255", "198.20.0.0", "223.255.255.255"),
        *("2001:200::1", "2001:4860:4860::8888", "2003::1", "2a00:1450::1", "2620:4f:8001::1", "4000::1"),
        *("::ffff:8.8.8.8", "64:ff9b::808:808"),
    ],
)
def test_addresses_beside_the_special_ranges_are_public(address: str) -> None:
    """A guard that refuses the internet helps nobody."""
    assert is_public(address)
