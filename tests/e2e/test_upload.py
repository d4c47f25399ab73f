"""From a laptop: runs, and inputs sent by value, through the broker into a folder that only the box can reach."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.heartbeats import services
from embq.core.queue.keys import VERSION
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.producer.upload import _on_disk
from tests.e2e.check import check_complete
from tests.e2e.session import (
    Command,
    await_in,
    closed,
    committed,
    ended,
    picture,
    started,
    write_shards,
    write_tar,
    write_texts,
)
from tests.faults.kit.proxy import Proxy
from tests.support.waiting import wait_until

DIM = 16
PIECE = 620_000
"""Bytes of one compressed piece of `write_noise`, and a little more: of 6,000 samples there are six."""


class Setting:
    """A broker, a box with services, and a laptop that reaches the broker through a bad network."""

    def __init__(self, server: EmbeddedServer, proxy: Proxy, stack: ExitStack, folder: Path) -> None:
        self.server = server
        self.proxy = proxy
        self.root = folder / "box" / "out"
        self.client = connect(server.url)
        self._stack = stack
        self._box = {"EMBQ_BROKER_URL": server.url}

    def service(self, *arguments: str, **changes: str) -> Command:
        service = self._stack.enter_context(started(*arguments, environment={**self._box, **changes}))
        if arguments == ("writer",):
            # A laptop waits for a writer for some seconds only, and a busy machine may take as long to start one.
            await_in(service, lambda: " started " in service.stderr)
        return service

    def enqueue(self, source: Path | str, *options: str) -> Command:
        arguments = ["enqueue", str(source), "-o", str(self.root), "-m", f"stub:{DIM}", "--json", *options]
        return self._stack.enter_context(started(*arguments, environment={"EMBQ_BROKER_URL": self.proxy.url}))

    def watch(self, run: str) -> Command:
        arguments = ["status", run, "--watch", "--json"]
        return self._stack.enter_context(started(*arguments, environment={"EMBQ_BROKER_URL": self.proxy.url}))

    def await_closed(self, units: int = 0) -> None:
        """Until the log is closed with so many units."""
        wait_until(lambda: closed(self.root) and len(committed(self.root)) >= units)

    def priority(self) -> int:
        return int(json.loads((self.root / "control.json").read_bytes())["priority"])

    def taken(self) -> int:
        """Pieces that the writer has made durable. An upload that has ended has a second key, without a number."""
        return max((int(self.client.hget(key, "taken") or 0) for key in self.client.keys("embq:up:*:state")), default=0)


@pytest.fixture
def setting(own_server: EmbeddedServer, short_tmp: Path) -> Iterator[Setting]:
    with ExitStack() as stack, Proxy(own_server.url) as proxy:
        yield Setting(own_server, proxy, stack, short_tmp)


def write_noise(path: Path, samples: int, *, name: str = "k") -> dict[str, bytes]:
    """Texts that hardly compress, 1 kB each."""
    chance = random.Random(name)
    texts = {f"{name}{n}": chance.randbytes(500).hex() for n in range(samples)}
    path.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in texts.items()))
    return {key: text.encode() for key, text in texts.items()}


def test_a_run_by_reference_is_taken_by_the_writer(setting: Setting, short_tmp: Path) -> None:
    expected = write_shards(short_tmp / "shards", 5, 10)
    services = [setting.service("producer"), setting.service("writer"), setting.service("worker", "--devices", "cpu")]
    first = setting.enqueue(short_tmp / "shards", "--upload")
    assert first.wait() == 0, first.said
    said = json.loads(first.stdout)
    assert (said["units"], said["accepted"]) == (5, True)
    setting.await_closed()
    wait_until(lambda: not setting.client.exists(f"embq:{{{said['run']}}}:writer"))  # it has let go of the folder
    # The laptop cannot see the folder; what it is told comes from the broker.
    setting.root.rename(short_tmp / "elsewhere")
    status, told, _ = ended("status", said["run"], "--json", environment={"EMBQ_BROKER_URL": setting.proxy.url})
    assert status == 0
    assert (json.loads(told)["state"], json.loads(told)["rows"]) == ("done", len(expected))
    (short_tmp / "elsewhere").rename(setting.root)
    again = setting.enqueue(short_tmp / "shards", "--upload")
    assert again.wait() == 0, again.said
    assert json.loads(again.stdout)["run"] == said["run"]
    assert json.loads(again.stdout)["added"] == 0
    check_complete(setting.root, expected, units=5, dim=DIM)
    write_tar(short_tmp / "shards" / "x.tar", [("new.jpg", picture("new"))])
    more = setting.enqueue(short_tmp / "shards", "--upload")
    assert more.wait() == 0, more.said
    assert json.loads(more.stdout) == {**said, "new": False, "added": 1, "units": 6}
    setting.await_closed(6)
    check_complete(setting.root, {**expected, "new": picture("new")}, units=6, dim=DIM)
    assert all(service.process.poll() is None for service in services)
    assert not setting.client.keys("embq:up:*:pieces")


@pytest.mark.slow
def test_texts_by_value_over_a_connection_that_is_cut_five_times(setting: Setting, short_tmp: Path) -> None:
    expected = write_noise(short_tmp / "texts.jsonl", 12_000)
    setting.service("producer")
    writer = setting.service("writer")
    # No more than two pieces go through between two cuts, so that the upload is not over before the last of them.
    setting.proxy.quota = 2 * PIECE
    laptop = setting.enqueue(short_tmp / "texts.jsonl", "--inline", "--unit-size", "750")
    for cut in range(1, 6):
        wait_until(lambda cut=cut: setting.taken() >= cut)
        setting.proxy.cut()
        setting.proxy.quota = 2 * PIECE
        if cut == 3:
            writer.process.kill()
            writer = setting.service("writer")
    assert not committed(setting.root)
    assert not (setting.root / "run.json").exists(), "it was over before it was cut five times"
    setting.proxy.quota = None
    assert laptop.wait() == 0, laptop.said
    (short_tmp / "texts.jsonl").unlink()  # the laptop is gone
    setting.service("worker", "--devices", "cpu")
    setting.await_closed()
    check_complete(setting.root, expected, units=16, dim=DIM)


@pytest.mark.slow
def test_what_the_box_has_lost_is_sent_again(setting: Setting, short_tmp: Path) -> None:
    expected = write_noise(short_tmp / "texts.jsonl", 6000)
    writer = setting.service("writer")
    setting.proxy.quota = 4 * PIECE
    laptop = setting.enqueue(short_tmp / "texts.jsonl", "--inline", "--unit-size", "500")
    wait_until(lambda: setting.taken() >= 3)
    writer.kill_all()
    shutil.rmtree(setting.root)
    for name in ("producer", "writer", "worker"):
        setting.service(name)
    setting.proxy.quota = None
    assert laptop.wait() == 0, laptop.said
    setting.await_closed()
    check_complete(setting.root, expected, units=12, dim=DIM)


def test_a_folder_of_other_files_is_left_alone(setting: Setting, short_tmp: Path) -> None:
    write_texts(short_tmp / "texts.jsonl", 20)
    setting.root.mkdir(parents=True)
    (setting.root / "thesis.doc").touch()
    setting.service("writer")
    laptop = setting.enqueue(short_tmp / "texts.jsonl", "--inline")
    assert laptop.wait() == 65, laptop.said
    assert "error[foreign_output]" in laptop.stderr
    # Who had left before learns it by the id that was printed.
    refused = {key.decode().split(":")[2].strip("{}") for key in setting.client.keys("embq:up:*:state")}
    for known_as in refused:
        status, _, told = ended("status", known_as, environment={"EMBQ_BROKER_URL": setting.proxy.url})
        assert (status, "error[foreign_output]" in told) == (65, True), told
    assert len(refused) == 2
    assert [path.name for path in setting.root.iterdir()] == ["thesis.doc"]


def test_images_by_value_keep_their_captions_and_names_and_more_are_sent_alone(
    setting: Setting, short_tmp: Path
) -> None:
    folder = short_tmp / "photos"
    expected: dict[str, bytes] = {}
    for number in range(12):
        key = f"{number % 3}/a {number}.jpg"
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(key))
        path.with_suffix(".txt").write_text(f"caption {number}")
        expected[key] = picture(key)
    (folder / "2" / "a 11.txt").rename(folder / "metadata.csv")
    (folder / "metadata.csv").write_text("file_name,text\n2/a 11.jpg,caption 11\n")
    for name in ("producer", "writer", "worker"):
        setting.service(name)
    laptop = setting.enqueue(folder, "--inline")
    assert laptop.wait() == 0, laptop.said
    setting.await_closed()
    output = check_complete(setting.root, expected, units=1, dim=DIM)
    assert output.rows is not None
    assert set(output.rows["caption"].to_pylist()) == {f"caption {number}" for number in range(12)}
    sent = {path: path.stat().st_ino for path in (setting.root / "_inputs").rglob("*.jpg")}
    for key in ("0/a 1.jpg", "new/b.jpg"):
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).write_bytes(picture(key))
        expected[key] = picture(key)
    # The laptop, which does not see the run, finds a column that the run does not have.
    (folder / "new" / "b.json").write_text('{"found": "later"}')
    second = setting.enqueue(folder, "--inline")
    assert second.wait() == 0, second.said
    setting.await_closed(2)
    assert sent.items() <= {path: path.stat().st_ino for path in (setting.root / "_inputs").rglob("*.jpg")}.items()
    output = check_complete(setting.root, expected, units=2, dim=DIM)
    assert output.rows is not None
    assert "found" not in output.rows.column_names
    assert [text for text in output.rows["metadata"].to_pylist() if text] == ['{"found":"later"}']


@pytest.mark.slow
def test_without_a_writer_the_broker_keeps_it_and_says_so(setting: Setting, short_tmp: Path) -> None:
    expected = write_texts(short_tmp / "texts.jsonl", 50)
    laptop = setting.enqueue(short_tmp / "texts.jsonl", "--inline")
    status = laptop.wait()
    assert (status, json.loads(laptop.stdout)["accepted"]) == (0, False)
    assert "the broker has it on its disk" in laptop.stderr
    environment, run = {"EMBQ_BROKER_URL": setting.proxy.url}, json.loads(laptop.stdout)["run"]
    _, told, _ = ended("status", "--json", environment=environment)
    (waiting,) = json.loads(told)["uploads"]
    assert (waiting["run"], waiting["output"], waiting["sent"]) == (run, str(setting.root), True)
    _, told, _ = ended("status", run, environment=environment)
    assert told.startswith(f"arriving: run {run} for {setting.root} (stub:{DIM}): 0 B of ")
    watching = setting.watch(run)
    wait_until(lambda: '"state": "arriving"' in watching.stdout)
    for name in ("writer", "producer", "worker"):
        setting.service(name)
    setting.await_closed()
    check_complete(setting.root, expected, units=1, dim=DIM)
    assert watching.wait() == 0, watching.said
    assert json.loads(watching.stdout.splitlines()[-1])["state"] == "done"
    assert json.loads(ended("status", "--json", environment=environment)[1])["uploads"] == []


def test_machines_that_do_not_see_what_a_laptop_sends_are_named_when_it_is_sent(
    setting: Setting, short_tmp: Path
) -> None:
    """They left every unit to the box, and the laptop heard nothing of it."""
    expected = write_texts(short_tmp / "texts.jsonl", 20)
    setting.service("producer")
    setting.service("writer", EMBQ_MACHINE="box")
    setting.service("worker", "--devices", "cpu", EMBQ_MACHINE="box")
    wait_until(lambda: len(services(setting.client)) == 3)
    alone = setting.enqueue(short_tmp / "texts.jsonl", "--inline", "--unit-size", "10")
    assert alone.wait() == 0, alone.said
    assert "warning" not in alone.stderr
    other = setting.service("worker", "--devices", "cpu", EMBQ_MACHINE="gpu2", EMBQ_ROOTS=str(short_tmp / "none"))
    wait_until(lambda: len(services(setting.client)) == 4)
    more = {**expected, **write_texts(short_tmp / "more.jsonl", 20, name="m")}
    told = setting.enqueue(short_tmp / "more.jsonl", "--inline", "--unit-size", "10")
    assert told.wait() == 0, told.said
    assert f"{setting.root}/_inputs on box, and workers on gpu2 leave them to others" in " ".join(told.stderr.split())
    setting.await_closed(4)
    check_complete(setting.root, more, units=4, dim=DIM)
    assert other.process.poll() is None


def test_a_run_of_another_model_is_refused(setting: Setting, short_tmp: Path) -> None:
    setting.service("writer")
    write_texts(short_tmp / "a.jsonl", 20)
    first = setting.enqueue(short_tmp / "a.jsonl", "--inline")
    assert first.wait() == 0, first.said
    other = setting.enqueue(short_tmp / "a.jsonl", "--inline", "--dtype", "float32")
    assert other.wait() == 65, other.said
    assert "error[other_run]" in other.stderr
    assert "Traceback" not in other.stderr


def test_what_is_new_is_added_by_the_same_command(setting: Setting, short_tmp: Path) -> None:
    folder = short_tmp / "in"
    folder.mkdir()
    expected = write_texts(folder / "b.jsonl", 30, name="b")
    for name in ("producer", "writer", "worker"):
        setting.service(name)
    first = setting.enqueue(folder, "--inline", "--unit-size", "10", "--priority", "33")
    assert first.wait() == 0, first.said
    run = json.loads(first.stdout)
    assert (run["new"], run["units"]) == (True, 3)
    assert setting.priority() == 33
    setting.await_closed(3)
    expected |= write_texts(folder / "a.jsonl", 20, name="a") | write_texts(folder / "c.jsonl", 10, name="c")
    second = setting.enqueue(folder, "--inline", "--unit-size", "10", "--priority", "40")
    assert second.wait() == 0, second.said
    assert json.loads(second.stdout) == {**run, "new": False, "added": 3, "units": 6}
    setting.await_closed(6)
    third = setting.enqueue(folder, "--inline", "--unit-size", "10")
    assert third.wait() == 0, third.said
    assert json.loads(third.stdout) == {**run, "new": False, "added": 0, "units": 6}
    check_complete(setting.root, expected, units=6, dim=DIM)
    wait_until(lambda: setting.priority() == 40)


def test_inputs_that_have_changed_are_named_and_nothing_is_added(setting: Setting, short_tmp: Path) -> None:
    folder = short_tmp / "in"
    folder.mkdir()
    write_texts(folder / "a.jsonl", 20, name="a")
    setting.service("writer")
    first = setting.enqueue(folder, "--inline")
    assert first.wait() == 0, first.said
    kept = [setting.root / name for name in ("_inputs", "manifest")]  # the writer is at work in other folders
    before = {path: path.read_bytes() for folder in kept for path in folder.rglob("*") if path.is_file()}
    write_texts(folder / "a.jsonl", 21, name="other")
    write_texts(folder / "b.jsonl", 20, name="b")
    second = setting.enqueue(folder, "--inline")
    assert second.wait() == 65, second.said
    assert "error[input_changed]" in second.stderr
    assert f"{folder}/a.jsonl" in second.stderr
    assert "b.jsonl" not in second.stderr
    assert len(before) == 2
    for path, data in before.items():
        assert path.read_bytes() == data
    assert len([path for path in (setting.root / "_inputs").rglob("*") if path.is_file()]) == 1


@pytest.mark.slow
def test_adding_is_exact_whoever_is_killed_and_whenever(setting: Setting, short_tmp: Path) -> None:
    """The sender, the writer and the connection by turns, each at a moment that chance chooses."""
    folder = short_tmp / "in"
    folder.mkdir()
    chance = random.Random(os.environ.get("EMBQ_TEST_SEED") or "11")
    expected = write_noise(folder / "0.jsonl", 1000, name="0-")
    writer = setting.service("writer")
    first = setting.enqueue(folder, "--inline", "--unit-size", "500")
    assert first.wait() == 0, first.said
    for number in (1, 2):
        expected |= write_noise(folder / f"{number}.jsonl", 3000, name=f"{number}-")
    setting.proxy.rate = 4e6
    for turn in range(3):
        moment = setting.proxy.commands + chance.randrange(120)
        laptop = setting.enqueue(folder, "--inline", "--unit-size", "500")
        wait_until(lambda at=moment, one=laptop: setting.proxy.commands >= at or one.process.poll() is not None)
        if turn % 3 == 0:
            laptop.process.kill()
        elif turn % 3 == 1:
            writer.kill_all()
            writer = setting.service("writer")
        else:
            setting.proxy.cut()
        if turn % 3:
            assert laptop.wait() == 0, laptop.said
        else:
            laptop.process.wait()
    setting.proxy.rate = 0.0
    last = setting.enqueue(folder, "--inline", "--unit-size", "500")
    assert last.wait() == 0, last.said
    assert json.loads(last.stdout)["units"] == 14
    for name in ("producer", "worker"):
        setting.service(name)
    setting.await_closed(14)
    check_complete(setting.root, expected, units=14, dim=DIM)
    named = {unit.source for unit in Manifest(Layout(setting.root))}
    assert named == {str(path) for path in (setting.root / "_inputs").rglob("*.jsonl")}


def test_where_the_answer_is_lost_the_broker_is_asked_for_a_write_of_the_new_connection(setting: Setting) -> None:
    with connect(setting.proxy.url, patient=True) as client:
        client.ping()
        setting.proxy.drop_reply(2)
        assert _on_disk(client, "x") is True
    assert setting.proxy.lost == 1
    assert setting.client.info("commandstats")["cmdstat_hset"]["calls"] == 2, "the write and the question, twice"


def test_what_an_upload_may_not_write_is_refused(setting: Setting, short_tmp: Path) -> None:
    setting.service("writer")
    record = {"v": VERSION, "run": "0" * 16, "output": str(setting.root), "record": "{}"}
    for path in ("../x", "_inputs/00000/../../x", "parts/x.parquet", "/etc/x", "_inputs/00000", "manifest/x.parquet"):
        setting.client.hset("embq:uploads", "0" * 16, json.dumps({**record, "files": [[path, 1, 0, "0" * 64]]}))
        wait_until(lambda: setting.client.hget(f"embq:up:{{{'0' * 16}}}:state", "end") == b"refused")
        setting.client.delete(f"embq:up:{{{'0' * 16}}}:state")
    assert not committed(setting.root)
    assert not (short_tmp / "box" / "x").exists()


def test_a_relative_output_is_a_usage_error(setting: Setting, short_tmp: Path) -> None:
    write_texts(short_tmp / "texts.jsonl", 5)
    arguments = ["enqueue", str(short_tmp / "texts.jsonl"), "-o", "out", "-m", f"stub:{DIM}", "--upload"]
    status, _, stderr = ended(*arguments, environment={"EMBQ_BROKER_URL": setting.server.url})
    assert status == 2
    assert "absolute path" in stderr
