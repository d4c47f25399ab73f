"""`embq fleet` with machines that answer with anything, and with logs of any length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import embq
from embq.app.fleet import launcher
from embq.app.fleet.launcher import FleetMember
from embq.app.fleet.member import LeftWorker, fleet_folder
from embq.app.fleet.ssh import ssh_launcher
from embq.core.process.children import MARK

ROW = {"name": "devices", "detail": "no card", "fix": "install one"}
ANSWERS = {
    "{": "malformed",
    "[]": "malformed",
    "[" * 100_000: "malformed",
    json.dumps({"embq": 3, "failed": []}): "malformed",
    json.dumps({"embq": embq.__version__, "failed": [{"name": "devices"}]}): "malformed",
    json.dumps({"embq": embq.__version__, "failed": [ROW] * 101}): "malformed",
    json.dumps({"embq": embq.__version__, "failed": [{**ROW, "detail": "x" * 500_000}]}): "malformed",
    json.dumps({"embq": "0.0.1"}): f"embq 0.0.1 there, {embq.__version__} here",
    json.dumps({"embq": embq.__version__, "failed": [{**ROW, "detail": "\x1b[2Jno card"}]}): "devices: \\x1b[2Jno card",
}


def row_of(answer: Path, *, then: str = "") -> str:
    """The row of a machine that prints a file, and then what a command prints, in place of embq."""
    script = answer.with_name("ssh")
    script.write_text(f"#!/bin/sh\ncat {answer}\n{then}\n")
    script.chmod(0o700)
    with_ssh = ssh_launcher("fleet", {"gpu1": "gpu1"}, [str(script)], "python")
    row = with_ssh.states(["gpu1"])["gpu1"]
    assert row.state == "fail"
    return row.detail


def test_a_machine_that_answers_with_anything_is_a_failed_row(tmp_path: Path) -> None:
    for text, expected in ANSWERS.items():
        (tmp_path / "answer").write_text(f"{MARK}{text}\n")
        assert expected in row_of(tmp_path / "answer"), text[:100]


def test_a_machine_that_sends_for_ever_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "OUTPUT_BYTES", 10_000)
    (tmp_path / "answer").write_text("hello\n")
    assert "signal 9" in row_of(tmp_path / "answer", then="exec cat /dev/zero")
    assert len(row_of(tmp_path / "answer", then="exec cat /dev/zero >&2")) < 4_000


def test_the_last_line_of_a_log_of_terabytes_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = fleet_folder("fleet") / "gpu1.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.seek(1 << 40)  # a hole
        file.write(b"\nerror: no broker\n")
    (row,) = LeftWorker(FleetMember(fleet="fleet", name="gpu1")).state()
    assert row["detail"] == "error: no broker"
