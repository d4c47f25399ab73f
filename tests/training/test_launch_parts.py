"""The hosts' parts of a training: what the other end says and how it ends, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from embq.core.errors import AwayError, DeviceError, EmbqError
from embq.core.service.stopping import REPEAT_S
from embq.training.launch.outcomes import PEER_GONE, ProcessOutcome, killed
from embq.training.launch.ssh_connection import HostConnection, watch
from embq.training.launch.ssh_host import MARK, ended_by_silence
from tests.support.waiting import wait_until
from tests.training.launching import alive, environment, ranks


def part(host: str, said: str, *, prefix: str = "") -> HostConnection:
    """A host that answers a question, says this, and hangs up."""
    command = [sys.executable, "-S", "-c", "import sys; sys.stdout.write(sys.argv[1])", f"welcome\n{MARK}{{}}\n{said}"]
    return HostConnection(host, command, threading.Lock(), prefix=prefix)


def told(status: int, *outcomes: ProcessOutcome) -> str:
    return MARK + json.dumps({"status": status, "outcomes": [asdict(one) for one in outcomes]}) + "\n"


def test_what_a_host_tells_last_may_stand_behind_a_line_without_an_end(capfd: pytest.CaptureFixture[str]) -> None:
    assert watch([part("one", "{}" + told(0, ProcessOutcome(rank=0, status=3)))]) == 3
    assert capfd.readouterr().out == "{}"


def test_a_connection_that_is_cut_while_a_host_tells_of_its_end_was_lost() -> None:
    with pytest.raises(AwayError, match="the connection to one ended in the middle of the training"):
        watch([part("one", told(0, ProcessOutcome(rank=0, status=0))[:-9])])


def test_a_process_that_was_killed_on_any_host_explains_the_end_of_the_others() -> None:
    lost = ProcessOutcome(rank=0, status=69, code=PEER_GONE, message="lost another")
    asked = ProcessOutcome(rank=2, status=130)
    ended = ProcessOutcome.of(1, killed("process 1 on two.example.org", "its memory", 9))
    with pytest.raises(
        EmbqError, match=r"process 1 on two\.example\.org was ended by signal 9, as the kernel"
    ) as raised:
        watch([part("one", told(69, lost)), part("two", told(1, ended)), part("three", told(130, asked))])
    assert raised.value.exit_code == DeviceError.exit_code


def test_a_torchrun_that_was_killed_explains_the_end_of_processes_on_other_hosts() -> None:
    lost = ProcessOutcome(rank=0, status=69, code=PEER_GONE, message="lost another")
    with pytest.raises(DeviceError, match="the training was ended by signal 9"):
        watch([part("one", told(69, lost)), part("two", told(137))])


def remote(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """A host's end of the connection, with one process of `launched`."""
    member = [sys.executable, "-m", "embq.training.launch.member", "launched", str(folder), *flags]
    command = [sys.executable, "-m", "embq.training.launch.ssh_host", "--", *member]
    pipe, around = subprocess.PIPE, environment(TMPDIR=str(folder))
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=around)


def test_a_connection_that_closes_while_the_processes_are_asked_to_end_ends_them_at_once(tmp_path: Path) -> None:
    with remote(tmp_path, "--wait", "--stubborn") as other:
        (pid,) = (int(words[0]) for words in ranks(tmp_path, 1).values())
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.close()
        asked = time.monotonic()
        wait_until(lambda: time.monotonic() > asked + REPEAT_S + 0.3)
        assert alive([pid])
        other.stdout.close()
        wait_until(lambda: not alive([pid, other.pid]), 10)
    assert not list(tmp_path.glob("embq-launch-*"))


def test_a_line_of_a_dry_run_tells_the_error_itself(tmp_path: Path) -> None:
    with remote(tmp_path, "--fail", "0") as other:
        out, errors = other.communicate(timeout=60) if other.wait(60) else ("", "")
    assert (other.returncode, out) == (65, "here is 0 of 1\n")
    assert errors.endswith("error[not_there]: process 0 cannot read it\n  next:  mend it\n")


def test_whoever_started_a_training_and_is_not_heard_of_any_more_is_gone() -> None:
    source, end = os.pipe()
    try:
        os.write(end, b"\n")
        assert ended_by_silence(source, 0.05)
        os.close(end)
        assert not ended_by_silence(source, None)
    finally:
        os.close(source)


def test_an_unknown_exception_is_told_although_another_host_was_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bug = ProcessOutcome(
        rank=1, status=70, code="bug", message="KeyError: 'x'", traceback="Traceback", host="two", at=1.0
    )
    asked = ProcessOutcome(rank=0, status=130, at=2.0)
    with pytest.raises(EmbqError, match="process 1 on two ended with KeyError: 'x'"):
        watch([part("one", told(130, asked)), part("two", told(70, bug))])
