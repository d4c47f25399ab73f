"""Builds of an index in a bucket: its files and answers are those of a folder, whatever is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.core.errors import AwayError, Exit, TryLaterError
from embq.core.storage.objects import ObjectPath
from embq.index.index_files import claim, remote
from embq.index.index_files.files import LOCK, File, index_lock, to_json
from embq.index.index_files.publication import _announce, settle
from embq.index.index_files.version import Version, find_current, read_current
from embq.index.stages.report import PICTURE
from embq.index.stages.units import IndexUnit, Sidecar, find
from tests.indexer.indexes_that_grow import add_part, rows
from tests.support.servers.storage import Killed, environment, killing, s3_proxy

QUERIES = rows(5, seed=77).astype(np.float32)
KEY = ("--index-key", "IVF16,SQ8", "--seed", "3")
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(3):
        add_part(folder, f"p{number}", rows(400, number))
    return folder


@pytest.fixture(scope="module")
def wanted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The version that a build in a folder makes."""
    folder = tmp_path_factory.mktemp("here") / "index"
    assert built(data, folder) == Exit.DONE
    return read_current(folder)


@pytest.fixture
def url(s3: str, tmp_path: Path) -> ObjectPath:
    return ObjectPath(f"s3://bucket/{tmp_path.name}/index")


def built(data: Path, to: Path | ObjectPath, *options: str) -> int:
    return run(["index", str(data), "--output", str(to), *KEY, "--quiet", *options])


def keys(url: ObjectPath) -> list[str]:
    bucket, _, prefix = str(url).removeprefix("s3://").partition("/")
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    found = [one["Key"].removeprefix(f"{prefix}/") for page in pages for one in page.get("Contents", ())]
    # There is a picture where two settings differ in their measured times, which on a busy machine is another result.
    return [one for one in found if not one.endswith(f"/{PICTURE}")]


def sums(version: Version) -> list[str]:
    """Checksums of all that answers are made of."""
    return sorted(one.sha256 for one in version.files())


def assert_equal(url: ObjectPath, wanted: Version) -> None:
    """The bucket holds the wanted version, the files that it names and nothing else; its answers are the same."""
    current = find_current(url)
    assert current is not None
    assert sums(current) == sums(wanted)
    named = {file.path for file in current.files()}
    small = {f"{current.name}/{path.name}" for path in wanted.path.iterdir() if path.name != PICTURE}
    assert set(keys(url)) == named | small | {"CURRENT"}
    setting = {"nprobe": 4}
    for query in QUERIES:
        there = embq.search(str(url), vector=query, k=10, **setting)
        assert there == embq.search(wanted.index, vector=query, k=10, **setting)


def test_a_build_in_a_bucket_is_that_of_a_folder(
    data: Path, url: ObjectPath, wanted: Version, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert built(data, url, "--json") == Exit.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["index"], told["infos"]["index_path"], told["fresh"]) == (str(url), str(url), True)
    here = json.loads((wanted.path / "infos.json").read_bytes())
    assert told["infos"]["imbalance_factor"] == here["imbalance_factor"]
    assert not list(cache.glob("*-*")), "copies of the build are left on this machine"
    assert_equal(url, wanted)
    before = keys(url)
    assert built(data, url, "--json") == Exit.DONE
    assert (json.loads(capsys.readouterr().out)["fresh"], keys(url)) == (False, before)


def test_a_run_in_a_bucket_gets_its_index_beside_it(data: Path, s3: str, tmp_path: Path, wanted: Version) -> None:
    folder = f"s3://bucket/{tmp_path.name}/vectors"
    for path in data.iterdir():
        (ObjectPath(folder) / path.name).replace(path.read_bytes())
    assert run(["index", folder, *KEY, "--quiet", "--index-path", str(tmp_path / "knn.index")]) == Exit.DONE
    assert (tmp_path / "knn.index").exists()
    (name,) = {path.name for path in (ObjectPath(folder) / "index").iterdir()}
    assert len(embq.search(folder, vector=QUERIES[0], k=3, vector_name=name)) == 3


def test_lists_are_merged_from_ranges_where_there_are_no_copies(
    data: Path, url: ObjectPath, wanted: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def sent(temporary: Path, index: ObjectPath, file: File, folder: Path) -> None:
        (index / file.path).upload(temporary)
        temporary.unlink()

    def copied(index: ObjectPath, file: File, folder: Path) -> Path:
        read.append(file.path)
        return remote.copied(index, file, folder)

    monkeypatch.setattr("embq.index.stages.build_dir.sent", sent)
    monkeypatch.setattr("embq.index.stages.build_dir.copied", copied)
    assert built(data, url) == Exit.DONE
    assert not [path for path in read if "/add-" in path and path.startswith("_work/")]
    assert_equal(url, wanted)


def killed_at(data: Path, url: ObjectPath, at: int, *, after: bool) -> bool:
    """Build in a process that is killed at a request; gives whether it came so far."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectPath, "call", killing(at, after=after))
        patch.setattr(claim, "BEAT_S", 3_600.0)
        try:
            built(data, url)
        except Killed:
            return True
    return False


def requests_of(data: Path, url: ObjectPath) -> int:
    """Requests of a build that nothing disturbs."""
    real, count = ObjectPath.call, [0]

    def ask(path: ObjectPath, request: Callable[[Any, str], Any]) -> Any:
        count[0] += 1
        return real(path, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectPath, "call", ask)
        built(data, url)
    return count[0]


@pytest.mark.parametrize(
    "shares",
    [pytest.param((0.78,), id="one"), pytest.param(np.linspace(0.02, 0.99, 16), id="many", marks=pytest.mark.slow)],
)
def test_a_build_that_is_killed_at_any_request_goes_on_and_ends_equal(
    data: Path, url: ObjectPath, wanted: Version, shares: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.index.stages.report.draw_report", lambda infos, tuning, path: path.touch())
    count = requests_of(data, url / "undisturbed")
    monkeypatch.setattr(claim, "STALE_S", 0.0)
    for number, share in enumerate(shares):
        to, at = url / str(number), int(share * count)
        assert killed_at(data, to, at, after=number % 2 == 1), (at, count)
        assert built(data, to) == Exit.DONE, at
        assert_equal(to, wanted)


@pytest.mark.slow
def test_two_builds_at_once_are_refused_and_a_dead_one_is_followed(
    data: Path, url: ObjectPath, wanted: Version, capsys: pytest.CaptureFixture[str]
) -> None:
    with index_lock(url) as check:
        assert built(data, url) == Exit.TRY_LATER
        assert f"another embq process is at work on the index {url}" in capsys.readouterr().err
        check()
    held = url / LOCK / "000007"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    held.replace(json.dumps({"host": claim._host(), "pid": ended.pid, "nonce": ""}).encode())
    assert built(data, url) == Exit.DONE, "its process has ended"
    assert_equal(url, wanted)


def test_a_holder_without_a_sign_of_life_is_taken_over_and_told(
    url: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index_lock(url) as check:
        monkeypatch.setattr(claim, "STALE_S", 0.0)
        with index_lock(url) as later:
            later()
            with pytest.raises(TryLaterError, match="taken for dead"):
                check()
    assert keys(url) == []


def away(path: ObjectPath, request: Callable[[Any, str], Any]) -> Any:
    raise AwayError(f"{path} is away")


def test_a_store_that_is_away_says_nothing_about_a_unit(url: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a finished unit, when the store does not answer, then it is not taken for undone."""
    unit = IndexUnit(index=str(url), build="b1", stage="sample", number=0, inputs="i")
    record = Sidecar(
        digest=unit.digest, files={}, stats={}, seconds=0, cpu_seconds=0, peak_rss_bytes=0, versions={}, worker="w"
    )
    unit.sidecar.replace(json.dumps(to_json(record)).encode())
    assert find(unit) is not None
    monkeypatch.setattr(ObjectPath, "call", away)
    with pytest.raises(AwayError):
        find(unit)


@pytest.mark.slow
def test_a_late_writer_does_not_bring_an_old_version_back(data: Path, url: ObjectPath, wanted: Version) -> None:
    """Given a process that stops before it writes CURRENT, when a later version is there, then that stays current."""
    assert built(data, url) == built(data, url, "--overwrite") == Exit.DONE
    assert (url / "CURRENT").read_text() == "v0002\n"
    _announce(url, "v0001")
    assert (url / "CURRENT").read_text() == "v0002\n"
    (url / "CURRENT").replace(b"v0001\n")
    (url / "v0003" / "infos.json").replace(b"{}")
    settle(url)
    assert (url / "CURRENT").read_text() == "v0002\n"
    assert not (url / "v0003").is_dir(), "it has no record"


def test_what_a_bucket_cannot_have_is_refused_by_name(
    data: Path, s3: str, url: ObjectPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url}):
        proxy.deaf = True
        assert built(data, url) == Exit.CONFIG
    assert "created twice" in capsys.readouterr().err
    assert keys(url) == []
    assert built(data, url) == Exit.DONE
    more = tmp_path / "more"
    shutil.copytree(data, more)
    add_part(more, "p9", rows(50, 9))
    for change in (["add", str(more), "--output", str(url)], ["delete", str(url), "k"], ["compact", str(url)]):
        assert run(["index", *change]) == Exit.USAGE
        assert "neither changed nor exported" in capsys.readouterr().err
    assert built(more, url) == Exit.DONE
    assert read_current(url).next_id == 1_250
    assert built(data, ObjectPath("s3://nobucket/index")) == Exit.OUTPUT
    assert "the bucket does not exist" in capsys.readouterr().err


def test_copies_of_a_build_in_use_are_not_evicted(url: ObjectPath) -> None:
    folder = remote.build_cache(url, "b1")
    with remote.in_use(folder):
        assert not remote._evicted(folder)
        assert folder.exists()
    assert remote._evicted(folder)
