"""An index on an object store is searched and served from a bounded cache."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.core.errors import ConfigError, Exit, InputError, OutputError, TryLaterError, UsageError
from embq.core.storage.objects import ObjectPath
from embq.index.change.deletes import delete
from embq.index.index_files import remote
from embq.index.index_files.remote import IN_USE_S, fetched
from embq.index.index_files.version import Version, read_current
from embq.retrieval.serving import served_index
from embq.retrieval.serving.index_discovery import named_indices
from embq.retrieval.serving.served_index import ServedIndex, collection_rows, open_version
from tests.indexer.indexes_that_grow import copy_of, make_index, rows
from tests.support.full_disk import refusals

BUCKET = "bucket"
QUERY = rows(1, seed=77)[0].astype(np.float32)
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("made"), parts=1, key="IVF4,SQ8")


@pytest.fixture
def index(made: Path, tmp_path: Path) -> Path:
    """An index of 400 rows with their vectors."""
    return copy_of(made, tmp_path / "here")


def published(index: Path, prefix: str) -> ObjectPath:
    """The index in the bucket, as it is now."""
    client = boto3.client("s3")
    for path in sorted(index.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.relative_to(index)}", Body=path.read_bytes())
    return ObjectPath(f"s3://{BUCKET}/{prefix}")


def changed(url: ObjectPath, version: Version, **fields: Any) -> None:
    """Replace fields of a version's record in the bucket."""
    where = url / version.name / "version.json"
    where.replace(json.dumps({**json.loads(where.read_bytes()), **fields}).encode())


def payloads(cache: Path) -> set[Path]:
    return set(cache.glob("*/files/*"))


def test_answers_are_those_of_the_local_folder(index: Path, tmp_path: Path, s3: str, cache: Path) -> None:
    url = published(index, f"{tmp_path.name}/run/index/image")
    wanted = embq.search(index, vector=QUERY, k=20)
    assert embq.search(str(url), vector=QUERY, k=20) == wanted
    assert embq.search(str(url.parent.parent), vector=QUERY, k=20, vector_name="image") == wanted
    assert len({one.sha256 for one in read_current(index).files()}) == len(payloads(cache))

    before = {path: path.stat().st_mtime_ns for path in payloads(cache)}
    delete(index, [wanted[0].key])
    published(index, f"{tmp_path.name}/run/index/image")
    (found,) = embq.search(str(url), vector=QUERY, k=1)
    assert found.key == wanted[1].key
    after = {path: path.stat().st_mtime_ns for path in payloads(cache)}
    assert before.items() < after.items(), "what both versions have was fetched again"
    assert [path.name for path in cache.glob("*/v*")] == ["v0002"]


def test_the_command_says_what_it_fetches(
    index: Path, tmp_path: Path, s3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = published(index, tmp_path.name)
    np.save(tmp_path / "query.npy", QUERY)
    for notes in (f" of {url} ...", ""):
        assert run(["search", str(url), "--vector", str(tmp_path / "query.npy"), "-k", "3", "--json"]) == Exit.DONE
        printed = capsys.readouterr()
        results = json.loads(printed.out)["results"]
        assert [one["id"] for one in results] == [one.id for one in embq.search(index, vector=QUERY, k=3)]
        assert notes in printed.err
        assert bool(printed.err) == bool(notes)


@pytest.mark.parametrize("entry", ["", ".lock"])
def test_a_link_in_the_cache_is_not_followed(
    index: Path, tmp_path: Path, s3: str, cache: Path, capsys: pytest.CaptureFixture[str], entry: str
) -> None:
    """The versions of another index, which it led to, were swept as out of date; a lock was created anywhere."""
    url = published(index, tmp_path.name)
    np.save(tmp_path / "query.npy", QUERY)
    question = ["search", str(url), "--vector", str(tmp_path / "query.npy")]
    assert run(question) == Exit.DONE
    (name,) = (path.stem for path in cache.glob("*.lock"))
    (cache / f"{name}{entry}").rename(tmp_path / "moved")
    precious = copy_of(index, tmp_path / "precious")
    (precious / "v0001").rename(precious / "v0007")
    held = sorted(precious.rglob("*"))
    (cache / f"{name}{entry}").symlink_to(tmp_path / "created" if entry else precious)
    capsys.readouterr()
    assert run(question) == Exit.OUTPUT
    assert "is a symbolic link" in capsys.readouterr().err
    assert sorted(precious.rglob("*")) == held
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("folder", ["", "indexes"])
def test_a_cache_that_others_may_write_is_refused(
    index: Path, tmp_path: Path, s3: str, cache: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads in the cache are known by their size, so that others could choose what is found."""
    url = published(index, tmp_path.name)
    assert embq.search(str(url), vector=QUERY, k=1)
    shared = cache.parent / folder
    shared.chmod(0o777)
    with pytest.raises(OutputError, match="may be written by all"):
        embq.search(str(url), vector=QUERY, k=1)
    shared.chmod(0o755)
    assert embq.search(str(url), vector=QUERY, k=1)
    owner = shared.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(OutputError, match="another user's") if owner else nullcontext():
        embq.search(str(url), vector=QUERY, k=1)


@pytest.mark.parametrize("damage", ["bytes", "size", "gone"])
def test_a_damaged_object_is_one_clear_error(index: Path, tmp_path: Path, s3: str, cache: Path, damage: str) -> None:
    url = published(index, tmp_path.name)
    whole = url / read_current(index).identity[0].path
    data = whole.read_bytes()
    if damage == "gone":
        whole.unlink()
    else:
        whole.replace(data[:-1] if damage == "size" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(OutputError) as caught:
        embq.search(str(url), vector=QUERY)
    assert (caught.value.code, str(whole) in caught.value.message) == ("index_damaged", True)
    assert not [path for path in payloads(cache) if path.name.startswith(".")]
    assert not list(cache.glob("*/CURRENT"))
    (left,) = {path.parent for path in payloads(cache)}
    (left / ".of-a-killed-fetch").touch()
    whole.replace(data)
    assert embq.search(str(url), vector=QUERY) == embq.search(index, vector=QUERY)
    assert not [path for path in payloads(cache) if path.name.startswith(".")]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "files/../../x", "files//x", "files/.", ""])
def test_names_that_lead_elsewhere_are_refused(index: Path, tmp_path: Path, s3: str, path: str) -> None:
    url, version = published(index, tmp_path.name), read_current(index)
    trained = {**asdict(version.trained), "path": path}
    changed(url, version, trained=trained)
    with pytest.raises(OutputError) as caught:
        fetched(url)
    assert caught.value.code == "index_damaged"


def test_names_in_a_record_are_no_paths_here(index: Path, tmp_path: Path, s3: str, cache: Path) -> None:
    url, version = published(index, tmp_path.name), read_current(index)
    changed(url, version, name="../../elsewhere", trained=asdict(version.trained))
    with pytest.raises(OutputError, match=r"version\.json is malformed"):
        fetched(url)
    changed(url, version, name="v9999", trained={**asdict(version.trained), "path": "CURRENT"})
    with pytest.raises(OutputError, match="its record says"):
        fetched(url)
    changed(url, version, name="v9999", trained=asdict(version.trained))
    assert read_current(fetched(url)).name == version.name
    (url / "CURRENT").replace(b"../x")
    with pytest.raises(OutputError, match="does not name a version"):
        fetched(url)
    (url / "CURRENT").replace(b"v" + b"1" * 1000)
    with pytest.raises(OutputError, match="CURRENT"):
        fetched(url)
    (url / "CURRENT").replace(b"v0001")
    (url / "v0001" / "version.json").replace(b"[" * 100_000)
    with pytest.raises(OutputError) as caught:
        fetched(url)
    assert caught.value.code == "index_damaged"


def test_the_cache_keeps_its_bound(
    index: Path, tmp_path: Path, s3: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [published(index, f"{tmp_path.name}/{number}") for number in range(3)]
    size = sum({one.sha256: one.bytes for one in read_current(index).files()}.values())
    monkeypatch.setenv("EMBQ_INDEX_CACHE_GB", str(2.5 * size / 1e9))
    first, second = (fetched(url) for url in urls[:2])
    with pytest.raises(OutputError, match="no space") as caught:
        fetched(urls[2])
    assert caught.value.code == "no_space", "an index in use was evicted"
    old = time.time() - IN_USE_S - 10
    for folder, age in ((first, 0), (second, 100)):
        os.utime(folder.with_suffix(".lock"), (old - age, old - age))
    third = fetched(urls[2])
    assert [one.exists() for one in (first, second, third)] == [True, False, True]
    for nonsense in ("much", "-1", "0", "nan", "inf"):
        monkeypatch.setenv("EMBQ_INDEX_CACHE_GB", nonsense)
        with pytest.raises(ConfigError, match="EMBQ_INDEX_CACHE_GB"):
            fetched(urls[1])
    monkeypatch.setenv("EMBQ_INDEX_CACHE_GB", str(0.5 * size / 1e9))
    with pytest.raises(OutputError, match="no space"):
        fetched(urls[1])


@pytest.mark.parametrize("kind", ["open", "write", "mkdir", "rename"])
def test_a_full_disk_ends_a_fetch_with_one_error_and_the_next_one_goes_on(
    index: Path, tmp_path: Path, s3: str, cache: Path, kind: str
) -> None:
    url = published(index, tmp_path.name)
    sizes = {file.sha256: file.bytes for file in read_current(index).files()}
    errors = 0

    def emptied(_: int) -> Path:
        shutil.rmtree(cache, ignore_errors=True)
        return cache

    for _, error in refusals(kind, cache, emptied, lambda _: fetched(url)):
        if error is not None:
            errors += 1
            assert (error.code, error.next_step.partition(",")[0]) == ("no_space", "make room")
            assert error.message.startswith(f"no space left for {cache}")
            assert not list(cache.rglob("*.????????")), "what was begun takes room"
        assert all(path.stat().st_size == sizes[path.name] for path in payloads(cache)), "half of it has a name"
        assert bool(list(cache.glob("*/CURRENT"))) == (error is None)
    assert errors
    assert {path.name for path in payloads(fetched(url).parent)} == sizes.keys()


def served(url: ObjectPath) -> ServedIndex:
    (named,) = named_indices([str(url)], [])
    assert (named.name, named.modality, named.source) == (url.name, "image", url)
    return ServedIndex(
        name=named.name,
        modality=named.modality,
        path=named.path,
        opener=lambda path: open_version(path, memory="ram", threads=1),
        count_rows=collection_rows,
        source=named.source,
    )


def nearest(served_one: ServedIndex) -> int:
    with served_one.use() as version:
        return int(version.searcher.search(QUERY[None], 1).ids[0, 0])


def test_a_server_takes_up_new_versions_and_outlives_its_store(
    index: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = published(index, tmp_path.name)
    one = served(url)
    best = embq.search(index, vector=QUERY, k=2)
    assert (one.refresh(), nearest(one)) == (False, best[0].id)

    delete(index, [best[0].key])
    (url / "CURRENT").replace(b"v0002\n")  # before the version is there
    assert not one.refresh(), "asked again before 30 s were over"
    monkeypatch.setattr(served_index, "ASK_S", 0.0)
    one._ask_at = 0.0
    with pytest.raises(OutputError):
        one.refresh()
    assert ("version.json" in one.failed, nearest(one)) == (True, best[0].id)
    published(index, tmp_path.name)
    assert one.refresh()
    assert (one.failed, one.version.name, nearest(one)) == ("", "v0002", best[1].id)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "_current", away)
        with pytest.raises(TryLaterError):
            one.refresh()
        assert ("away" in one.failed, nearest(one)) == (True, best[1].id)
    assert (one.refresh(), one.failed) == (False, "")

    def stop() -> None:
        raise TryLaterError("stopped")

    delete(index, [best[1].key])
    published(index, tmp_path.name)
    with pytest.raises(TryLaterError, match="stopped"):
        one.refresh(stop)
    assert nearest(one) == best[1].id
    one.close()


def away(*_: object) -> str:
    raise TryLaterError("the store is away")


def test_what_is_not_there_or_not_allowed_is_one_sentence(
    index: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (f"s3://{BUCKET}/{tmp_path.name}/none", "s3://no-such-bucket/none"):
        for ask in (lambda url=url: embq.search(url, vector=QUERY), lambda url=url: named_indices([url], [])):
            with pytest.raises(InputError) as caught:
                ask()
            assert (caught.value.code, url in caught.value.message) == ("no_index", True)
    with pytest.raises(UsageError):
        embq.search("s3://key@bucket/x", vector=QUERY)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Forbidden", "s3://bucket/x")

    monkeypatch.setattr(ObjectPath, "call", denied)
    for ask in (
        lambda: embq.search("s3://bucket/x", vector=QUERY),
        lambda: named_indices(["s3://bucket/x"], []),
        lambda: fetched(ObjectPath("s3://bucket/x")),
    ):
        with pytest.raises(InputError) as caught:
            ask()
        assert caught.value.code == "source_denied"

    for command in (
        ["index", "add", "s3://bucket/x"],
        ["index", "delete", "s3://bucket/x", "k"],
        ["index", "compact", "s3://bucket/x"],
        ["index", "dedup", "s3://bucket/x"],
        ["index", "export", "s3://bucket/x", "knn.index"],
        ["index", "export", "s3://bucket/x", "--output-format", "clip-back"],
        ["serve", "--follow", "s3://bucket/x", "--port", "0"],
    ):
        assert run(command) == Exit.USAGE, command
        printed = capsys.readouterr().err
        assert "s3://bucket/x" in printed
        assert "Traceback" not in printed
