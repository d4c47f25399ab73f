"""Shards over HTTP, by `embq shards serve` and by nginx as the stack of containers has it: one contract for both."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from embq.sources.formats.tar import TarSource
from embq.sources.reader_options import ReadOptions
from embq.training.shards import verification
from embq.training.shards.processes import each
from embq.training.shards.serving import find
from embq.training.shards.shard_set import open_shards, summarized
from tests.support.waiting import wait_until
from tests.training.pictures_converted import class_tree, classed, convert, plan_of, report, shards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and things beside them that are nobody's business."""
    root = tmp_path_factory.mktemp("served")
    convert(plan_of(classed(class_tree(root / "tree", 30, ("cat", "dog"))), root / "data", per_shard=8))
    data = root / "data"
    (data / "below").mkdir()
    shutil.copy(data / "train-000000.tar", data / "below" / "copy.tar")
    (data / "secret.txt").write_text("secret")
    (data / ".hidden.tar").write_text("secret")
    (root / "outside.tar").write_text("secret")
    return data


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """The process ends with the block."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def by_embq(folder: Path, tmp: Path) -> Iterator[str]:
    """`embq shards serve`; gives its URL."""
    command = [sys.executable, "-m", "embq", "shards", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with ended(process):
        assert process.stdout is not None
        found = re.fullmatch(r"listening on (\S+)\n", process.stdout.readline())
        assert found is not None
        assert process.stdout.readline() == f"  {found[1]}/train-{{000000..000003}}.tar\n"
        yield found[1]


@contextmanager
def by_nginx(folder: Path, tmp: Path) -> Iterator[str]:
    """Debian's nginx with the stack's configuration, in which only paths and the address are other ones."""
    binary = shutil.which("nginx")
    if binary is None:
        pytest.skip("nginx is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = (ROOT / "deploy" / "nginx.conf").read_text(encoding="utf-8")
    here = {
        "worker_processes auto;": f"worker_processes 1; {'user root;' if os.geteuid() == 0 else ''}",
        "listen 8080;": f"listen 127.0.0.1:{port};",
        "root /data;": f"root {folder};",
        "pid /tmp/": f"pid {tmp}/",
        **{
            f"_temp_path /tmp/{name};": f"_temp_path {tmp}/{name};"
            for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi")
        },
    }
    for stack, ours in here.items():
        assert said.count(stack) == 1, stack
        said = said.replace(stack, ours)
    (tmp / "nginx.conf").write_text(said)
    command = [binary, "-e", str(tmp / "error.log"), "-c", str(tmp / "nginx.conf"), "-g", "daemon off;"]
    process = subprocess.Popen(command, text=True)
    with ended(process):
        wait_until(lambda: process.poll() is not None or _answers(port), 20)
        assert process.poll() is None, (tmp / "error.log").read_text()
        yield f"http://127.0.0.1:{port}"


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module", params=["embq", "nginx"])
def url(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of the folder."""
    serve = {"embq": by_embq, "nginx": by_nginx}[request.param]
    with serve(folder, tmp_path_factory.mktemp("server")) as address:
        yield address


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Status, body and headers of an answer; the path goes as it is."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


# --- the contract ---


def test_a_shard_is_read_whole_and_asked_for_its_size_and_version(url: str, folder: Path) -> None:
    for path in ("train-000000.tar", "below/copy.tar", "sizes.json", "classes.json"):
        content = (folder / path).read_bytes()
        status, body, headers = ask(url, f"/{path}")
        assert (status, body) == (200, content)
        head = ask(url, f"/{path}", "HEAD")
        assert (head[0], head[1]) == (200, b"")
        for answer in (headers, head[2]):
            assert answer["Content-Length"] == str(len(content))
            assert answer["Accept-Ranges"] == "bytes"
            assert answer["ETag"] == headers["ETag"]
            assert "Content-Encoding" not in answer


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ("bytes=0-511", slice(0, 512)),
        ("bytes=512-", slice(512, None)),
        ("bytes=-1024", slice(-1024, None)),
        ("bytes=1000-99999999", slice(1000, None)),
    ],
)
def test_a_range_is_those_bytes(url: str, folder: Path, wanted: str, part: slice) -> None:
    content = (folder / "train-000000.tar").read_bytes()
    status, body, headers = ask(url, "/train-000000.tar", Range=wanted)
    assert (status, body) == (206, content[part])
    first, stop, _ = part.indices(len(content))
    assert headers["Content-Range"] == f"bytes {first}-{stop - 1}/{len(content)}"


def test_a_range_behind_the_end_is_refused_and_one_of_another_version_is_the_whole(url: str, folder: Path) -> None:
    content = (folder / "train-000000.tar").read_bytes()
    assert ask(url, "/train-000000.tar", Range=f"bytes={len(content)}-")[0] == 416
    etag = ask(url, "/train-000000.tar", "HEAD")[2]["ETag"]
    assert ask(url, "/train-000000.tar", Range="bytes=0-9", If_Range=etag)[:2] == (206, content[:10])
    assert ask(url, "/train-000000.tar", Range="bytes=0-9", If_Range='"another"')[:2] == (200, content)


def test_a_shard_that_is_written_again_has_another_version(url: str, folder: Path) -> None:
    path = folder / "changing.tar"
    path.write_bytes(b"a" * 1024)
    before = ask(url, "/changing.tar", "HEAD")[2]["ETag"]
    path.write_bytes(b"b" * 2048)
    assert ask(url, "/changing.tar", "HEAD")[2]["ETag"] != before
    path.unlink()
    assert ask(url, "/changing.tar")[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/below", "/below/", "/secret.txt", "/train-conversion.json", "/.hidden.tar", "/none.tar"),
        *("/../outside.tar", "/%2e%2e/outside.tar", "/below/..%2f..%2foutside.tar", "/..%5coutside.tar"),
        *("/below/../../outside.tar", "/train-000000.tar%00.txt", "//etc/passwd", "/train-000000.tar/"),
    ],
)
def test_nothing_else_is_there(url: str, path: str) -> None:
    status, body, _ = ask(url, path)
    assert status in (400, 404), path
    assert b"secret" not in body
    assert b"train-" not in body


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(url: str, folder: Path, method: str) -> None:
    before = hashlib.sha256((folder / "train-000000.tar").read_bytes()).hexdigest()
    assert ask(url, "/train-000000.tar", method)[0] in (403, 405)
    assert hashlib.sha256((folder / "train-000000.tar").read_bytes()).hexdigest() == before


# --- who reads from it ---


def test_the_shards_are_opened_by_expressions_with_their_counts(url: str, folder: Path) -> None:
    there = open_shards(f"{url}/train-{{000000..000003}}.tar")
    assert there.counts == (8, 8, 8, 6)
    assert there.digest == open_shards(f"{folder}/train-*.tar").digest
    assert open_shards(f"{url}/") == there
    assert open_shards(f"{url}/below/copy.tar").counts is None
    (line,) = summarized([f"{url}/"])
    assert (line.expression, line.samples) == (f"{url}/train-{{000000..000003}}.tar", 30)


def test_embq_reads_samples_from_it(url: str, folder: Path) -> None:
    source, options = TarSource(), ReadOptions()
    for name in ("train-000000.tar", "train-000003.tar"):
        (far,), (near,) = source.split(f"{url}/{name}", options), source.split(str(folder / name), options)
        assert list(source.read(far)) == list(source.read(near))


def test_webdataset_reads_every_sample_from_it(url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("webdataset reads http by curl, which is not installed")
    import webdataset

    data = webdataset.WebDataset(f"{url}/train-{{000000..000003}}.tar", shardshuffle=False)
    assert [sample["__key__"] for sample in data] == [f"{number:08d}" for number in range(30)]


def test_verify_reads_all_of_it_over_the_network(url: str) -> None:
    done = shards("verify", f"{url}/", "--workers", 2, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report(done)["samples"], report(done)["counted"]) == (30, True)


# --- embq's own ---


def test_several_processes_read_over_the_network_each_with_connections_of_its_own(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def noted(function: Any, items: Any, processes: int, *, connects: bool) -> Iterator[Any]:
        given.append((processes, connects))
        return each(function, items, processes, connects=connects)

    monkeypatch.setattr(verification, "each", noted)
    found = verification.verify([f"{url}/"], decode=True, processes=2)
    assert given == [(2, True)]
    assert (found.ok, found.samples) == (True, 30)


def test_links_are_followed_inside_the_folder_only(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for path in (tmp_path / "outside.tar", tmp_path / "data" / "inside.tar"):
        path.write_bytes(b"x")
    for name, target in (("in.tar", "inside.tar"), ("out.tar", "../outside.tar"), ("none.tar", "nowhere.tar")):
        (tmp_path / "data" / name).symlink_to(target)
    (tmp_path / "data" / "up").symlink_to("..")
    os.mkfifo(tmp_path / "data" / "pipe.tar")
    root = str(tmp_path / "data")
    assert find(root, "/in.tar") is not None
    for asked in ("/out.tar", "/none.tar", "/up/outside.tar", "/pipe.tar"):
        assert find(root, asked) is None, asked


def test_a_page_under_another_name_reads_nothing_from_loopback(folder: Path, tmp_path: Path) -> None:
    with by_embq(folder, tmp_path) as url:
        assert ask(url, "/sizes.json", Host="shards.example.org")[0] == 421
        assert json.loads(ask(url, "/sizes.json", Host="localhost:8080")[1])["train-000003.tar"] == 6


def test_a_port_that_is_taken_and_a_folder_that_is_none_are_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = shards("serve", tmp_path, "--port", taken.getsockname()[1])
    assert done.returncode == 75
    assert "is taken by another program" in done.stderr
    done = shards("serve", tmp_path / "none")
    assert done.returncode == 65
    assert "is no folder" in done.stderr
