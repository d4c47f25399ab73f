"""gs:// by its own client over a socket: read, listed, refused and watched as every other storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from embq.core.errors import InputError, SourceError
from embq.core.units import Unit
from embq.producer.enqueue import prepare
from embq.producer.plan import first_columns, plan
from embq.sources.access import listings, ranged_reads
from embq.sources.access.files import match
from embq.sources.access.filesystems import bare, filesystem
from embq.sources.kinds import SOURCES, detect
from embq.sources.unit_reader import read
from embq.testing.sources import OPTIONS, Case
from tests.contract.inputs import CASES
from tests.contract.test_remote import content, quick, samples_of
from tests.support.outputs.build import request_of
from tests.support.servers.storage import Server, http_server

TAR = next(case for case in CASES if case.kind == "tar")


__all__ = ["quick"]  # a fixture of every test here as well


@dataclass
class Store:
    """A folder of a storage server, for one test.

    Attributes:
        url: of the folder.
    """

    server: Server
    url: str

    def upload(self, files: dict[str, bytes]) -> None:
        """Make files of it, by their relative paths, have these bytes."""
        filesystem(self.url).pipe({bare(f"{self.url}/{relative}"): data for relative, data in files.items()})

    def put(self, relative: str, data: bytes) -> None:
        self.upload({relative: data})

    def remove(self, relative: str) -> None:
        """Take a file away."""
        filesystem(self.url).rm_file(bare(f"{self.url}/{relative}"))


@pytest.fixture
def store(gcs: Server, tmp_path: Path) -> Iterator[Store]:
    yield Store(gcs, f"{gcs.url}/{tmp_path.name}")
    gcs.suffer("", 0)


def shard(store: Store, folder: Path) -> Unit:
    store.put("shard.tar", TAR.write(folder).read_bytes())
    (unit,) = SOURCES["tar"].split(f"{store.url}/shard.tar", OPTIONS)
    return unit


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_the_samples_are_the_same(case: Case, store: Store, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    store.upload({str(one.relative_to(tmp_path)): one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()})
    found = detect(f"{store.url}/{path.name}")
    assert found == [(case.kind, f"{store.url}/{path.name}")]
    assert content(samples_of(*found[0])) == case.listing


def test_sidecars_in_capitals_count_and_files_of_systems_do_not(store: Store) -> None:
    junk = ("@eaDir/0.jpg", "__MACOSX/._0.jpg", "sub/$RECYCLE.BIN/0.jpg", "sub/._0.jpg", "Thumbs.db")
    store.upload({"in/sub/0.JPG": b"0", "in/sub/0.TXT": b"x", "in/sub/0.Json": b'{"n": 1}'})
    store.upload({f"in/{name}": b"junk" for name in junk})
    columns, units = first_columns(plan([f"{store.url}/in"], OPTIONS).units)
    (unit,) = units
    (sample,) = read(unit, [])
    assert (sample.key, sample.text, sample.metadata) == ("sub/0.JPG", "x", '{"n":1}')
    assert [column.name for column in columns] == ["n"]
    shards = {f"shards/{name}": bytes(1024) for name in ("0.tar", "@eaDir/0.tar", "__MACOSX/._0.tar", "sub/._0.tar")}
    store.upload(shards)
    for text in ("shards", "shards/**/*.tar"):
        assert [unit.source for unit in plan([f"{store.url}/{text}"], OPTIONS).units] == [f"{store.url}/shards/0.tar"]


def test_patterns_braces_and_folders_name_files(store: Store) -> None:
    names = ("a/00000.tar", "a/00001.tar", "a/00002.tar", "a/notes.md", "b/00000.tar")
    store.upload(dict.fromkeys(names, bytes(1024)))
    shards = [f"{store.url}/a/{name}.tar" for name in ("00000", "00001", "00002")]
    for pattern in ("a/*.tar", "a/0000?.tar", "a/0000[0-2].tar"):
        assert match(f"{store.url}/{pattern}") == shards
    assert match(f"{store.url}/**/00000.tar") == [shards[0], f"{store.url}/b/00000.tar"]
    for text in ("a/*.tar", "a/{00000..00002}.tar", "a"):
        assert [unit.source for unit in plan([f"{store.url}/{text}"], OPTIONS).units] == shards
    with pytest.raises(InputError, match=r"00003.tar is not found \(1 of 4 inputs\)"):
        plan([store.url + "/a/{00000..00003}.tar"], OPTIONS)
    for nothing in ("a/*.jsonl", "nowhere/*.tar"):
        with pytest.raises(InputError, match="no file matches"):
            plan([f"{store.url}/{nothing}"], OPTIONS)


def test_many_files_of_a_folder_are_looked_up_in_one_listing(store: Store) -> None:
    names = [f"{number:02d}.tar" for number in range(30)]
    store.upload(dict.fromkeys(names, bytes(1024)))
    now = [listings.stat(f"{store.url}/{name}") for name in names]
    store.server.asked.clear()
    with listings.cached_listings():
        assert [listings.stat(f"{store.url}/{name}") for name in names] == now
        with pytest.raises(SourceError, match=r"30.tar: does not exist"):
            listings.stat(f"{store.url}/30.tar")
    # Asking for one file takes gcsfs an extra listing, because it could be a folder.
    assert store.server.asked.total() < len(names)


@pytest.mark.parametrize("fault", ["busy", "error", "reset"])
def test_a_server_that_is_in_trouble_for_a_moment_changes_nothing(store: Store, tmp_path: Path, fault: str) -> None:
    unit = shard(store, tmp_path)
    store.server.suffer(fault, 3)
    assert content(list(read(unit, []))) == TAR.listing
    assert store.server.left == 0


@pytest.mark.parametrize("fault", ["busy", "reset"])
def test_a_server_that_stays_in_trouble_is_worth_another_try_later(store: Store, tmp_path: Path, fault: str) -> None:
    unit = shard(store, tmp_path)
    store.server.suffer(fault, 1000)
    with pytest.raises(SourceError, match=unit.source) as caught:
        list(read(unit, []))
    assert (caught.value.code, caught.value.transient) == ("source_unreadable", True)
    if fault == "busy":  # aiohttp takes a reset for a connection that was too old, and asks once more
        assert 1000 - store.server.left == 1 + len(ranged_reads.PAUSES_S), (
            "no other attempts than those that are watched"
        )


def test_what_may_not_be_read_or_is_gone_is_named_at_once(store: Store, tmp_path: Path) -> None:
    unit = shard(store, tmp_path)
    store.server.suffer("denied", 1)
    with pytest.raises(SourceError) as denied:
        list(read(unit, []))
    assert store.server.left == 0
    store.remove("shard.tar")
    with pytest.raises(SourceError) as gone:
        list(read(unit, []))
    assert [denied.value.code, gone.value.code] == ["source_denied", "source_missing"]
    assert not denied.value.transient
    assert not gone.value.transient
    assert all(unit.source in error.value.message for error in (denied, gone))


@pytest.mark.parametrize("length", ["the same length", "another length"])
def test_a_shard_that_is_another_one_by_now_is_never_read_for_the_planned_one(
    store: Store, tmp_path: Path, length: str
) -> None:
    unit = shard(store, tmp_path)
    store.put("shard.tar", bytes((unit.stop or 0) + 512 * (length == "another length")))
    with pytest.raises(SourceError) as caught:
        list(read(unit, []))
    assert caught.value.code == "shard_changed"


def test_a_folder_that_may_not_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        (tmp_path / "in" / folder / "1.jpg").write_bytes(b"\xff\xd8")
        (tmp_path / "in" / folder / "1.tar").write_bytes(bytes(1024))
    with http_server(tmp_path) as server:
        url = f"{server.url}/in"
        assert [path for path, _ in listings.walk(f"{url}/")] == ["a/1.jpg", "a/1.tar", "b/1.jpg", "b/1.tar"]
        server.denied.add("in/b/")
        for ask in (lambda: list(SOURCES["files"].split(f"{url}/", OPTIONS)), lambda: match(f"{url}/**/*.tar")):
            with pytest.raises(SourceError) as caught:
                ask()
            assert caught.value.code == "source_denied"


def test_what_is_gone_is_named_and_what_is_there_is_not(store: Store, tmp_path: Path) -> None:
    store.upload(dict.fromkeys(("a.txt", "b.txt", "c.txt"), b"one text\n"))
    asked = request_of(tmp_path / "out", f"{store.url}/*.txt", options=OPTIONS)
    prepare(asked)
    store.remove("b.txt")
    (told,) = prepare(asked).warnings
    assert told.startswith(f"not there any more: {store.url}/b.txt; ")


def test_hdfs_without_a_hadoop_client_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(SourceError) as caught:
        listings.stat("hdfs://namenode:8020/shards/00000.tar")
    assert caught.value.code == "storage_missing"
    assert "\n" not in str(caught.value)
    assert "hdfs dfs -get" in (caught.value.next_step or "")


def test_hadoop_over_its_web_interface_is_a_scheme_that_is_not_read() -> None:
    with pytest.raises(SourceError) as caught:
        listings.stat("webhdfs://namenode:9870/shards/00000.tar")
    assert caught.value.code == "shard_scheme_denied"
    assert "hdfs://" in (caught.value.next_step or "")
