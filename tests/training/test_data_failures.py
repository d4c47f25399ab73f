"""Samples that no step can be given: each is a failure with shard, key and code, and the account adds up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from embq.core.errors import UnwellError
from embq.training.data.batch import Batch, Failure, View
from embq.training.data.epochs import exact_epoch, validation_samples
from embq.training.shards.shard_set import Shards, open_shards
from tests.support.picture_files import PictureFile, picture_files
from tests.support.servers.storage import HttpServer, http_server
from tests.training.small_shards import CLASSES, key_of, sample, write_shard, write_shards

VIEW = View(batch_size=4, image_size=16, seed=11, shuffle_buffer=10, classes=CLASSES)

BLOCK = 512


def account(batches: Iterator[Batch]) -> tuple[list[str], list[Failure]]:
    """The keys of samples, and the failures."""
    every = list(batches)
    return [key for batch in every for key in batch.keys], [failure for batch in every for failure in batch.failed]


# --- samples ---

BAD: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no picture": ({"jpg": b"<html>"}, "unidentified"),
    "empty picture": ({"jpg": b""}, "unidentified"),
    "cut picture": ({"jpg": sample(0)["jpg"][:300]}, "truncated"),
    "no picture at all": ({"jpg": None}, "missing_member"),
    "no label": ({"cls": None}, "missing_label"),
    "label of letters": ({"cls": b"cat"}, "bad_label"),
    "empty label": ({"cls": b""}, "bad_label"),
    "negative label": ({"cls": b"-1"}, "bad_label"),
    "label with a fraction": ({"cls": b"1.0"}, "bad_label"),
    "label in other digits": ({"cls": "٣".encode()}, "bad_label"),
    "label beyond the classes": ({"cls": str(CLASSES).encode()}, "bad_label"),
    "label of many digits": ({"cls": b"9" * 5000}, "bad_label"),
}


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_samples_of_no_use_are_failures_with_shard_key_and_code(tmp_path: Path, loader_workers: int) -> None:
    changes = {number * 2: bad for number, (bad, _) in enumerate(BAD.values())}
    shards = write_shards(tmp_path, [15, 15], changes)
    keys, failed = account(exact_epoch(shards, replace(VIEW, loader_workers=loader_workers), epoch=0))
    assert {failure.key: failure.code for failure in failed} == {
        key_of(number * 2): code for number, (_, code) in enumerate(BAD.values())
    }
    assert all(failure.shard == shards.urls[int(failure.key) // 15] for failure in failed)
    assert all(failure.message for failure in failed)
    assert sorted(keys + [failure.key for failure in failed]) == [key_of(number) for number in range(30)]
    assert len(keys) + sum(failure.samples for failure in failed) == shards.samples


@pytest.mark.parametrize("written", [b"3", b" 3\n", b"03", b"3\r\n"])
def test_labels_may_be_written_as_tools_write_them(tmp_path: Path, written: bytes) -> None:
    (batch,) = exact_epoch(write_shards(tmp_path, [1], {0: {"cls": written}}), VIEW, epoch=0)
    assert batch.labels.tolist() == [3]


def test_without_a_number_of_classes_every_label_will_do(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [2], {0: {"cls": str(2**63 - 1).encode()}, 1: {"cls": str(2**63).encode()}})
    keys, failed = account(exact_epoch(shards, replace(VIEW, classes=None), epoch=0))
    assert keys == [key_of(0)]
    assert [failure.code for failure in failed] == ["bad_label"]


@pytest.fixture(scope="module")
def files() -> list[PictureFile]:
    return picture_files()


@pytest.mark.parametrize(
    "see",
    [
        pytest.param(partial(exact_epoch, epoch=0), id="training"),
        pytest.param(validation_samples, id="validation", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("default")
def test_every_odd_picture_is_seen_or_fails_as_embedding_it_does(
    see: partial[Iterator[Batch]], files: list[PictureFile], tmp_path: Path
) -> None:
    changes = {number: {"jpg": None, "png": file.data} for number, file in enumerate(files)}
    shards = write_shards(tmp_path, [len(files)], changes)
    keys, failed = account(see(shards, replace(VIEW, batch_size=64)))
    became = dict.fromkeys(keys, "seen") | {failure.key: failure.code for failure in failed}
    wanted = {file.name: "seen" if file.outcome in ("near", "equal") else file.outcome for file in files}
    assert {file.name: became[key_of(number)] for number, file in enumerate(files)} == wanted


# --- shards ---


def cut(at: int) -> object:
    return lambda data: data[:at]


def flipped(at: int) -> object:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


PER_SAMPLE = 2 * BLOCK + 3 * BLOCK
"""Bytes of a sample: two headers, a picture of nearly two blocks, a label."""

DAMAGED = {
    "cut between two samples": (cut(3 * PER_SAMPLE), "shard_count_mismatch"),
    "cut in a header": (cut(3 * PER_SAMPLE + 100), "shard_count_mismatch"),
    "a bit of a header": (flipped(3 * PER_SAMPLE + 10), "shard_count_mismatch"),
    "cut in a picture": (cut(3 * PER_SAMPLE + BLOCK + 100), "shard_truncated"),
    "a bit of the first header": (flipped(10), "shard_bad_header"),
    "no byte": (cut(0), "shard_bad_header"),
    "no shard": (lambda data: b"<html>" * 1000, "shard_bad_header"),
}


@pytest.mark.parametrize("damage", DAMAGED, ids=str)
def test_a_damaged_shard_is_named_with_the_samples_that_it_lacks(tmp_path: Path, damage: str) -> None:
    shards = write_shards(tmp_path, [5, 10, 5])
    assert all(BLOCK < len(sample(number)["jpg"]) <= 2 * BLOCK for number in range(5, 15))
    path, (change, code) = Path(shards.urls[1]), DAMAGED[damage]
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    keys, failed = account(exact_epoch(shards, VIEW, epoch=0))
    assert [(failure.shard, failure.key, failure.code) for failure in failed] == [(shards.urls[1], "", code)]
    assert str(path) not in failed[0].message
    assert "object" not in failed[0].message
    assert "<_io" not in failed[0].message
    assert len(keys) + failed[0].samples == shards.samples == 20
    assert {key_of(number) for number in (*range(5), *range(15, 20))} <= set(keys)


def test_a_missing_shard_and_one_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [5, 10, 5])
    Path(shards.urls[1]).unlink()
    Path(shards.urls[2]).unlink()
    Path(shards.urls[2]).mkdir()
    keys, failed = account(exact_epoch(shards, VIEW, epoch=0))
    assert {failure.shard: (failure.code, failure.samples) for failure in failed} == {
        shards.urls[1]: ("source_missing", 10),
        shards.urls[2]: ("source_unreadable", 5),
    }
    assert len(keys) == 5


def test_a_shard_with_more_samples_than_it_should_have_is_named_too(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [5, 5])
    write_shard(Path(shards.urls[0]), {key_of(100 + number): sample(number) for number in range(8)})
    keys, failed = account(exact_epoch(shards, VIEW, epoch=0))
    assert len(keys) == 13
    assert [(failure.code, failure.samples) for failure in failed] == [("shard_count_mismatch", 0)]


def test_of_a_member_that_is_there_twice_the_first_one_is_seen(tmp_path: Path) -> None:
    plain = write_shard(tmp_path / "a.tar", {key_of(number): sample(number) for number in range(3)}).read_bytes()
    second = plain[PER_SAMPLE : 2 * PER_SAMPLE]
    (tmp_path / "a.tar").write_bytes(plain[: 2 * PER_SAMPLE] + second + plain[2 * PER_SAMPLE :])
    keys, failed = account(exact_epoch(open_shards(str(tmp_path / "a.tar")), VIEW, epoch=0))
    assert sorted(keys) == [key_of(number) for number in range(3)]
    assert [(failure.code, failure.samples) for failure in failed] == [("duplicate_key", 0)] * 2
    assert {failure.message for failure in failed} == {
        f"00001.{extension} is there again; the first one is used" for extension in ("jpg", "cls")
    }


def test_a_path_is_never_taken_for_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"pipe:touch {tmp_path}" / "ran"
    shards = write_shards(folder, [2])
    told = Shards(urls=(os.path.relpath(shards.urls[0], tmp_path),), counts=(2,), digest="")
    monkeypatch.chdir(tmp_path)
    keys, failed = account(exact_epoch(told, VIEW, epoch=0))
    assert (len(keys), failed) == (2, [])
    command = replace(told, urls=(f"pipe:touch {tmp_path}/ran; echo http://127.0.0.1/",))
    assert [failure.code for failure in account(exact_epoch(command, VIEW, epoch=0))[1]] == ["source_missing"]
    assert not (tmp_path / "ran").exists()


# --- shards behind http ---


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpServer]:
    with http_server(tmp_path) as server:
        yield server


def behind(server: HttpServer, local: Shards) -> Shards:
    return replace(local, urls=tuple(f"{server.url}/{Path(url).name}" for url in local.urls))


def test_shards_come_over_http_and_one_that_is_missing_is_named(tmp_path: Path, served: HttpServer) -> None:
    shards = behind(served, write_shards(tmp_path, [5, 10, 5]))
    (tmp_path / "s-001.tar").unlink()
    keys, failed = account(exact_epoch(shards, VIEW, epoch=0))
    assert len(keys) == 10
    assert [(failure.shard, failure.code, failure.samples) for failure in failed] == [
        (shards.urls[1], "source_missing", 10)
    ]
    assert failed[0].message == "does not exist"


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_connection_that_breaks_costs_no_sample_and_changes_no_order(
    tmp_path: Path, served: HttpServer, fault: str
) -> None:
    shards = behind(served, write_shards(tmp_path, [60, 60]))
    whole = [batch.keys for batch in exact_epoch(shards, VIEW, epoch=0)]
    served.suffer(fault, 2)
    assert [batch.keys for batch in exact_epoch(shards, VIEW, epoch=0)] == whole
    assert served.left == 0


def test_a_connection_that_breaks_again_and_again_is_a_failure_with_what_is_lacking(
    tmp_path: Path, served: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.sources.access.ranged_reads.PAUSES_S", (0.01, 0.01))
    shards = behind(served, write_shards(tmp_path, [60]))
    served.suffer("cut", 100)
    keys, failed = account(exact_epoch(shards, VIEW, epoch=0))
    assert [failure.code for failure in failed] == ["source_unreadable"]
    assert failed[0].message.startswith("cannot be read: ")
    assert len(keys) + failed[0].samples == 60


# --- loader workers ---


def test_a_loader_worker_that_is_killed_ends_the_epoch_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    before = signal.getsignal(signal.SIGCHLD)
    others = children()
    batches = exact_epoch(write_shards(tmp_path, [40] * 4), replace(VIEW, loader_workers=2, batch_size=1), epoch=0)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) is before
    for worker in children() - others:
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(UnwellError, match="a loader worker has died") as died:
        list(batches)
    assert "--workers" in died.value.next_step


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}
