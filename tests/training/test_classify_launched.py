"""`embq train classify` as a user starts it: several processes by torchrun, stopped, killed, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embq.core.errors import Exit
from embq.training.launch.outcomes import PEER_GONE, ProcessOutcome, cause
from tests.support.waiting import wait_until
from tests.training.classifying import TINY, class_shards, log_of

ARGUMENTS = [one for one in TINY if one != "--log-keys"]


def test_who_lost_another_or_was_asked_to_end_is_not_the_cause() -> None:
    lost = ProcessOutcome(rank=0, status=69, code=PEER_GONE, message="lost another", at=1.0)
    bug = ProcessOutcome(rank=1, status=Exit.BUG, code="bug", message="KeyError", at=2.0)
    refused = ProcessOutcome(rank=2, status=65, code="diverged", message="the loss", at=3.0)
    asked = ProcessOutcome(rank=3, status=Exit.INTERRUPTED, at=0.0)
    assert cause([asked]) == asked
    assert cause([asked, lost]) == lost
    assert cause([asked, lost, bug]) == bug
    assert cause([asked, lost, bug, refused]) == refused


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "embq", "train", "classify", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def members(out: Path) -> list[int]:
    """The processes that train into a folder, by pid."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"--output={out}".encode() in words and b"embq.training.launch.torchrun" not in words:
            found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_a_training_whose_process_was_killed_is_restarted_and_goes_on_by_itself(tmp_path: Path) -> None:
    shards, out = class_shards(tmp_path / "s", [9, 5, 12]), tmp_path / "out"
    flags = ["--splitshards", "--epochs=12", "--num-devices=2", "--max-restarts=1", f"--output={out}"]
    process = started(str(shards), *ARGUMENTS, *flags)
    wait_until(lambda: (out / "log.jsonl").exists() and (out / "log.jsonl").read_bytes().count(b"\n") >= 6)
    os.kill(max(members(out)), signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 0, err
    assert "goes on at epoch" in err
    assert [line["samples"] for line in log_of(out, "epoch")] == [26] * 12


@pytest.mark.slow
def test_what_cannot_be_trained_is_told_before_any_process_starts(tmp_path: Path) -> None:
    shards = class_shards(tmp_path / "s", [3])
    status, _, err = ended(started(str(shards), *ARGUMENTS, "--validation", str(tmp_path / "none"), "--output=o"))
    assert status == 65
    assert "error[" in err
    assert "next:" in err
    assert "Traceback" not in err
