"""A retry is killed in part and as a whole; what failed has its row once all the same, and nothing else is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.check import check_complete, read_output
from e2e.session import Ledger, await_in, committed, ended, logs, started, write_texts

from faults.kit.cluster import alive, held_after, sabotaged
from faults.test_kills import fences

DIM = 16
UNITS, SAMPLES = 30, 10
AHEAD = 5
"""Units that a worker process does before it waits."""


@pytest.mark.fault("W1", "`embq retry`: a worker, the writer, then everything is killed; `embq resume`")
def test_a_retry_of_which_everybody_is_killed_has_each_sample_once(short_tmp: Path) -> None:
    root, texts, gate = short_tmp / "out", short_tmp / "t.jsonl", short_tmp / "gate"
    expected = write_texts(texts, UNITS * SAMPLES)
    good = texts.read_text().splitlines()
    bad = {key for number, key in enumerate(expected) if number % 5 == 3}
    cut = [json.dumps({"id": key}) if key in bad else line for key, line in zip(expected, good, strict=True)]
    texts.write_text("\n".join(cut) + "\n")
    options = ["-o", root, "-m", f"stub:{DIM}", "--unit-size", str(SAMPLES), "--quiet"]
    assert ended("run", texts, *options)[0] == 3
    before = read_output(root)
    assert {key for _, _, key, _ in before.failures} == bad
    texts.write_text("\n".join(good) + "\n")

    ledger = Ledger(root)
    command = ["retry", root, "--workers-per-device", "2", "--quiet"]
    with started(*command, environment=sabotaged(held_after(AHEAD, gate))) as retry:
        await_in(retry, lambda: ledger.finished() >= UNITS + AHEAD)
        status, _, stderr = ended("retry", root)
        assert status == 0, stderr
        assert "under way already: " in stderr
        assert "the process that is at work on" in stderr
        worker = retry.workers()[0]
        worker.kill()
        await_in(retry, lambda: "worker_died" in logs(root))
        writer = retry.service("writer")
        assert writer is not None
        writer.kill()
        await_in(retry, lambda: not alive(writer) and fences(root) == 3)
        await_in(retry, lambda: len(committed(root)) > UNITS + AHEAD)
        retry.kill_all()
    ledger.close()
    done = committed(root)
    assert UNITS + AHEAD < len(done) < 2 * UNITS

    status, stdout, stderr = ended("resume", root, "--quiet", "--json")

    assert status == 0, stderr
    account = json.loads(stdout)
    assert (account["rows"], account["failures"], account["rows_total"]) == (len(expected), 0, len(expected))
    output = check_complete(root, expected, units=2 * UNITS, dim=DIM)
    assert output.keys[: len(before.keys)] == before.keys
    assert committed(root)[: len(done)] == done
    assert "Traceback" not in logs(root)
    status, stdout, stderr = ended("verify", root)
    assert status == 0, stdout + stderr
