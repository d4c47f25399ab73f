"""Attacks of a laptop: whatever its user of the broker may write, other runs are served, and no folder is touched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from embq.app.services.broker_metrics import BrokerMetrics
from embq.core.errors import InputError
from embq.core.models import ModelConfig
from embq.core.queue import uploads
from embq.core.queue.heartbeats import live_workers, measured_rates, services
from embq.core.queue.keys import (
    ACTIVE,
    RATES,
    RUNS,
    SERVICES,
    TURNS,
    UPLOADS,
    VERSION,
    WORKERS,
    queue_name,
    run_key,
    service_key,
    upload_key,
    worker_key,
)
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, foreign_runs, registered
from embq.core.queue.uploads import Upload, UploadFile
from embq.core.service.metrics import MetricSamples
from embq.core.storage.paths import Outputs
from embq.core.wire import MOST_BYTES
from embq.writer.uploads import Receiver
from tests.e2e.check import check_complete
from tests.e2e.session import Command, await_in, called, closed, run_of, started, write_texts
from tests.support.servers.guarded import GuardedServer, guarded_server
from tests.support.waiting import wait_until

DIM = 8
SLOW = f"stub:{DIM}?ms_per_sample=10"
MODEL = ModelConfig(spec=f"stub:{DIM}", modalities=("text",), precision="fp32")
RUN = "e" * 16
ESCAPES = "\x1b[2J\x1b]0;owned\x07\nforged line\x9b31m\u202e"
NOT_JSON = (
    b"",
    b"{",
    b"\xff\xfe{}",
    b"[" * 200_000,
    b'{"a":' * 50_000,
    b"NaN",
    b"9" * 9_999,
    '{"v":4}'.encode("utf-16"),
)
NO_OBJECT = (b"null", b"[]", b"7", b'"text"', b"true", b"1e999", b"[[[]]]")


def record_text(**changes: object) -> bytes:
    record = json.loads(RunRecord(run=RUN, output="/data/evil", model=MODEL, units=3).to_json())
    return json.dumps({name: value for name, value in {**record, **changes}.items() if value is not ...}).encode()


RECORDS = (
    *NOT_JSON,
    *NO_OBJECT,
    b"{}",
    b'{"v":4}',
    *(record_text(v=v) for v in ("3", True, 3.5, None, [], 10**30, -1)),
    *(record_text(run=run) for run in (..., None, 7, "", "x/../../..", "E" * 16, RUN + "\n", ["e"], "f" * 16)),
    *(
        record_text(output=output)
        for output in (..., None, "", "relative", "/a/../b", "/a\0b", "ftp://x/y", "s3://", [])
    ),
    *(record_text(output=output) for output in ("/" * 9_000, "/out/_inputs/aaaaa/out", "s3://a/../b", "file:///etc")),
    *(record_text(spec=spec) for spec in (..., None, "", 7, "x" * 99_999)),
    *(record_text(modalities=modalities) for modalities in (..., [], "text", ["audio"], ["text"] * 99, {"text": 1})),
    *(record_text(precision=precision) for precision in (..., "fp7", None, 32)),
    *(record_text(decode=decode) for decode in ("gif", 7)),
    *(record_text(chunking=chunking) for chunking in ({}, {"tokens": "x"}, {"tokens": -1, "overlap": 0}, 7)),
    *(record_text(members=members) for members in ([{}], [{"name": "a"}], "ab", [[]])),
    *(record_text(rows=rows) for rows in (None, {"dtype": "int9"}, {"columns": [["a", "b", []]]}, {"int8_range": -1})),
    *(record_text(units=units) for units in (..., None, -1, "3", 3.5, 2**70, True)),
    *(record_text(retries=retries) for retries in (-1, "3", 2**64)),
    record_text(output="/x", more="x" * (2 << 20)),
)
"""Values that are no record of the run whose id they stand under."""

SOUND_RECORDS = {
    "a" * 16: record_text(run="a" * 16, output="/proc/self/cwd"),
    "b" * 16: record_text(run="b" * 16, output=f"/nowhere/{ESCAPES}"),
    "c" * 16: record_text(run="c" * 16, spec=f"stub:{'9' * 5_000}"),
    "d" * 16: record_text(run="d" * 16, spec=f"evil:{ESCAPES}"),
    "1" * 16: json.dumps({"v": VERSION + 1, "output": ESCAPES}).encode(),
}
"""Records of the right form that lead nowhere."""

NAMES = ("", "x", ESCAPES, "../../..", "x/../../../sentinel", "x/" * 5_000, b"\xff\xfe", "A" * 16, "0" * 17, "{x}:y")


def upload_text(**changes: object) -> bytes:
    files = (UploadFile(path="run.json", bytes=10, mtime_ns=0, sha256="0" * 64),)
    upload = json.loads(Upload(run=RUN, output="/data/evil", record=record_text().decode(), files=files).to_json())
    return json.dumps({name: value for name, value in {**upload, **changes}.items() if value is not ...}).encode()


def _file(path: str = "run.json", size: object = 1, mtime: object = 0, digest: object = "0" * 64) -> list[object]:
    return [path, size, mtime, digest]


UPLOADS_TEXTS = (
    *NOT_JSON,
    *NO_OBJECT,
    b"{}",
    b'{"v":4}',
    *(upload_text(run=run) for run in (..., None, "../../../x", 7)),
    *(upload_text(output=output) for output in (..., None, "", "s3://bucket/x", 7, "/out/\ud800")),
    *(upload_text(record=record) for record in (..., None, "{", "{}", 7, "[" * 99_999)),
    *(upload_text(files=files) for files in (..., None, "x", [[]], [7], {"a": 1}, [[*_file(), 1]])),
    *(upload_text(files=[_file(path)]) for path in ("../x", "/etc/passwd", "_inputs/aaaaa/../../x", "commits/1.json")),
    *(
        upload_text(files=[_file(path)])
        for path in ("run.json\n", "_inputs/aaaaa/a\0b", "_inputs/aaaaa/\ud800", "_tmp/x", "manifest/../x")
    ),
    *(upload_text(files=[_file(size=size)]) for size in (-1, "1", 2**70, 1.5, None)),
    *(upload_text(files=[_file(mtime=mtime)]) for mtime in ("x", 2**70, None)),
    *(upload_text(files=[_file(digest=digest)]) for digest in ("", "../x", 7, "0" * 63)),
    upload_text(files=[_file(), _file()]),
    upload_text(files=[_file("_inputs/aaaaa/a"), _file("_inputs/aaaaa/a/b")]),
    *(upload_text(priority=priority) for priority in (0, 101, "10", 2**70)),
    upload_text(),
)
"""Values that are no upload, or none of the name under which they stand."""

STATES: tuple[dict[str | bytes, str | bytes], ...] = (
    {"taken": "x"},
    {"taken": ""},
    {"taken": "-1"},
    {"taken": "9" * 5_000},
    {"taken": "99999999"},
    {"taken": b"\xff"},
    {b"\xff": b"\xff"},
    {"added": "x", "units": "y", "samples": "z"},
    {"why": ESCAPES, "code": ESCAPES, "end": ESCAPES},
)
WISHES: tuple[dict[str | bytes, str | bytes], ...] = (
    {"priority": "²"},
    {"priority": "x"},
    {"priority": "9" * 5_000},
    {"state": "exploded"},
    {b"\xff": b"\xff"},
    {"total": "7"},
)


METAS: tuple[dict[str | bytes, str | bytes], ...] = (
    *({name: "x"} for name in ("total", "cursor", "done", "bytes", "limit_bytes", "limit_entries", "priority", "n")),
    *({name: "9" * 5_000} for name in ("total", "cursor", "done", "bytes", "fed_ms", "helped_ms", "began_ms")),
    *({name: b"\xff"} for name in ("total", "opened_ms", "unit_ms", "rows", "tokens_waiting", b"\xff")),
    {"total": "4000000000", "cursor": "4000000000"},
    {"state": ESCAPES},
    {"priority": "0"},
)
"""Counters and settings of a queue, which a laptop may write because it may pause a run."""


def poison_values(client: redis.Redis, number: int) -> None:
    """The poison of that number among each kind, where a laptop may put it."""
    client.hset(RUNS, RUN, RECORDS[number % len(RECORDS)])
    client.sadd(ACTIVE, RUN)  # else it is read after a minute only
    client.hset(UPLOADS, "0" * 16, UPLOADS_TEXTS[number % len(UPLOADS_TEXTS)])
    client.hset(upload_key("0" * 16, "state"), mapping=STATES[number % len(STATES)])  # type: ignore[arg-type]
    client.hset(run_key(RUN, "asked"), mapping=WISHES[number % len(WISHES)])  # type: ignore[arg-type]
    client.hset(run_key("c" * 16, "meta"), mapping={"gen": "1", "state": "running", **METAS[number % len(METAS)]})


def poison_names(client: redis.Redis) -> None:
    for name in NAMES:
        client.hset(RUNS, name, record_text())
        client.hset(UPLOADS, name, upload_text())
        client.hset(upload_key("0" * 16, "pieces"), name, b"x")
    for run, text in SOUND_RECORDS.items():
        client.hset(RUNS, run, text)


def test_what_is_no_record_is_skipped_and_the_others_are_read(own_client: redis.Redis) -> None:
    honest = RunRecord(run="0123456789abcdef", output="/data/out", model=MODEL, units=7)
    own_client.hset(RUNS, honest.run, honest.to_json())
    for text in RECORDS:
        own_client.hset(RUNS, RUN, text)
        assert registered(own_client) == {honest.run: honest}, text[:80]
        assert all(run.run == RUN for run in foreign_runs(own_client)), text[:80]
    own_client.hdel(RUNS, RUN)
    poison_names(own_client)
    assert set(registered(own_client)) == {honest.run, *(run for run in SOUND_RECORDS if run[0] != "1")}
    assert [run.run for run in foreign_runs(own_client)] == ["1" * 16]


def test_an_empty_field_of_an_upload_is_malformed_unless_it_stands_for_nothing(own_client: redis.Redis) -> None:
    name = "0" * 16
    own_client.hset(upload_key(name, "state"), mapping={"end": "accepted", "units": "2", "added": "", "samples": ""})
    assert uploads.outcome_of(own_client, name) == uploads.State(end="accepted", units=2)
    for field in ("units", "taken"):
        own_client.hset(upload_key(name, "state"), mapping={"end": "accepted", "units": "2", "taken": "2", field: ""})
        assert uploads.state(own_client, name) == uploads.State(), field


def test_what_is_no_upload_is_refused_by_its_name(own_client: redis.Redis) -> None:
    poison_names(own_client)
    assert uploads.names(own_client) == []
    for text in UPLOADS_TEXTS:
        own_client.hset(UPLOADS, "0" * 16, text)
        assert uploads.names(own_client) == ["0" * 16]
        with pytest.raises(InputError):
            uploads.announced(own_client, "0" * 16)
        assert uploads.in_progress(own_client) == []
    own_client.hset(UPLOADS, "0" * 16, upload_text(v=VERSION + 1))
    assert uploads.announced(own_client, "0" * 16) is None
    for state in STATES:
        own_client.delete(upload_key("0" * 16, "state"))
        own_client.hset(upload_key("0" * 16, "state"), mapping=state)  # type: ignore[arg-type]
        assert uploads.state(own_client, "0" * 16).taken in (0, 99_999_999)
        end = uploads.outcome_of(own_client, "0" * 16)
        assert end is None or end.end in ("accepted", "refused")
    uploads.confirm_pieces(own_client, "0" * 16, 1)
    assert own_client.hkeys(upload_key("0" * 16, "pieces")) == []


def test_an_upload_of_very_many_files_is_announced_in_parts(own_client: redis.Redis) -> None:
    files = tuple(
        UploadFile(path=f"_inputs/{'0' * 16}/{number:0240d}.jpg", bytes=1, mtime_ns=1, sha256=f"{number:064x}")
        for number in range(50_000)
    )
    upload = Upload(run=RUN, output="/out/a", record="{}", files=files)
    assert len(upload.to_json()) > 16 << 20
    uploads.announce(own_client, upload)
    assert uploads.names(own_client) == [upload.name]
    assert uploads.announced(own_client, upload.name) == upload
    uploads.finish(own_client, upload.name, RUN, uploads.UploadOutcome(end="accepted"))
    assert own_client.hlen(UPLOADS) == 0
    assert uploads.announced(own_client, upload.name) is None


def test_the_name_of_an_upload_leads_to_no_other_folder(own_client: redis.Redis, tmp_path: Path) -> None:
    out, sentinel = tmp_path / "out", tmp_path / "sentinel"
    sentinel.mkdir()
    (sentinel / "file").write_text("mine")
    record = RunRecord(run=RUN, output=str(out / "evil"), model=MODEL, units=1)
    files = (UploadFile(path="run.json", bytes=4, mtime_ns=0, sha256="0" * 64),)
    upload = Upload(run=RUN, output=record.output, record=record.to_json(), files=files)
    receiver = Receiver(own_client, lambda *_: pytest.fail("nothing is added"), lambda: None, Outputs([str(out)]))
    own_client.hset(UPLOADS, "x", upload.to_json())
    receiver.step()
    for name in (f"x/{'../' * 4}sentinel", upload.name):
        own_client.hset(UPLOADS, name, upload.to_json())
        uploads.send(own_client, name, 0, b"evil")
        receiver.step()
    assert [path.name for path in tmp_path.rglob("file")] == ["file"]
    assert (sentinel / "file").read_text() == "mine"
    assert not list(tmp_path.rglob("*upload-*"))
    end = uploads.outcome_of(own_client, upload.name)
    assert end is not None
    assert (end.end, end.code) == ("refused", "bad_upload")


def test_nobody_asks_for_what_a_run_has_not(own_client: redis.Redis) -> None:
    """A wish is a state or a priority, whatever the hash of wishes holds."""
    for wish in WISHES:
        own_client.hset(run_key(RUN, "asked"), mapping=wish)  # type: ignore[arg-type]
    assert Ledger(own_client, RUN).requested() == {}
    own_client.hset(run_key(RUN, "asked"), "priority", "20")
    assert Ledger(own_client, RUN).requested() == {"priority": "20"}


def test_a_value_larger_than_any_of_ours_costs_nobody_its_memory(own_client: redis.Redis) -> None:
    with pytest.raises(redis.ConnectionError):
        own_client.hset(RUNS, RUN, b"x" * (17 << 20))
    own_client.config_set("proto-max-bulk-len", 512 << 20)  # as servers of others have it
    large = b"x" * (40 << 20)
    honest = record_text(run="a" * 16)
    own_client.hset(RUNS, mapping={RUN: large, "a" * 16: honest})
    own_client.hset(UPLOADS, mapping={"evil": large})
    own_client.hset(run_key("a" * 16, "meta"), mapping={"evil": large, "state": large, "priority": "3"})
    own_client.zadd(WORKERS, {"box.cpu.1": 1e12})
    for key in (worker_key("box.cpu.1"), TURNS):
        own_client.set(key, large)
    own_client.hset(RATES, f"{MODEL.queue_key} x", large)
    del large
    tracemalloc.start()
    try:
        assert list(registered(own_client)) == ["a" * 16]
        assert live_workers(own_client) == []
        assert measured_rates(own_client, MODEL) == []
        assert Ledger(own_client, "a" * 16).meta()["priority"] == "3"
        for _ in range(3):
            own_client.hgetall(UPLOADS)
        samples = MetricSamples("producer")
        BrokerMetrics(own_client)(samples)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_reports_that_are_none_are_skipped_and_the_others_are_shown(own_client: redis.Redis) -> None:
    """Reports of workers and services, measured speeds and turns, as a worker's user may write them."""
    good = {"name": "box.cpu.1", "device": "cpu", "host": "box", "rows_per_s": 1.5, "held": 0, "runs": {}}
    wrong: tuple[dict[str, object], ...] = (
        {"name": 7},
        {"name": "other"},
        {"rows_per_s": "fast"},
        {"rows_per_s": float("nan")},
        {"held": -1},
        {"held": 2**80},
        {"unit_s": 0.0},
        {"unit_s": 5e-324},
        {"attribution": 7},
        {"attribution": {"late": {}}},
        {"runs": {RUN: {}}},
        {"runs": {RUN: {"tokens_per_s": 1, "units": 1, "size": 1, "begun": [["x", "y"]], "in_batch": 1}}},
        {"unseen": ["x"]},
        {"load_s": None},
        {"too_long": "x" * MOST_BYTES},
    )
    own_client.zadd(WORKERS, {"box.cpu.1": 1e12, "bad": 1e12, b"\xff": 1.0, ESCAPES: 1.0, "late": float("inf")})
    own_client.zadd(SERVICES, {"bad": 1e12, b"\xff": 1.0, "late": float("-inf")})
    own_client.set(worker_key("box.cpu.1"), json.dumps(good))
    texts = [*NOT_JSON, *NO_OBJECT, b"{}", *(json.dumps({**good, "name": "bad", **one}).encode() for one in wrong)]
    for text in texts:
        own_client.set(worker_key("bad"), text)
        own_client.set(service_key("bad"), text)
        own_client.set(TURNS, text)
        own_client.hset(RATES, f"{MODEL.queue_key} x", text)
        assert [worker["name"] for worker in live_workers(own_client)] == ["box.cpu.1"], text[:80]
        assert services(own_client) == []
        assert measured_rates(own_client, MODEL) == []


# --- real services, logged in as their users ---


@dataclass
class Box:
    """A guarded broker, the services of a machine, and a laptop.

    Attributes:
        folder: holds `out`, below which outputs may lie, and `sentinel`, which nobody may touch.
    """

    server: GuardedServer
    stack: ExitStack
    folder: Path

    def __post_init__(self) -> None:
        self.out = self.folder / "out"
        self.out.mkdir()
        (self.folder / "sentinel" / "inside").mkdir(parents=True)
        (self.folder / "sentinel" / "inside" / "file").write_text("mine")
        self.services = {verb: self._service("writer", verb) for verb in ("writer", "producer")}
        self.services["worker"] = self._service("worker", "worker", "--devices", "cpu")

    def _service(self, user: str, *arguments: str) -> Command:
        changes = {
            "EMBQ_OUTPUTS": str(self.out),
            "EMBQ_LEASE_S": "4",
            "EMBQ_BEAT_S": "0.5",
            "EMBQ_METRICS": "127.0.0.1:0",
        }
        return self.stack.enter_context(started(*arguments, environment={**self.server.environment(user), **changes}))

    def laptop(self, *arguments: str | Path) -> tuple[int, str, str]:
        return called(*arguments, environment=self.server.environment("laptop"))

    def ask(self, *arguments: str | Path) -> str:
        status, said, wrong = self.laptop(*arguments)
        assert status == 0, f"{arguments}: {said}\n{wrong}"
        return said

    def until(self, predicate: Callable[[], object]) -> None:
        for service in self.services.values():
            await_in(service, lambda: True)
        await_in(self.services["writer"], predicate)

    def skipped(self, verb: str) -> dict[str, float]:
        """Number of skipped records that a service reports, by noun."""
        service = self.services[verb]
        await_in(service, lambda: "metrics_served" in service.stderr)
        found = re.search(r"url=(http://\S+/metrics)", service.stderr)
        assert found is not None
        with urllib.request.urlopen(found[1], timeout=10) as answer:
            text = answer.read().decode()
        return {what: float(n) for what, n in re.findall(r'embq_malformed_total\{what="([^"]*)"\} (\S+)', text)}


@pytest.fixture
def box(short_tmp: Path) -> Iterator[Box]:
    with guarded_server("valkey") as server, ExitStack() as stack:
        yield Box(server, stack, short_tmp)


def send(client: redis.Redis, box: Box, name: str, files: dict[str, bytes], **changes: Any) -> str:
    """An upload of files with the content that they are said to have; gives its name."""
    output = str(box.out / name)
    record = RunRecord(run=hashlib.sha256(name.encode()).hexdigest()[:16], output=output, model=MODEL, units=1)
    listed = tuple(
        UploadFile(path=path, bytes=len(data), mtime_ns=0, sha256=hashlib.sha256(data).hexdigest())
        for path, data in files.items()
    )
    upload = replace(Upload(run=record.run, output=output, record=record.to_json(), files=listed), **changes)
    for number, data in enumerate(data for data in files.values() if data):
        uploads.send(client, upload.name, number, data)
    uploads.announce(client, upload)
    return upload.name


def there(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_services_serve_others_whatever_a_laptop_writes(box: Box) -> None:
    before = there(box.folder / "sentinel")
    expected = write_texts(box.folder / "t.jsonl", 400)
    honest = box.out / "honest"
    pids = {verb: service.process.pid for verb, service in box.services.items()}
    for verb in ("writer", "producer"):
        box.until(lambda verb=verb: " started " in box.services[verb].stderr)
    with box.server.client("laptop") as client:
        poison_names(client)
        box.ask("enqueue", box.folder / "t.jsonl", "-o", honest, "-m", SLOW, "--unit-size", "10")
        hostile = [
            send(client, box, "no-run", {"run.json": b"{"}),
            send(client, box, "deep", {"run.json": b"[" * 99_999}),
            send(client, box, "no-manifest", {"manifest/00000.parquet": b"PAR1" * 9, "run.json": b'{"schema":1}'}),
            send(client, box, "within", {"_inputs/aaaaa/run.json": b"{}", "run.json": b"{}"}),
            send(client, box, "elsewhere", {"run.json": b"{}"}, output=str(box.folder / "sentinel")),
            send(client, box, ESCAPES.replace("/", ""), {"run.json": b"{}"}),
        ]
        for number in range(max(len(RECORDS), len(UPLOADS_TEXTS))):
            poison_values(client, number)
        box.until(lambda: (honest / "commits" / "00000001.json").exists())
        run = run_of(honest)
        for meta in METAS:
            client.hset(run_key(run, "meta"), mapping=meta)  # type: ignore[arg-type]
        for u in range(40):
            client.hincrby(run_key(run, "att"), str(u), 2**63 - 1 if u % 2 else -(2**63))
        box.until(lambda: closed(honest))
        # Again while services look at it: what a round of the slowest service reads is skipped in it.
        for number in range(0, max(len(RECORDS), len(UPLOADS_TEXTS)), 17):
            poison_values(client, number)
            skipped = box.skipped("writer").get("run record", 0)
            box.until(lambda skipped=skipped: box.skipped("writer").get("run record", 0) != skipped)
        for name in hostile:
            box.until(lambda name=name: not uploads.is_announced(client, name))
            end = uploads.outcome_of(client, name)
            assert end is not None
            assert end.end == "refused"
    check_complete(honest, expected, units=40, dim=DIM)

    # Another honest run comes all the way through the broker.
    sent = box.out / "sent"
    texts = write_texts(box.folder / "more.jsonl", 40, name="m")
    box.ask("enqueue", box.folder / "more.jsonl", "-o", sent, "-m", f"stub:{DIM}", "--inline", "--unit-size", "10")
    box.until(lambda: closed(sent))
    check_complete(sent, texts, units=4, dim=DIM)

    with box.server.client("laptop") as client:
        client.hset(UPLOADS, "2" * 16, upload_text())
        for arguments in (["status"], ["status", "--json"], ["status", honest], ["status", "b" * 16]):
            said = box.ask(*arguments)
            assert all(char.isprintable() or char == "\n" for char in said), repr(said)
            assert "\nforged line" not in said
    for verb, service in box.services.items():
        assert service.process.poll() is None, service.said
        assert service.process.pid == pids[verb]
        assert all(char.isprintable() or char == "\n" for char in service.stderr), verb
        assert "Traceback" not in service.stderr, service.stderr
    assert {"run record", "upload"} <= set(box.skipped("producer")) | {"upload"}
    assert there(box.folder / "sentinel") == before
    assert not [path for path in there(box.folder) if "x/" in path or path.startswith("upload-")]
    assert os.listdir(box.folder / "sentinel" / "inside") == ["file"]
    # A run's own temporary folder keeps nothing of what was refused.
    assert not list(box.out.glob("*/_tmp/upload-*"))


def test_services_serve_others_whatever_a_worker_says_of_itself(box: Box) -> None:
    """Reports, speeds, turns and ids of hints, as a compromised worker may write them."""
    expected = write_texts(box.folder / "t.jsonl", 200)
    honest = box.out / "honest"
    box.until(lambda: " started " in box.services["producer"].stderr)
    with box.server.client("worker") as client:
        queue = f"rq:queue:{queue_name(replace(MODEL, spec=SLOW).queue_key)}"
        for number, text in enumerate([*NOT_JSON, *NO_OBJECT, b"{}", b'{"name":"w7","unit_s":0}']):
            name = f"w{number}"
            client.zadd(WORKERS, {name: 1e12, b"\xff" + bytes([number]): 1.0})
            client.set(worker_key(name), text)
            client.zadd(SERVICES, {name: 1e12, f"{ESCAPES}{number}": 1.0})
            client.set(service_key(name), text)
            client.hset(RATES, f"x{number}", text)
            client.set(TURNS, text)
        client.lpush(queue, b"\xff\xfe", "x" * 9_999, f"{RUN}-0-{'9' * 5_000}", ESCAPES)
        box.ask("enqueue", box.folder / "t.jsonl", "-o", honest, "-m", SLOW, "--unit-size", "10")
        client.lpush(queue, b"\xff\xfe")
        client.set(TURNS, b'{"now": NaN, "times": []}')
        box.until(lambda: closed(honest))
    check_complete(honest, expected, units=20, dim=DIM)
    said = box.ask("status")
    assert all(char.isprintable() or char == "\n" for char in said), repr(said)
    for service in box.services.values():
        assert service.process.poll() is None, service.said
        assert "worker_died" not in service.stderr, service.stderr
        assert "Traceback" not in service.stderr, service.stderr
    wait_until(lambda: {"worker report", "service report", "name of a reporter"} <= set(box.skipped("producer")))
