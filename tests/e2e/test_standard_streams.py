"""Standard streams that are closed, full, or a terminal that goes away."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embq.core.errors import Exit
from embq.core.run.reader import row_tables
from tests.e2e.session import DEADLINE_S
from tests.support.outputs.build import build, write_jsonl

EMBQ = [sys.executable, "-m", "embq"]


def texts(folder: Path, count: int) -> Path:
    return write_jsonl(folder / "t.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(count)])


def test_a_run_with_all_streams_closed_ends_with_its_rows(tmp_path: Path) -> None:
    words = [*EMBQ, "run", str(texts(tmp_path, 40)), "-o", str(tmp_path / "out"), "-m", "stub:8"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], check=False, timeout=DEADLINE_S)
    assert done.returncode == Exit.DONE
    assert sum(table.num_rows for table in row_tables(tmp_path / "out")) == 40


@pytest.mark.parametrize(
    "words", [["--help"], ["config"], ["status", "OUT"], ["failures", "OUT"], ["status", "OUT", "--json"]]
)
def test_a_full_standard_output_is_named_as_such(words: list[str], tmp_path: Path) -> None:
    out = build(tmp_path / "out", [texts(tmp_path, 4)], model="stub:8")
    command = [*EMBQ, *(str(out) if word == "OUT" else word for word in words)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    assert done.returncode == Exit.OUTPUT
    assert "standard output cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def _with_sighup() -> None:
    """Let SIGHUP reach the command, also where the tests were started by nohup, which has it ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_run_whose_terminal_closes_stops_as_by_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    out, (here, terminal) = tmp_path / "out", pty.openpty()
    words = [*EMBQ, "run", str(texts(tmp_path, 2_000)), "-o", str(out), "-m", "stub:8?ms_per_sample=20"]
    process = subprocess.Popen(
        [*words, "--unit-size", "10"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=_with_sighup,
    )
    os.close(terminal)
    os.set_blocking(here, False)
    shown, until = b"", time.monotonic() + DEADLINE_S
    while not any(out.glob("parts/*")) and time.monotonic() < until:
        time.sleep(0.05)
        try:
            shown += os.read(here, 1 << 16)
        except BlockingIOError:
            continue
    assert b"starting the workers" in shown
    os.close(here)
    process.send_signal(signal.SIGHUP)
    assert process.wait(DEADLINE_S) == Exit.INTERRUPTED
    held = [key for table in row_tables(out) for key in table["key"].to_pylist()]
    assert 0 < len(held) < 2_000
    assert len(set(held)) == len(held)
