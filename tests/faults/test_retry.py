"""A retry is killed in part and as a whole; what failed has its row once all the same, and nothing else is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.check import check_complete, read_output
from tests.e2e.session import Ledger, await_in, committed, ended, logs, started, write_shards, write_texts
from tests.faults.kit.cluster import alive, held_after, let_go, sabotaged
from tests.faults.kit.table import Recovery
from tests.faults.test_kills import fences

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
    command = ["retry", root, "--workers", "2", "--quiet"]
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


@pytest.mark.fault(
    "D1", "`--damaged keep`: a worker is killed in the run over cut shards, and in the retry of the mended"
)
def test_what_is_kept_of_cut_shards_and_the_rest_of_the_mended_are_there_once(
    short_tmp: Path, recovery: Recovery
) -> None:
    shards, samples, member_bytes = 24, 30, 1024
    root, folder = short_tmp / "out", short_tmp / "in"
    expected = write_shards(folder, shards, samples)
    paths = sorted(folder.iterdir())
    cuts = {path: path.read_bytes() for path in paths[1::3]}
    kept = dict(expected)
    for n, (path, whole) in enumerate(cuts.items()):
        length = 3000 + n * 3511
        path.write_bytes(whole[:length])
        # A sample has ended where the header of the next one is whole.
        ended_at = sum(number * member_bytes + 512 <= length for number in range(1, samples))
        for key in [key for key in expected if key.startswith(f"{paths.index(path):03d}-")][ended_at:]:
            del kept[key]

    def with_a_kill(gate: Path, ahead: int, units: int, *command: str | Path) -> None:
        ledger = Ledger(root)
        with started(*command, "--quiet", environment=sabotaged(held_after(ahead, gate))) as run:
            await_in(run, lambda: ledger.finished() >= units)
            deaths = logs(root).count("worker_died")
            run.workers()[0].kill()
            recovery.injected()
            await_in(run, lambda: logs(root).count("worker_died") > deaths)
            let_go(gate)
            run.wait()
        ledger.close()

    options = ["-o", root, "-m", f"stub:{DIM}", "--damaged", "keep", "--workers", "2"]
    with_a_kill(short_tmp / "gate", AHEAD, AHEAD, "run", folder, *options)
    rests = {key: code for _, ordinal, key, code in read_output(root).failures if ordinal is not None}
    assert len(rests) == len(cuts)
    assert set(rests.values()) == {"damaged_rest"}
    before = check_complete(root, kept, units=shards, dim=DIM, failures=rests)
    assert ended("verify", root)[0] == 0

    for path, whole in cuts.items():
        path.write_bytes(whole)
    with_a_kill(short_tmp / "again", 1, shards + 1, "retry", root, "--workers", "2")

    output = check_complete(root, expected, units=shards + len(cuts), dim=DIM)
    assert output.keys[: len(before.keys)] == before.keys
    assert "Traceback" not in logs(root)
    status, stdout, stderr = ended("verify", root)
    assert status == 0, stdout + stderr
