"""Child processes that end with their parent and answer in JSON lines."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.errors import (
    ConfigError,
    EmbqError,
    ExhaustedError,
    InputError,
    MalformedError,
    OutsideError,
    SampleError,
    SourceError,
    TryLaterError,
    error_fields,
    error_of,
)
from embq.core.process.children import ChildEndedError, JsonChild, start, stop
from embq.core.settings import child_environment
from embq.core.units import Unit
from embq.index.stages.process import answer
from embq.index.stages.units import STAGE_MODULES, IndexUnit, Sidecar
from embq.index.workers.hint import IndexHint
from embq.index.workers.service import IndexService
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.ui.thumbnails.decoder import Decoders
from embq.sources.access.files import etag
from embq.sources.kinds import SOURCES
from embq.sources.reader_process import client
from tests.support.waiting import has_ended, wait_until

ECHO = "import json, sys\nfor line in sys.stdin: print(json.dumps({'echo': json.loads(line)}), flush=True)"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_child_is_killed_when_its_parent_is(tmp_path: Path) -> None:
    kill_parent_and_wait_for_child(
        tmp_path,
        """
from embq.core.process.children import start
child = start([sys.executable, "-c", "import time; time.sleep(600)"])
""",
    )


def test_a_child_that_ends_itself_does_so_though_its_input_stays_open(tmp_path: Path) -> None:
    kill_parent_and_wait_for_child(
        tmp_path,
        f"""
from embq.core.process.children import JsonChild
child = JsonChild("-m", "embq.index.stages.process", TMPDIR={str(tmp_path)!r})
child.send({{}})
assert "error" in child.answer(60.0)
""",
    )


def kill_parent_and_wait_for_child(folder: Path, program: str) -> None:
    """Kill a program, and wait until the `child` that it has started ends, whose stdin is held open."""
    ready = folder / "pid"
    ending = f"\nwith open({str(ready)!r}, 'w') as file: print(child.pid, file=file)\ntime.sleep(600)"
    parent = start(python("import sys, time" + program + ending), environment=child_environment())
    wait_until(lambda: ready.exists() and ready.read_text().endswith("\n"))
    pid = int(ready.read_text())
    with Path(f"/proc/{pid}/fd/0").open("wb", buffering=0):
        parent.kill()
        parent.wait()
        wait_until(lambda: has_ended(pid))


def test_a_child_that_ignores_a_request_to_stop_is_killed_after_the_grace_period() -> None:
    child = start(python(DEAF), stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    began = time.monotonic()
    assert stop(child, 0.2) == -signal.SIGKILL
    assert time.monotonic() - began < 30
    assert stop(child, 0.2) == -signal.SIGKILL, "stopping it again changes nothing"
    child.stdout.close()


def test_answers_come_one_for_each_request() -> None:
    child = JsonChild("-c", ECHO)
    assert child.pid == 0
    for number in range(3):
        child.send({"n": number})
        assert child.answer(60.0) == {"echo": {"n": number}}
    pid = child.pid
    child.close()
    assert child.pid == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_answer_that_is_late_is_none_and_a_dead_child_says_how_it_ended() -> None:
    child = JsonChild("-c", "import sys, time; sys.stdin.readline(); time.sleep(600)")
    child.send({})
    assert child.answer(0.05) is None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildEndedError, match="signal 9") as ended:
        child.answer(60.0)
    assert ended.value.status == -signal.SIGKILL
    child.send({})
    assert child.pid, "another process was started"
    child.kill()
    assert child.pid == 0


@pytest.mark.parametrize(
    "error",
    [
        EmbqError("a", next_step="b", code="c"),
        TryLaterError("a"),
        OutsideError("a", next_step="b"),
        SourceError("a", code="c", transient=True),
        SampleError("c", "a"),
        MalformedError("a"),
    ],
)
def test_an_error_crosses_to_another_process_whole(error: EmbqError) -> None:
    found = error_of(error_fields(error))
    assert type(found) is type(error)
    assert found.__dict__ == error.__dict__
    assert str(found) == str(error)


@pytest.mark.parametrize("kind", ["Exit", "masked", "IntEnum", "nothing", "", 3, None])
def test_an_error_of_no_class_of_ours_is_a_plain_one(kind: object) -> None:
    assert type(error_of({"kind": kind, "message": "a"})) is EmbqError


@pytest.mark.parametrize(
    ("raised", "code"),
    [(InputError("no rows", code="empty_input"), "empty_input"), (MemoryError(), "out_of_memory")],
)
def test_a_step_of_an_index_that_fails_is_answered_with_its_error(raised: Exception, code: str) -> None:
    def fail(_: IndexUnit) -> Sidecar:
        raise raised

    unit = IndexUnit(index="i", build="b", stage="add", number=0, inputs="d")
    error = error_of(answer(msgspec.json.encode(unit).decode(), fail)["error"])
    assert error.code == code


# --- their start ---

PROGRAMS = {
    **{f"reader of {kind}": (client.SERVER, kind) for kind in (*SOURCES, "no such kind")},
    "decoder": (("-m", "embq.retrieval.ui.thumbnails.decoder_process", "60"), ""),
    **{f"index, {stage}": (("-m", "embq.index.stages.process"), stage) for stage in (*STAGE_MODULES, "no such stage")},
}


@pytest.mark.parametrize(("arguments", "name"), PROGRAMS.values(), ids=PROGRAMS)
def test_every_program_that_is_started_first_answers_when_it_has_started(arguments: tuple[str, ...], name: str) -> None:
    child = JsonChild(*arguments)
    try:
        child.start(name)
        pid = child.pid
        child.start(name)
        assert child.pid == pid
    finally:
        child.kill()


LATE = "import sys, time\nfor _ in sys.stdin:\n    time.sleep(0.5)\n    print('\\x1eup', flush=True)"


@pytest.fixture
def _many_files() -> Iterator[None]:
    """This process has so many open files that the next ones are beyond what select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        yield
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_files")
def test_a_start_is_waited_for_also_in_a_process_of_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.core.process.children.START_POLL_S", 0.05)
    waits: list[int] = []
    child = JsonChild("-c", LATE)
    try:
        child.start(on_wait=lambda: waits.append(1))
        assert waits
    finally:
        child.kill()


@pytest.mark.usefixtures("_many_files")
def test_the_answer_of_a_reader_is_waited_for_also_in_a_process_of_many_files(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": ["a"], "author": ["b"]}), table)
    reader = client.Process(*client.SERVER, "60")
    try:
        unit = Unit(kind="parquet", source=str(table), etag=etag(table.stat()))
        assert reader.query(unit, wait_s=60.0)
    finally:
        reader.kill()


@pytest.mark.parametrize(
    ("program", "error"),
    [("raise SystemExit(3)", ChildEndedError), ("print('no answer')", ChildEndedError), (LATE, TimeoutError)],
)
def test_a_process_that_does_not_start_is_an_error_and_is_ended(
    program: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.core.process.children.START_POLL_S", 0.01)
    if error is TimeoutError:
        monkeypatch.setattr("embq.core.process.children.START_S", 0.05)
    child = JsonChild("-c", program)
    with pytest.raises(error):
        child.start()
    assert child.pid == 0


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.EIO, ConfigError, "the process that reads tables cannot be started: Input/output error"),
        (errno.EMFILE, ExhaustedError, "all files that this process may open at once are open"),
    ],
)
def test_a_reader_that_the_system_does_not_start_is_an_error_of_the_machine(
    number: int, error: type[EmbqError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.core.process.children.start", partial(_refused, number))
    reader = client.Process(*client.SERVER)
    with pytest.raises(error, match=message):
        reader.start_for(Unit(kind="parquet", source="/nowhere"))
    assert reader.pid == 0


def test_a_decoder_that_the_system_does_not_start_is_to_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.core.process.children.start", partial(_refused, errno.EMFILE))
    with pytest.raises(HttpError, match="cannot be started: Too many open files") as refused:
        Decoders(1).thumbnail(b"", 16)
    assert refused.value.status == 503


def test_a_step_of_an_index_whose_process_the_system_does_not_start_is_an_error_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("embq.core.process.children.start", partial(_refused, errno.EIO))
    monkeypatch.setattr(IndexService, "_is_ours", lambda *_: True)
    service = object.__new__(IndexService)
    service._child = JsonChild("-c", "")  # type: ignore[assignment]
    hint = IndexHint(run="0" * 16, gen="1-0", u=0, unit={"stage": "add"})
    with pytest.raises(ConfigError, match="cannot be started: Input/output error"):
        service._claim(hint, None)  # type: ignore[arg-type]


def _refused(number: int, *_: object, **__: object) -> NoReturn:
    raise OSError(number, os.strerror(number), sys.executable)
