"""Every kind of input behind http:// and s3://: the same samples as from a local disk, whatever the server does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest

from embq.core.errors import InputError, SourceError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.units import Sample, Unit
from embq.producer.additions import Additions
from embq.producer.enqueue import prepare
from embq.producer.plan import plan
from embq.sources.access import listings, ranged_reads
from embq.sources.access.files import match
from embq.sources.access.filesystems import filesystem
from embq.sources.kinds import SOURCES, detect
from embq.sources.unit_reader import read
from embq.testing.sources import OPTIONS, Case
from tests.contract.inputs import CASES
from tests.support.outputs.build import request_of
from tests.support.servers.storage import HttpServer, http_server, s3_server, upload

KINDS = [case for case in CASES if not case.form]
FILE_CASES = [case for case in KINDS if case.kind != "files"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are shorter, and ranges small, so that small files have several."""
    monkeypatch.setattr(ranged_reads, "PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(ranged_reads, "SMALL_BYTES", 1000)
    monkeypatch.setattr(ranged_reads, "LARGE_BYTES", 4000)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[HttpServer]:
    folder = tmp_path / "web"
    folder.mkdir()
    with http_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@contextmanager
def requests_to_s3() -> Iterator[list[tuple[str, str]]]:
    """(operation, query) of each request that the block sends."""
    seen: list[tuple[str, str]] = []

    def note(request: Any, event_name: str, **_: object) -> None:
        seen.append((event_name.rpartition(".")[2], urlsplit(request.url).query))

    fs = filesystem("s3://any")
    events = fsspec.asyn.sync(fs.loop, fs.set_session).meta.events
    events.register("before-send.s3", note)
    try:
        yield seen
    finally:
        events.unregister("before-send.s3", note)


def samples_of(kind: str, source: str) -> list[Sample]:
    return [sample for unit in SOURCES[kind].split(source, OPTIONS) for sample in read(unit, [])]


def content(samples: list[Sample]) -> list[tuple[str, bytes | None, str | None]]:
    assert not [sample for sample in samples if sample.error]
    return [(sample.key, sample.image, sample.text) for sample in samples]


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
@pytest.mark.parametrize("case", FILE_CASES, ids=lambda case: case.kind)
def test_over_http_the_samples_are_the_same(case: Case, web: HttpServer, ranges: bool) -> None:
    web.ranges = ranges
    path = case.write(web.folder)
    assert content(samples_of(case.kind, f"{web.url}/{path.relative_to(web.folder)}")) == case.listing


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.kind)
def test_from_s3_the_samples_are_the_same(case: Case, s3: None, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    url = upload(tmp_path, f"contract-{case.kind}")
    found = detect(f"{url}/{path.name}")
    assert found == [(case.kind, f"{url}/{path.name}")]
    assert content(samples_of(*found[0])) == case.listing


@pytest.mark.parametrize("fault", ["busy", "error", "cut", "short", "reset"])
@pytest.mark.parametrize("case", FILE_CASES, ids=lambda case: case.kind)
def test_a_server_that_is_in_trouble_for_a_moment_changes_nothing(case: Case, web: HttpServer, fault: str) -> None:
    path = case.write(web.folder)
    url = f"{web.url}/{path.relative_to(web.folder)}"
    units = list(SOURCES[case.kind].split(url, OPTIONS))
    web.suffer(fault, 3)
    assert content([sample for unit in units for sample in read(unit, [])]) == case.listing
    assert web.left == 0


@pytest.mark.parametrize("fault", ["busy", "cut", "short", "reset"])
def test_a_server_that_stays_in_trouble_is_worth_another_try_later(web: HttpServer, fault: str) -> None:
    unit = shard(web)
    web.suffer(fault, 1000)
    with pytest.raises(SourceError, match=unit.source) as caught:
        list(read(unit, []))
    assert (caught.value.code, caught.value.transient) == ("source_unreadable", True)


def test_what_may_not_be_read_or_is_gone_is_named_at_once(web: HttpServer) -> None:
    unit = shard(web)
    web.suffer("denied", 1)
    with pytest.raises(SourceError) as denied:
        list(read(unit, []))
    (web.folder / "shard.tar").unlink()
    with pytest.raises(SourceError) as gone:
        list(read(unit, []))
    assert [denied.value.code, gone.value.code] == ["source_denied", "source_missing"]
    assert not denied.value.transient
    assert web.asked["GET 403"] == 1


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1:9", "Connect call failed"), ("none.invalid", "not known")])
@pytest.mark.parametrize("name", ["", "x.tar", "x.parquet", "x.jsonl"])
def test_a_host_that_is_not_reached_is_not_a_missing_file(
    host: str, why: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    pauses: list[float] = []
    monkeypatch.setattr(ranged_reads, "_UNREACHED", {})
    monkeypatch.setattr(ranged_reads, "PAUSES_S", (0.2, 0.5, 1.0, 2.0))
    monkeypatch.setattr(ranged_reads.time, "sleep", pauses.append)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # at once: a resolver may take seconds
    urls = [f"http://{host}/{n}{name}" for n in range(3)] if name else [f"http://{host}/"]
    with pytest.raises(SourceError, match=f"no connection to {host}: .*{why}") as caught:
        prepare(request_of(tmp_path / "out", *urls))
    assert (caught.value.code, caught.value.transient) == ("source_unreadable", True)
    assert len(pauses) == 2
    assert sum(pauses) < 2


def test_a_server_that_knows_no_ranges_sends_a_shard_twice_and_not_once_for_each_range(web: HttpServer) -> None:
    web.ranges = False
    unit = shard(web)
    assert unit.stop is not None
    assert unit.stop > 10 * ranged_reads.LARGE_BYTES
    list(read(unit, []))
    assert web.asked["GET 200"] == 2


def test_a_shard_that_is_replaced_while_it_is_read_is_never_mixed(
    web: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = shard(web)
    other = bytes(len((web.folder / "shard.tar").read_bytes()))
    load = ranged_reads.load

    def replaced(*arguments: object) -> object:
        (web.folder / "shard.tar").write_bytes(other)
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ranged_reads, "load", replaced)
    with pytest.raises(SourceError) as caught:
        list(read(unit, []))
    assert caught.value.code == "shard_changed"


def test_patterns_and_braces_name_objects(s3: None, tmp_path: Path) -> None:
    for name in ("00000", "00001", "00002"):
        (tmp_path / f"{name}.tar").write_bytes(bytes(1024))
    url = upload(tmp_path, "patterns")
    shards = [f"{url}/{name}.tar" for name in ("00000", "00001", "00002")]
    assert match(f"{url}/*.tar") == shards
    for text in (f"{url}/*.tar", url + "/{00000..00002}.tar", url):
        assert [unit.source for unit in plan([text], OPTIONS).units] == shards
    with pytest.raises(InputError, match=r"00003.tar is not found \(1 of 4 inputs\)"):
        plan([url + "/{00000..00003}.tar"], OPTIONS)
    with pytest.raises(InputError, match="no file matches"):
        plan([f"{url}/*.jsonl"], OPTIONS)


def test_many_shards_of_a_folder_are_looked_up_in_one_listing(s3: None, tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02d}.tar").write_bytes(bytes(1024))
    url = upload(tmp_path, "many")
    names = [f"{url}/{number:02d}.tar" for number in range(30)]
    now = [listings.stat(name) for name in names]
    with listings.cached_listings():
        assert [listings.stat(name) for name in names] == now
        assert [listings.stat(name) for name in names[: listings.LISTED_AFTER]] == now[: listings.LISTED_AFTER]
        with pytest.raises(SourceError, match=r"30.tar: does not exist"):
            listings.stat(f"{url}/30.tar")


def test_a_remote_folder_of_images_is_listed_below_once_while_it_is_planned(s3: None, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.kind == "files")
    case.write(tmp_path)
    url = upload(tmp_path, "listed")
    with requests_to_s3() as seen:
        units = list(plan([f"{url}/images"], OPTIONS).units)
    assert units == list(SOURCES["files"].split(f"{url}/images", OPTIONS))
    everything = [name for name, query in seen if name == "ListObjectsV2" and "delimiter" not in parse_qs(query)]
    assert len(everything) == 1, seen


def test_what_is_gone_from_a_bucket_is_named_by_one_listing_and_what_is_there_is_not(s3: None, tmp_path: Path) -> None:
    import boto3

    for number in range(40):
        (tmp_path / "in" / f"{number:02d}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number:02d}.txt").write_text(f"text {number}\n")
    url = upload(tmp_path / "in", "shrunk")
    asked = request_of(tmp_path / "out", f"{url}/*.txt", options=OPTIONS)
    prepare(asked)
    for number in range(20):
        boto3.client("s3").delete_object(Bucket="shrunk", Key=f"{number:02d}.txt")
    additions = Additions(Manifest(Layout(asked.output)))
    with requests_to_s3() as seen:
        differences = additions.differences({0})
    assert differences.vanished.count == 20
    assert str(differences.vanished) == f"{url}/00.txt, {url}/01.txt, {url}/02.txt and 17 more"
    assert len(seen) <= 2 * listings.LISTED_AFTER + 1, seen
    (told,) = prepare(asked).warnings
    assert f"not there any more: {url}/00.txt, {url}/01.txt, {url}/02.txt and 17 more;" in told
    assert prepare(request_of(tmp_path / "out", f"{url}/20.txt", options=OPTIONS)).warnings == ()


def test_an_image_that_is_gone_from_a_bucket_is_named_once(s3: None, tmp_path: Path) -> None:
    import boto3

    case = next(case for case in CASES if case.kind == "files")
    case.write(tmp_path)
    url = upload(tmp_path, "fewer")
    asked = request_of(tmp_path / "out", f"{url}/images", options=OPTIONS)
    prepare(asked)
    key = case.listing[3][0]
    boto3.client("s3").delete_object(Bucket="fewer", Key=f"images/{key}")
    (told,) = prepare(asked).warnings
    assert told.startswith(f"not there any more: {url}/images/{key}; ")


def test_an_image_that_is_gone_is_one_failure_of_a_remote_folder(s3: None, tmp_path: Path) -> None:
    import boto3

    case = next(case for case in CASES if case.kind == "files")
    case.write(tmp_path)
    url = upload(tmp_path, "gone")
    units = list(SOURCES["files"].split(f"{url}/images", OPTIONS))
    key = case.listing[5][0]
    boto3.client("s3").delete_object(Bucket="gone", Key=f"images/{key}")
    samples = [sample for unit in units for sample in read(unit, [])]
    assert {sample.key: sample.error[0] for sample in samples if sample.error} == {key: "source_missing"}
    assert len(samples) == len(case.listing)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pipe:aws s3 cp s3://b/a.tar -", "shard_scheme_denied"),
        ("file:///etc/passwd", "shard_scheme_denied"),
        ("memory://a.tar", "shard_scheme_denied"),
        ("reference://a.tar", "shard_scheme_denied"),
        ("zip://a.tar::https://host/a.zip", "shard_scheme_denied"),
        ("https://host/x/../a.tar", "source_denied"),
        ("s3://bucket/x/%2e%2e/a.tar", "source_denied"),
        ("s3://elsewhere/a.tar", "source_denied"),
        ("https://host.evil/data/a.tar", "source_denied"),
        ("https://host/database/a.tar", "source_denied"),
    ],
)
def test_only_what_a_worker_may_read_is_asked_for(source: str, code: str) -> None:
    with pytest.raises(SourceError) as caught:
        read(Unit(kind="tar", source=source), ["https://host/data", "s3://bucket", "/data"])
    assert caught.value.code == code


def shard(web: HttpServer) -> Unit:
    case = next(case for case in CASES if case.kind == "tar")
    case.write(web.folder)
    (unit,) = SOURCES["tar"].split(f"{web.url}/shard.tar", OPTIONS)
    return unit
