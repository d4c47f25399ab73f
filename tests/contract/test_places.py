"""Every place of an output does the same: a folder, a prefix on S3 (moto), a prefix on GCS (an emulator)."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest

from embq.core.errors import AwayError, ConfigError, OutputError, UsageError
from embq.core.run.commit_log import contents
from embq.core.storage import object_clients, objects
from embq.core.storage.durable import claim, drop, file_sha256, link, output_error, overwrite, publish, write_new
from embq.core.storage.object_clients import NEEDED
from embq.core.storage.objects import ObjectPath, probe, unfinished
from embq.core.storage.paths import SPELLINGS, Place, opened, place
from tests.support.planning import call_at_once
from tests.support.servers.storage import Server, environment, s3_proxy

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp, of what gcsfs does


@pytest.fixture(params=["folder", "s3", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        (tmp_path / "out").mkdir()
        return place(tmp_path / "out")
    request.getfixturevalue({"s3": "s3", "gs": "gcs"}[request.param])
    return place(f"{request.param}://bucket/{tmp_path.name}")


@pytest.fixture
def s3_root(s3: str, tmp_path: Path) -> ObjectPath:
    return ObjectPath(f"s3://bucket/{tmp_path.name}")


def made(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_name_is_created_once_and_keeps_what_it_was_created_with(root: Place, tmp_path: Path) -> None:
    write_new(root / "record", b"first", temporary=tmp_path / "t")
    with pytest.raises(FileExistsError):
        write_new(root / "record", b"second", temporary=tmp_path / "t")
    assert (root / "record").read_bytes() == b"first"
    assert (root / "record").exists()


def test_of_many_who_create_one_name_one_succeeds(root: Place, tmp_path: Path) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            write_new(root / "record", b"%d" % number, temporary=tmp_path / f"t{number}")
        except FileExistsError:
            return
        won.append(number)

    call_at_once(create, 8)
    assert (root / "record").read_bytes() == b"%d" % won[0]
    assert len(won) == 1


def test_a_name_is_claimed_by_one_owner(root: Place) -> None:
    claim(root / "epoch-000001", "one")
    with pytest.raises(FileExistsError):
        claim(root / "epoch-000001", "another")


@pytest.mark.parametrize("size", [0, 1000, 2 * objects.PIECE_BYTES + 1000], ids=["empty", "small", "in pieces"])
def test_a_finished_file_gets_its_name_whole(root: Place, tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    folder = root / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = made(tmp_path / "unfinished", data)
    digest = file_sha256(temporary)
    publish(temporary, folder / "part-1")
    assert not temporary.exists()
    assert (folder / "part-1").stat().st_size == size
    assert file_sha256(folder / "part-1") == digest


def test_a_finished_file_gets_a_second_name_in_place_of_an_orphan(root: Place, tmp_path: Path) -> None:
    for name, data in (("staged", b"a part"), ("part", b"of a dead writer")):
        publish(made(tmp_path / "t", data), root / name)
    link(root / "staged", root / "part", tmp_path / "t")
    drop(root / "staged")
    assert (root / "part").read_bytes() == b"a part"
    with pytest.raises(FileNotFoundError):
        link(root / "staged", root / "another", tmp_path / "t")


def test_a_large_file_that_is_sent_is_seen_to_go_on(s3_root: ObjectPath, gcs: Server, tmp_path: Path) -> None:
    for root in (s3_root, ObjectPath(f"gs://bucket/{tmp_path.name}")):
        moved: list[int] = []
        publish(made(tmp_path / "u", bytes(3 * objects.PIECE_BYTES)), root / "part", lambda: moved.append(1))  # noqa: B023
        assert len(moved) >= 3


def test_what_is_overwritten_has_the_new_content(root: Place, tmp_path: Path) -> None:
    for data in (b"one", b"two"):
        overwrite(root / "control.json", data, temporary=tmp_path / "t")
        assert (root / "control.json").read_text() == data.decode()


def test_a_folder_lists_what_is_directly_in_it(root: Place, tmp_path: Path) -> None:
    for folder in ("parts", "parts/deeper"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("parts/b", "parts/a.json", "parts/deeper/c", "run.json"):
        write_new(root / name, b"x", temporary=tmp_path / "t")
    assert sorted(path.name for path in (root / "parts").iterdir()) == ["a.json", "b", "deeper"]
    assert [path.name for path in (root / "parts").glob("*.json")] == ["a.json"]
    assert (root / "parts").is_dir()
    assert not (root / "part").is_dir()
    drop(root / "parts" / "b")
    drop(root / "parts" / "b")  # gone already
    assert sorted(path.name for path in (root / "parts").iterdir()) == ["a.json", "deeper"]
    assert not (root / "parts" / "b").exists()


def test_what_is_not_there_is_no_file(root: Place) -> None:
    for ask in (Path.read_bytes, Path.stat):
        with pytest.raises(FileNotFoundError):
            getattr(root / "nothing", ask.__name__)()
    assert not (root / "nothing").exists()
    assert list((root / "nothing").glob("*")) == []


def test_some_of_a_file_can_be_read(root: Place, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    write_new(root / "part", data, temporary=tmp_path / "t")
    source = opened(root / "part")
    with source if isinstance(source, io.IOBase) else open(source, "rb") as file:
        file.seek(-1000, io.SEEK_END)
        assert file.read() == data[-1000:]
        file.seek(300)
        assert file.read(256) == data[300:556]


def test_many_files_are_read_in_order_up_to_the_first_that_is_not_there(root: Place, tmp_path: Path) -> None:
    for number in range(40):
        if number != 37:
            write_new(root / f"{number:02d}", b"%d" % number, temporary=tmp_path / "t")
    found = list(contents(root, (f"{number:02d}" for number in itertools.count()), most_bytes=100))
    assert found == [(f"{n:02d}", b"%d" % n) for n in range(37)]


# --- object stores ---


def test_a_store_that_lets_a_name_be_created_twice_is_refused(gcs: Server, s3: str, tmp_path: Path) -> None:
    gcs.deaf = True
    folder = ObjectPath(f"gs://bucket/{tmp_path.name}")
    try:
        with pytest.raises(ConfigError, match="created twice") as refused:
            probe(folder)
    finally:
        gcs.deaf = False
    assert refused.value.exit_code == 78
    assert list(folder.iterdir()) == []
    probe(folder)
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url}):
        folder = ObjectPath(f"s3://bucket/{tmp_path.name}")
        probe(folder)
        proxy.deaf = True
        with pytest.raises(ConfigError, match="created twice"):
            probe(folder)
        assert list(folder.iterdir()) == []


def test_a_write_whose_answer_was_lost_has_succeeded(s3: str, tmp_path: Path) -> None:
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url}):
        root = ObjectPath(f"s3://bucket/{tmp_path.name}")
        proxy.suffer("lost", 1)
        root_record = root / "record"
        write_new(root_record, b"mine", temporary=tmp_path / "t")
        proxy.suffer("lost", 1)
        publish(made(tmp_path / "u", b"part"), root / "part")
        assert proxy.asked["PUT lost"] == 2
        proxy.suffer("lost end", 1)
        publish(made(tmp_path / "u", bytes(3 * objects.PIECE_BYTES)), root / "large")
        assert proxy.asked["POST lost end"] == 1
        assert (root / "large").stat().st_size == 3 * objects.PIECE_BYTES
        assert root_record.read_bytes() == b"mine"
        with pytest.raises(FileExistsError):
            publish(made(tmp_path / "u", b"pa!t"), root / "part")


def test_a_store_that_is_busy_is_asked_again_and_then_said_to_be_away(s3: str, tmp_path: Path) -> None:
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url}):
        root = ObjectPath(f"s3://bucket/{tmp_path.name}")
        proxy.suffer("busy", 2)
        write_new(root / "record", b"mine", temporary=tmp_path / "t")
        assert proxy.asked["PUT busy"] == 2
    with environment({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_clients, "ATTEMPTS", 1)
        with pytest.raises(AwayError, match="does not answer") as away:
            (root / "record").read_bytes()
    assert away.value.exit_code == 69


def test_an_upload_that_fails_in_the_middle_leaves_nothing(s3: str, s3_root: ObjectPath, tmp_path: Path) -> None:
    import boto3

    client = boto3.client("s3")
    key = f"{tmp_path.name}/parts/part-00000007.parquet"
    client.create_multipart_upload(Bucket="bucket", Key=key)
    client.create_multipart_upload(Bucket="bucket", Key="elsewhere/part-00000007.parquet")
    (left,) = unfinished(s3_root)
    assert left.path == s3_root / "parts" / "part-00000007.parquet"
    left.abort()
    left.abort()
    assert unfinished(s3_root) == []
    assert len(client.list_multipart_uploads(Bucket="bucket")["Uploads"]) == 1


def test_what_cannot_be_written_is_one_clear_error(s3: str, tmp_path: Path) -> None:
    nowhere = ObjectPath("s3://nobucket/out/record")
    with pytest.raises(OSError, match="bucket does not exist") as missing:
        nowhere.create(b"x")
    error = output_error(missing.value, nowhere)
    assert (type(error), error.exit_code) == (OutputError, 74)
    assert error.message == "s3://nobucket/out/record: the bucket does not exist"


@pytest.mark.parametrize(
    ("text", "same"),
    [("s3://b/p", "s3://b/p"), ("S3://b/p/", "s3://b/p"), ("s3a://b", "s3://b"), ("gcs://b/p/q", "gs://b/p/q")],
)
def test_a_url_has_one_spelling(text: str, same: str) -> None:
    assert str(place(text)) == same
    assert place(text) == ObjectPath(same)
    assert {place(text)} == {ObjectPath(same)}


@pytest.mark.parametrize(
    "text",
    ["http://h/p", "file:///p", "s3://", "s3:///p", "s3://b//p", "s3://b/../c", "s3://b/a?versionId=1", "s3://b/*"],
)
def test_other_urls_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        place(text)


def test_a_tilde_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("~", "~/out"):
        with pytest.raises(UsageError, match="the shell") as refused:
            place(text)
        assert f"write $HOME{text[1:]}," in refused.value.next_step
    (tmp_path / "~").mkdir()
    assert place("~/out") == place("./~/out") == tmp_path / "~" / "out"


@pytest.mark.parametrize("scheme", [*NEEDED, *SPELLINGS])
def test_a_url_with_one_slash_is_no_folder(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        place(f"{scheme}:/bucket/p")
    assert f"{scheme}://bucket/p" in refused.value.next_step
    monkeypatch.chdir(tmp_path)
    assert place(f"./{scheme}:/bucket/p") == tmp_path / f"{scheme}:" / "bucket" / "p"


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as refused:
        place("s3://AKIA:secret@bucket/p")
    assert "secret" not in refused.value.message + refused.value.next_step
    assert "AKIA" not in refused.value.message
