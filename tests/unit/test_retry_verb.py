"""`embq retry` says what it would do again, by code, and what it leaves out and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.core.run.control import Control, save_control
from embq.core.run.layout import Layout
from embq.core.run.run_info import load_run
from tests.support.outputs.build import build, write_folder, write_jsonl


def failing_run(folder: Path, **options: object) -> Path:
    """Ten lines in four units: two blank, one without text."""
    lines: list[object] = [b"\n", b"\n", {"id": "no-text"}, *({"text": str(n)} for n in range(7))]
    return build(folder / "out", [write_jsonl(folder / "t.jsonl", lines)], **options)  # type: ignore[arg-type]


def test_a_dry_run_counts_by_code_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = failing_run(tmp_path)
    before = load_run(out)

    assert run(["retry", str(out), "--dry-run"]) == Exit.DONE

    said = capsys.readouterr()
    assert [line.split() for line in said.err.splitlines()] == [
        ["2", "empty_text", "samples"],
        ["1", "missing_text", "sample"],
        ["to", "do", "again:", "3", "failures,", "in", "2", "units"],
    ]
    assert said.out == ""
    assert load_run(out) == before


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = failing_run(tmp_path)
    assert run(["retry", str(out), "--dry-run", "--json", "--code", "empty_text"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "run": load_run(out).run,
        "failures": 2,
        "units": 1,
        "samples": {"empty_text": 2},
        "whole_units": {},
        "under_way": 0,
        "chunks_left_out": 0,
        "gone": [],
    }


def test_without_a_failure_there_is_nothing_to_do_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", [{"text": "x"}])])
    assert run(["retry", str(out)]) == Exit.DONE
    assert capsys.readouterr().err == "nothing to retry\n"
    assert not Layout(out).logs.exists()


def test_files_that_are_gone_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "photos", {f"{n}.png": b"no image" for n in range(5)})
    out = build(tmp_path / "out", [folder], model="stub:8?decode=1")
    for path in folder.iterdir():
        path.unlink()
    assert run(["retry", str(out)]) == Exit.BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith(f"error[source_missing]: not there any more: {folder}/0.png")
    assert "and 2 more; nothing was added\n  next: " in said


def test_a_run_that_rests_is_told_to_go_on_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = failing_run(tmp_path, only=2)
    save_control(Layout(out), Control(state="paused"))
    assert run(["retry", str(out)]) == Exit.TRY_LATER
    assert f"embq resume {out}" in capsys.readouterr().err


def test_a_code_that_no_failure_has_is_told_with_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = failing_run(tmp_path)
    assert run(["retry", str(out), "--dry-run", "--code", "nope"]) == Exit.DONE
    there = "empty_text (2), missing_text (1)"
    assert f"no failure has the code nope; codes of the failures that stand: {there}" in capsys.readouterr().err
