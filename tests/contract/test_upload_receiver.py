"""An upload from the plan on a laptop to the run in the writer's folder: sender and receiver step by turns."""

from __future__ import annotations

import fcntl
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from embq.core.errors import InputError
from embq.core.queue import uploads
from embq.core.queue.keys import UPLOADS, VERSION, upload_key
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, registered
from embq.core.queue.uploads import PIECE_BYTES, Pieces, UploadFile, UploadOutcome
from embq.core.run.control import load_control
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import load_run
from embq.core.storage.durable import file_sha256
from embq.core.storage.paths import Outputs
from embq.producer.enqueue import add_uploaded, prepare
from embq.producer.upload import FEW_PIECES, PlannedUpload, UploadedInputs, UploadResult, deliver, plan_upload
from embq.sources.reader_options import ReadOptions
from embq.writer import upload_assembly
from embq.writer.uploads import Receiver
from tests.support.outputs.build import request_of
from tests.support.planning import snapshot

LINES = 180
"""Lines of the large text; of 6,001 bytes each, so that it is sent in two pieces."""


class Setting:
    """A laptop with texts, and a writer's machine: each report of the sender is a step of the receiver."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        self.client = client
        self.texts = folder / "laptop" / "in"
        self.root = folder / "box" / "out"
        self.outputs = Outputs([str(folder / "box"), "s3://bucket"])
        self.reports: list[tuple[int, int, str]] = []
        self.steps: list[int] = []
        self.between: Callable[[], object] = lambda: None
        self.write("b.txt", "b\n" * 3)
        self.write("a/big.txt", "".join(f"{number:04}{'x' * 5_996}\n" for number in range(LINES)), at_s=2)
        self.restart()

    def restart(self) -> None:
        """Another writer process."""
        self.receiver = Receiver(self.client, add_uploaded, lambda: None, self.outputs)

    def write(self, name: str, text: str, *, at_s: int = 1) -> Path:
        path = self.texts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=(0, at_s * 10**9))
        return path

    def parcel(self, *, priority: int | None = None, model: str = "stub:4", output: str = "") -> PlannedUpload:
        """Plan the texts; each plan is in a folder of its own."""
        inputs = UploadedInputs(output or str(self.root))
        folder = self.texts.parent / f"plan{len(list(self.texts.parent.iterdir()))}"
        request = request_of(folder, self.texts, models=(model,), options=ReadOptions(unit_samples=100))
        prepare(request, relocate=inputs.relocate)
        return plan_upload(folder, output or str(self.root), inputs, priority)

    def send(self, parcel: PlannedUpload) -> UploadResult:
        uploads.announce(self.client, parcel.upload)
        self.receiver.step()
        return deliver(self.client, parcel, self._report)

    def sent(self, parcel: PlannedUpload) -> UploadOutcome:
        """The writer's verdict on an upload that it takes."""
        end = self.send(parcel).end
        assert end is not None
        return end

    def refusal(self, parcel: PlannedUpload) -> InputError:
        with pytest.raises(InputError) as caught:
            self.send(parcel)
        return caught.value

    def _report(self, done: int, total: int, why: str) -> None:
        self.reports.append((done, total, why))
        assert len(self.reports) < 300, "it never ends"
        self.between()
        self.steps.append(self.receiver.step())

    def arrived(self) -> dict[str, bytes]:
        """The inputs on the writer's machine, by their names on the laptop."""
        return {path.name: path.read_bytes() for path in (self.root / "_inputs").rglob("*") if path.is_file()}

    def unfinished(self) -> list[str]:
        return sorted(path.name for path in self.root.rglob("*upload-*"))


@pytest.fixture
def setting(client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr("embq.producer.upload.LOOK_S", 0.001)
    monkeypatch.setattr("embq.producer.upload.LISTEN_S", 0.0)
    monkeypatch.setattr("embq.producer.upload.FSYNC_MS", 1)  # a server may sync once a second
    client.delete(UPLOADS)
    return Setting(client, tmp_path)


def other(parcel: PlannedUpload, **changes: Any) -> PlannedUpload:
    """A parcel whose upload says something else."""
    return replace(parcel, upload=replace(parcel.upload, **changes))


def record(parcel: PlannedUpload, **changes: Any) -> str:
    found = RunRecord.from_json(parcel.upload.record)
    assert found is not None
    return replace(found, **changes).to_json()


def test_texts_arrive_as_they_were_and_become_the_run(
    setting: Setting, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.producer.upload.LISTEN_S", 600.0)  # a writer is there
    parcel = setting.parcel(priority=33)
    upload, info = parcel.upload, parcel.info
    assert [Path(file.path).name for file in upload.files] == ["b.txt", "big.txt", "00000.parquet", "run.json"]
    end = setting.sent(parcel)
    assert (end.end, end.run, end.added, end.units, end.samples) == ("accepted", info.run, None, 3, LINES + 3)
    assert setting.arrived() == {"b.txt": b"b\n" * 3, "big.txt": (setting.texts / "a" / "big.txt").read_bytes()}
    for file in upload.files:
        path = setting.root / file.path
        assert (path.stat().st_size, file.mtime_ns in (0, path.stat().st_mtime_ns)) == (file.bytes, True)
    assert [file.mtime_ns for file in upload.files] == [10**9, 2 * 10**9, 0, 0]
    assert load_run(setting.root) == info
    assert len(Manifest(Layout(setting.root))) == 3
    assert load_control(Layout(setting.root)).priority == 33
    assert registered(client)[info.run] == RunRecord(
        run=info.run, output=str(setting.root), model=info.model, units=3, rows=info.rows
    )
    total = sum(file.bytes for file in upload.files)
    done = [report[0] for report in setting.reports]
    assert (done[0], sorted(done), {report[1:] for report in setting.reports}) == (0, done, {(total, "")})
    assert sum(setting.steps) == 5 + 1, "pieces, and the end"
    # What is left is the verdict, for a day, under both names.
    assert setting.unfinished() == []
    assert (uploads.names(client), client.exists(upload_key(upload.name, "pieces"))) == ([], 0)
    for name in (upload.name, info.run):
        assert uploads.outcome_of(client, name) is not None
        assert 86_000 < client.ttl(upload_key(name, "state")) <= 86_400
    assert setting.receiver.step() == 0


def test_a_second_plan_adds_what_is_new_and_leaves_what_is_there(setting: Setting, client: redis.Redis) -> None:
    parcel = setting.parcel()
    first = setting.sent(parcel)
    ledger = Ledger(client, first.run)
    assert (load_control(Layout(setting.root)).priority, ledger.requested()) == (10, {})
    inodes = {path: path.stat().st_ino for path in (setting.root / "_inputs").rglob("*.txt")}
    setting.write("new/c.txt", "c\n" * 120, at_s=3)
    setting.reports.clear()
    second = setting.sent(setting.parcel(priority=44))
    assert (second.run, second.added, second.units, second.samples) == (first.run, 2, 5, 120)
    assert setting.arrived()["c.txt"] == b"c\n" * 120
    assert inodes.items() <= {path: path.stat().st_ino for path in (setting.root / "_inputs").rglob("*")}.items()
    assert (registered(client)[first.run].units, ledger.requested()) == (5, {"priority": "44"})
    # The pieces that the folder has already count as sent before the first of the others is.
    assert setting.reports[0][0] >= 6_001 * LINES
    again = setting.sent(setting.parcel())
    assert (again.run, again.added, again.units, again.samples) == (first.run, 0, 5, 0)
    assert (ledger.requested(), setting.unfinished()) == ({"priority": "44"}, [])
    # The run that is there is found by its id, too.
    again = setting.sent(other(parcel, priority=55))
    assert (again.run, again.added, again.units, again.samples) == (first.run, 0, 5, 0)
    assert ledger.requested() == {"priority": "55"}


def test_inputs_that_are_others_now_are_named_as_on_the_laptop_and_nothing_is_added(setting: Setting) -> None:
    for number in range(4):
        setting.write(f"{number}.txt", f"{number}\n", at_s=4)
    setting.sent(setting.parcel())
    before = snapshot(setting.root)
    for number in range(4):
        setting.write(f"{number}.txt", "?\n", at_s=5)  # as long as before
    setting.write("a/new.txt", "new\n")
    error = setting.refusal(setting.parcel())
    assert (error.code, snapshot(setting.root)) == ("input_changed", before)
    assert [str(setting.texts / f"{number}.txt") in error.message for number in range(4)].count(True) == 3
    assert ("and 1 more;" in error.message, str(setting.root) in error.message) == (True, False)
    assert "put the files back" in error.next_step
    for number in range(1, 4):
        setting.write(f"{number}.txt", f"{number}\n", at_s=4)
    setting.write("0.txt", "longer than before\n", at_s=4)
    error = setting.refusal(setting.parcel())
    assert (error.code, " more" in error.message) == ("input_changed", False)
    assert f": {setting.texts / '0.txt'};" in error.message
    error = setting.refusal(setting.parcel(model="stub:8"))
    assert (error.code, str(setting.root) in error.message, snapshot(setting.root)) == ("other_run", True, before)
    # The time of change is part of the version of an input, here as for inputs that are not sent.
    setting.write("0.txt", "0\n", at_s=5)
    assert str(setting.texts / "0.txt") in setting.refusal(setting.parcel()).message
    setting.write("0.txt", "0\n", at_s=4)
    assert setting.sent(setting.parcel()).added == 1


@pytest.mark.parametrize(
    ("kept_bytes", "taken"), [(PIECE_BYTES, 2), (PIECE_BYTES + 1, 2), (PIECE_BYTES - 1, 1), (-1, 1), (-2, 0)]
)
def test_another_writer_goes_on_behind_the_files_that_are_whole(
    setting: Setting, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, taken: int
) -> None:
    monkeypatch.setattr(upload_assembly, "BATCH_PIECES", 2)
    parcel = setting.parcel()
    name = parcel.upload.name
    uploads.announce(client, parcel.upload)
    data = (setting.texts / "a" / "big.txt").read_bytes()
    for number, content in enumerate((b"b\n" * 3, data[:PIECE_BYTES], data[PIECE_BYTES:])):
        uploads.send(client, name, number, content)
    assert setting.receiver.step() == 2
    assert uploads.state(client, name).taken == 2
    assert [uploads.has_piece(client, name, number) for number in range(3)] == [False, False, True]
    (folder,) = setting.root.rglob("upload-*")
    if kept_bytes >= 0:
        os.truncate(folder / "1", kept_bytes)
    else:
        (folder / "1").unlink()
    if kept_bytes < -1:
        shutil.rmtree(folder)
    setting.restart()
    client.hdel(upload_key(name, "pieces"), "2")
    setting.receiver.step()
    assert uploads.state(client, name).taken == taken
    assert setting.sent(parcel).units == 3
    assert setting.arrived()["big.txt"] == data


def test_a_writer_that_died_between_two_names_makes_the_rest(setting: Setting) -> None:
    setting.write("c.txt", "c\n")
    parcel = setting.parcel()
    for file in parcel.upload.files[:4]:
        (setting.root / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(parcel.paths[file.path], setting.root / file.path)
    here = {path.name: path for path in (setting.root / "_inputs").rglob("*.txt")}
    os.utime(here["b.txt"], ns=(0, 0))  # only its content counts
    here["c.txt"].write_text("C\n")
    assert setting.sent(parcel).units == 4
    assert sum(setting.steps) == 2 + 1, "c.txt, run.json, and the end"
    assert setting.arrived()["c.txt"] == b"c\n"
    assert load_run(setting.root) == parcel.info


def at(parcel: PlannedUpload, output: str) -> PlannedUpload:
    return other(parcel, output=output, record=record(parcel, output=output))


def beside_others(parcel: PlannedUpload) -> PlannedUpload:
    Path(parcel.upload.output).mkdir(parents=True)
    Path(parcel.upload.output, "thesis.doc").touch()
    return parcel


def with_file(parcel: PlannedUpload, index: int, **changes: Any) -> PlannedUpload:
    files = list(parcel.upload.files)
    files[index] = msgspec.structs.replace(files[index], **changes)
    return other(parcel, files=tuple(files))


def without_plan(parcel: PlannedUpload) -> PlannedUpload:
    path = parcel.paths["run.json"]
    path.write_bytes(b" " * path.stat().st_size)
    return with_file(parcel, -1, sha256=file_sha256(path))


REFUSED: dict[str, tuple[Callable[[PlannedUpload], PlannedUpload], str, str]] = {
    "elsewhere": (lambda it: at(it, "/else"), "outside_outputs", "/else is outside of"),
    "files of others": (beside_others, "foreign_output", "thesis.doc"),
    "bucket": (lambda it: at(it, "s3://bucket/out"), "bad_upload", "s3://bucket/out"),
    "other run": (lambda it: other(it, record=record(it, run="0" * 16)), "bad_upload", "not the one"),
    "other output": (lambda it: other(it, record=record(it, output="/x")), "bad_upload", "not the one"),
    "other content": (lambda it: with_file(it, 0, sha256="0" * 64), "bad_upload", "b.txt did not arrive"),
    "no plan": (without_plan, "bad_upload", "the plan that came cannot be read"),
    "other plan": (lambda it: other(it, record=record(it, units=2)), "bad_upload", "the plan that was"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_become_a_run_is_refused_with_its_cause_and_leaves_nothing(
    setting: Setting, client: redis.Redis, why: str
) -> None:
    change, code, text = REFUSED[why]
    parcel = change(setting.parcel())
    before = {*snapshot(setting.root), "_writer/plan.lock"}
    error = setting.refusal(parcel)
    assert error.code == code
    assert (text in error.message, "embq writer" in error.next_step) == (True, code == "bad_upload")
    assert error.next_step
    assert (before >= {*snapshot(setting.root)}, setting.unfinished()) == (True, [])
    assert parcel.upload.run not in registered(client)
    # It is over, also under the id of the run, and what is sent afterwards is dropped.
    for name in (parcel.upload.name, parcel.upload.run):
        end = uploads.outcome_of(client, name)
        assert end is not None
        assert (end.end, end.code, end.run) == ("refused", code, "")
    assert not client.exists(upload_key(parcel.upload.name, "pieces"))


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (b"no zlib", "damaged"),
        (zlib.compress(b"b\n" * 3)[:-1], "not whole"),
        (zlib.compress(bytes(PIECE_BYTES + 1)), "not whole"),
        (zlib.compress(b"b\n" * 4), "b.txt did not arrive"),
        (zlib.compress(b"B\n" * 3), "b.txt did not arrive"),
    ],
    ids=["not packed", "cut", "too long", "longer", "other"],
)
def test_a_piece_that_is_none_ends_its_upload_alone(
    setting: Setting, client: redis.Redis, packed: bytes, text: str
) -> None:
    bad = setting.parcel().upload
    shutil.rmtree(setting.texts / "a")
    good = setting.parcel(output=f"{setting.root}2")
    setting.between = lambda: client.hset(upload_key(bad.name, "pieces"), "0", packed)
    uploads.announce(client, bad)
    for number in range(1, Pieces(bad.files).count):
        uploads.send(client, bad.name, number, bytes(PIECE_BYTES))
    assert setting.sent(good).units == 1
    setting.receiver.step()
    end = uploads.outcome_of(client, bad.name)
    assert end is not None
    assert (end.end, end.code, text in end.why) == ("refused", "bad_upload", True)
    assert setting.unfinished() == []


def test_an_upload_waits_for_another_plan_and_for_a_folder_that_cannot_be_written(
    setting: Setting, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(setting.texts / "a")
    parcel = setting.parcel()
    name = parcel.upload.name
    setting.root.parent.write_text("no folder")
    uploads.announce(client, parcel.upload)
    assert setting.receiver.step() == 0
    assert str(setting.root) in uploads.state(client, name).why
    setting.root.parent.unlink()
    assert setting.receiver.step() == 0
    assert not setting.root.exists(), "it is tried again after a while"
    monkeypatch.setattr("embq.writer.uploads.RETRY_S", -1.0)
    monkeypatch.setattr("embq.writer.uploads.BUSY_S", -1.0)
    setting.restart()
    setting.receiver.step()
    with Layout(setting.root).open_plan_lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number, file in enumerate(parcel.upload.files):
            uploads.send(client, name, number, parcel.paths[file.path].read_bytes())
        assert (setting.receiver.step(), setting.receiver.step()) == (3, 0)
        assert "another plan" in uploads.state(client, name).why
        (progress,) = uploads.in_progress(client)
        assert (progress.why, progress.bytes) == (uploads.state(client, name).why, progress.bytes_total)
        assert not Layout(setting.root).run_json.exists()
    assert setting.receiver.step() == 1
    assert load_run(setting.root) == parcel.info


def test_what_the_broker_or_the_writer_has_lost_is_sent_again(setting: Setting, client: redis.Redis) -> None:
    parcel = setting.parcel()
    name = parcel.upload.name
    pieces = upload_key(name, "pieces")
    losses = [(UPLOADS, upload_key(name, "state"), pieces), (pieces,)]
    setting.between = lambda: losses and client.delete(*losses.pop(0))
    assert (setting.sent(parcel).units, losses) == (3, [])
    assert setting.arrived()["big.txt"] == (setting.texts / "a" / "big.txt").read_bytes()


def test_a_text_that_cannot_be_sent_is_named(setting: Setting) -> None:
    parcel = setting.parcel()
    path = setting.texts / "a" / "big.txt"
    os.truncate(path, path.stat().st_size - 1)
    error = setting.refusal(parcel)
    assert (error.code, str(path) in error.message) == ("source_changed", True)


def test_without_a_writer_it_ends_once_the_broker_has_all_on_its_disk(
    setting: Setting, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not client.execute_command("COMMAND LIST", "FILTERBY", "PATTERN", "waitaof"):
        pytest.skip("this server cannot tell what is on its disk: the laptop waits for a writer")
    shutil.rmtree(setting.texts / "a")
    setting.write("c.txt", "c\n")
    parcel = setting.parcel()
    assert Pieces(parcel.upload.files).count == FEW_PIECES
    monkeypatch.setattr("embq.producer.upload.LISTEN_S", 600.0)  # which so few pieces do not wait for
    monkeypatch.setattr("embq.producer.upload.ACCEPT_S", 600.0)
    monkeypatch.setattr("embq.producer.upload.FSYNC_MS", 3_000)
    name, sent = parcel.upload.name, list[bool]()

    def report(*_: object) -> None:
        if any(sent):
            monkeypatch.setattr("embq.producer.upload.ACCEPT_S", -1.0)
        sent.append(bool(uploads.state(client, name).sent))
        if sent[-1] and sent.count(True) == 1:  # the broker says that it is on its disk, and comes back without
            client.delete(UPLOADS, upload_key(name, "state"), upload_key(name, "pieces"))

    result = deliver(client, parcel, report)
    assert (result.end, result.on_disk) == (None, True)
    (progress,) = uploads.in_progress(client)
    assert (progress.name, progress.upload, progress.sent) == (name, parcel.upload, True)
    assert (progress.bytes, progress.bytes_total) == (0, sum(file.bytes for file in parcel.upload.files))
    for _ in range(4):
        setting.receiver.step()
    assert load_run(setting.root) == parcel.info


def test_a_bug_ends_one_upload_alone(setting: Setting, client: redis.Redis) -> None:
    setting.sent(setting.parcel())
    before = snapshot(setting.root)
    setting.receiver = Receiver(client, lambda *_: 1 // 0, lambda: None)  # type: ignore[arg-type]
    setting.write("c.txt", "c\n")
    error = setting.refusal(setting.parcel())
    assert (error.code, "ZeroDivisionError" in error.message, snapshot(setting.root)) == ("bug", True, before)


def test_pieces_are_numbered_through_all_files() -> None:
    for sizes in product((0, 1, PIECE_BYTES, PIECE_BYTES + 1), repeat=3):
        files = [UploadFile(path=str(at), bytes=size, mtime_ns=0, sha256="0" * 64) for at, size in enumerate(sizes)]
        pieces = Pieces(files)
        expected = [(at, offset) for at, size in enumerate(sizes) for offset in range(0, size, PIECE_BYTES)]
        assert (pieces.count, [pieces.place(number) for number in range(pieces.count)]) == (len(expected), expected)
        before = [sum(sizes[:at]) + offset for at, offset in expected]
        assert [pieces.bytes_before(number) for number in range(pieces.count + 2)] == [*before, *[sum(sizes)] * 2]


def test_the_broker_keeps_of_an_upload_what_was_written(
    setting: Setting, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "ANNOUNCED_BYTES", 256)
    monkeypatch.setattr(uploads, "MOST_UPLOAD_BYTES", 9 * 256)
    upload = replace(setting.parcel().upload, priority=12)
    name, run = upload.name, upload.run
    others = [replace(upload, run="d" * 16), replace(upload, output="/x"), replace(upload, files=upload.files[1:])]
    assert (replace(upload, priority=None).name, name in {it.name for it in others}) == (name, False)
    uploads.announce(client, upload)
    assert client.hlen(UPLOADS) > 2, "it is announced in parts"
    client.hset(UPLOADS, mapping={"g" * 16: b"", b"\xff": b"", **{f"{name}.{end}": b"" for end in ("0", "9", "10")}})
    assert (uploads.names(client), uploads.announced(client, name)) == ([name], upload)
    client.hset(UPLOADS, mapping={"0" * 16: upload.to_json(), "1" * 16: f'{{"v": {VERSION + 1}}}'})
    with pytest.raises(InputError, match=name):
        uploads.announced(client, "0" * 16)
    assert [it.name for it in uploads.in_progress(client)] == [name]
    for number in (*range(4), 10):
        uploads.send(client, name, number, bytes(PIECE_BYTES * (number % 2)))
    assert [len(uploads.piece(client, name, number) or b"") for number in range(4)] == [0, PIECE_BYTES] * 2
    client.hset(upload_key(name, "pieces"), mapping={"x": b"", "-1": b"", "0x": b""})
    uploads.confirm_pieces(client, name, 3)
    assert sorted(client.hkeys(upload_key(name, "pieces"))) == [b"10", b"3"]
    uploads.set_reason(client, name, "it waits")
    uploads.mark_sent(client, name)
    assert uploads.state(client, name) == uploads.State(taken=3, sent="1", why="it waits")
    for end in (
        UploadOutcome(end="accepted", run=run, added=0, units=3, samples=0),
        UploadOutcome(end="accepted", run=run, added=None, units=3, samples=None),
        UploadOutcome(end="refused", code="other_run", why="it is another"),
    ):
        uploads.announce(client, upload)
        assert uploads.outcome_of(client, name) is None, "the end of an earlier one is forgotten"
        uploads.finish(client, name, run, end)
        states = [asdict(uploads.state(client, known_as)) for known_as in (name, run)]
        assert [{**state, **asdict(end)} for state in states] == states
        assert not {f"{name}{end}".encode() for end in ("", ".1", ".9")} & {*client.hkeys(UPLOADS)}
