"""Verbs read the commit log from its checkpoint on, and say the same as without one."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import embq
from embq.app.cli.entry_point import run
from embq.app.local import unused_runs
from embq.app.status.run_control import _from_folder
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit, OutputError
from embq.core.run import checkpoint
from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.commits import Commit, CommitFiles, seal_of
from embq.core.run.control import Control, RunState, save_control
from embq.core.run.layout import Layout
from embq.core.run.run_info import load_run
from embq.index.collection.run import describe_run
from embq.producer.announce import record_of
from tests.support.outputs.build import go_on, record_path, write_jsonl

UNITS = 12
SAVED = 12
"""The record of the last checkpoint; 14 ends the log."""
FAILED = [3, 6]
"""Records with failures."""

MODEL = ["-m", "stub:8", "--precision", "fp32"]


@dataclass
class Reads:
    """Numbers of the records that were read with their units, and without them."""

    whole: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What is read of the log."""
    reads = Reads()
    for form, numbers in ((Commit, reads.whole), (CommitFiles, reads.files)):

        def counted(data: bytes, name: str, parse: Any = form.parse, numbers: list[int] = numbers) -> Commit:
            numbers.append(int(Path(name).stem))
            parsed: Commit = parse(data, name)
            return parsed

        monkeypatch.setattr(form, "parse", staticmethod(counted))
    return reads


@pytest.fixture
def out(tmp_path: Path, broker: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of 12 units in 14 records, with a checkpoint after the twelfth; two samples failed."""
    monkeypatch.setattr(checkpoint, "EVERY", 3)
    (tmp_path / "in").mkdir()
    for n in range(UNITS):
        lines: list[object] = [{"id": f"{n}", "text": f"text {n}"}]
        write_jsonl(tmp_path / "in" / f"{n:02d}.jsonl", [*lines, *([b"\n"] if n + 2 in FAILED else [])])
    assert _with_broker(broker, _enqueue(tmp_path)) == 0
    go_on(tmp_path / "out")
    layout = Layout(tmp_path / "out")
    assert checkpoint.load(layout, UNITS).n == SAVED
    assert CommitLog(layout).replay(UNITS).failed == FAILED
    return tmp_path / "out"


def _enqueue(folder: Path, *model: str) -> list[str]:
    return ["enqueue", str(folder / "in"), "-o", str(folder / "out"), *(model or MODEL)]


def _with_broker(broker: EmbeddedServer, command: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBQ_BROKER_URL", broker.url)
        return run(command)


VERBS = [
    "pause",
    "cancel",
    "resume",
    "enqueue",
    "enqueue another",
    "failures",
    "retry",
    "retry at rest",
    "gc",
    "index",
    "open",
    "end of run",
    "cancel without a broker",
]


def _call(verb: str, out: Path, broker: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> object:
    """What a verb says of a run."""
    capsys.readouterr()
    match verb:
        case "resume":
            code = _with_broker(broker, [verb, str(out), "--json"])
        case "enqueue":
            code = _with_broker(broker, [*_enqueue(out.parent), "--json"])
        case "enqueue another":
            code = _with_broker(broker, _enqueue(out.parent, "-m", "stub:16"))
        case "retry" | "retry at rest":
            if "rest" in verb:
                save_control(Layout(out), Control(state=RunState.PAUSED))
            verb = "retry"
            code = run([verb, str(out), "--dry-run", "--json"])
        case "gc" | "failures":
            code = run([verb, str(out), "--json"])
        case "index":
            return describe_run(out, output=None, column=None)
        case "open":
            opened = embq.open(out)
            return len(opened), opened.complete, opened.failures_count, opened.dims
        case "end of run":
            return unused_runs._is_unbegun(out, load_run(out))
        case "cancel without a broker":
            save_control(Layout(out), Control(state=RunState.CANCELLED))
            result = _from_folder(record_of(load_run(out), out), RunState.CANCELLED)
            return result is not None and result.done
        case _:
            code = run([verb, str(out)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_reads_the_log_from_its_checkpoint_on(
    verb: str, out: Path, broker: EmbeddedServer, reads: Reads, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _call(verb, out, broker, capsys)
    failed = FAILED if verb in ("failures", "retry", "retry at rest") else []
    assert set(reads.whole) <= {13, 14, *failed}
    if verb in ("index", "open"):  # their result is the list of all parts
        assert reads.files == list(range(1, 15))
    else:
        assert set(reads.files) <= {13, 14}

    reads.whole.clear()
    (out / "_writer" / "checkpoint.json").unlink()
    assert _call(verb, out, broker, capsys) == result
    assert {*range(1, 15)} <= {*reads.whole}, "without a checkpoint the whole log is read"


def test_a_file_without_a_record_is_found_among_those_of_a_checkpoint(out: Path) -> None:
    committed = sorted((out / "parts").iterdir())
    (out / "parts" / "part-00000005.orphan").write_bytes(b"never named")
    assert run(["gc", str(out), "--older-than", "0"]) == 0
    assert sorted((out / "parts").iterdir()) == committed


def test_a_file_without_a_record_in_place_of_a_committed_one_is_found(out: Path) -> None:
    parts = sorted((out / "parts").iterdir())
    orphan = parts[0].rename(parts[0].with_suffix(".other"))
    assert run(["gc", str(out), "--older-than", "0"]) == 0
    assert not orphan.exists()
    assert sorted((out / "parts").iterdir()) == parts[1:]


def test_a_missing_record_with_failures_is_named(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_path(out, FAILED[1]).unlink()
    assert run(["failures", str(out)]) != 0
    assert "commit record 00000006.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "commits"])
@pytest.mark.parametrize("verb", ["pause", "status", "failures", "gc", "verify"])
def test_a_folder_that_cannot_be_listed_is_an_error_of_the_storage(
    verb: str, folder: str, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(call: Any, at: Any) -> Any:
        if os.path.samestat(os.stat(at), os.stat(out / folder)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), at)
        return call(at)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, partial(failing, getattr(os, name)))
    assert run([verb, str(out)]) == Exit.OUTPUT
    said = " ".join(capsys.readouterr().err.split())
    assert "error[output]" in said
    assert str(out / folder) in said
    assert "Input/output error" in said


@pytest.mark.parametrize("n", [2, SAVED + 1])
def test_a_record_that_does_not_follow_the_one_before_ends_a_list_of_parts(out: Path, n: int) -> None:
    path = record_path(out, n)
    commit = next(CommitLog(Layout(out)).read(after=n - 1))
    path.write_bytes(replace(commit, prev="0" * 64).seal()[0])
    with pytest.raises(OutputError, match="does not follow"):
        describe_run(out, output=None, column=None)


def test_a_record_in_another_form_of_json_is_the_same_record(out: Path, reads: Reads) -> None:
    whole = CommitLog(Layout(out)).replay(UNITS)
    parts = describe_run(out, output=None, column=None)["parts"]
    for n in range(1, 15):
        path = record_path(out, n)
        path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
        assert seal_of(path.read_bytes()) == ""
    assert CommitLog(Layout(out)).replay(UNITS) == whole
    assert describe_run(out, output=None, column=None)["parts"] == parts
    assert checkpoint.load(Layout(out), UNITS).n == SAVED


def test_a_damaged_record_ends_a_list_of_parts(out: Path) -> None:
    path = record_path(out, 4)
    path.write_bytes(path.read_bytes().replace(b'"rows":1', b'"rows":2', 1))
    with pytest.raises(OutputError, match="hash does not match"):
        describe_run(out, output=None, column=None)


def test_a_checkpoint_is_due_by_records_or_by_units(monkeypatch: pytest.MonkeyPatch) -> None:
    state = LogState(units=5_000_000, n=7, count=19_999)
    assert not checkpoint.is_due(state, 5_000)
    state.count = 20_001
    assert checkpoint.is_due(state, 5_000)
    assert not checkpoint.is_due(state, 1)
    state.n = 2_000
    assert checkpoint.is_due(state, 0)
    assert not checkpoint.is_due(LogState(units=100_000_000, n=7, count=399_999), 390_000)
