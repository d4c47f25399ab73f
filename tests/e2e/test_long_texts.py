"""`embq run --chunk-tokens`: every chunk of every text once, although workers die."""

from __future__ import annotations

import json
import random
from pathlib import Path

import psutil

from tests.e2e.check import check_complete
from tests.e2e.session import Command, Ledger, await_in, called, committed, ended, started, succeed
from tests.faults.kit.cluster import alive, held_after, let_go, sabotaged

DIM = 8
TOKENS, OVERLAP = 20, 5
UNIT = 4
TEXTS = 160


def windows(text: str) -> list[str]:
    """The chunks of a text with one space between its words, by the words of the stub model."""
    words = text.split()
    starts = [0]
    while starts[-1] + TOKENS < len(words):
        starts.append(starts[-1] + TOKENS - OVERLAP)
    return [" ".join(words[at : at + TOKENS]) for at in starts]


def write_documents(path: Path, count: int, *, name: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Texts of 1 to 200 words; gives key -> bytes of each chunk, and key -> code of each failure.

    Some keys look like those of chunks, and every tenth text is empty.
    """
    random_ = random.Random(name)
    chunks: dict[str, bytes] = {}
    failures: dict[str, str] = {}
    with path.open("w") as file:
        for number in range(count):
            key = f"{name}{number}" if number % 3 else f"{name}{number + 1}#0"
            text = " ".join(f"{name}{number}.{word}" for word in range(random_.choice([1, 19, 20, 21, 50, 200])))
            if number % 10 == 9:
                failures[f"{key}#"], text = "empty_text", " "
            else:
                chunks |= {f"{key}#{n}": chunk.encode() for n, chunk in enumerate(windows(text))}
            file.write(json.dumps({"id": key, "text": text, "number": number}) + "\n")
    return chunks, failures


def kill_a_worker(command: Command, ledger: Ledger) -> None:
    found: list[psutil.Process] = []

    def someone_works() -> bool:
        known = ledger.workers()
        found[:] = [process for process in command.workers() if process.pid in known and alive(process)]
        return bool(found)

    await_in(command, someone_works)
    found[0].kill()
    await_in(command, lambda: not alive(found[0]))


def test_every_chunk_is_there_once_although_workers_are_killed(short_tmp: Path) -> None:
    root, first, second = short_tmp / "out", short_tmp / "first.jsonl", short_tmp / "second.jsonl"
    chunks, failures = write_documents(first, TEXTS, name="a")
    options = ["-m", f"stub:{DIM}?ms_per_sample=4", "--chunk-tokens", str(TOKENS), "--chunk-overlap", str(OVERLAP)]
    ledger = Ledger(root)
    try:
        # Two workers, one after the other, do not end the run before both were killed.
        gate = short_tmp / "gate"
        run = ["run", first, "-o", root, *options, "--unit-size", str(UNIT), "--quiet", "--devices", "cpu"]
        with started(*run, environment=sabotaged(held_after(18, gate))) as command:
            for units in (3, 15):
                await_in(command, lambda units=units: ledger.finished() >= units)
                kill_a_worker(command, ledger)
            let_go(gate)
            assert command.wait() == 3, command.said
    finally:
        ledger.close()
    output = check_complete(root, chunks, units=TEXTS // UNIT, dim=DIM, failures=failures)
    assert output.rows is not None
    for row in output.rows.to_pylist():
        assert row["key"] == f"{row['document']}#{row['chunk']}"
        assert (row["number"] >= 0, row["metadata"]) == (True, None)
    before = committed(root)

    # More texts, cut alike, are added; cut in another way they are refused, and nothing happens.
    more, more_failures = write_documents(second, 8, name="b")
    status, _, stderr = called("run", second, "-o", root, "-m", options[1], "--chunk-tokens", "21", "--quiet", "--add")
    assert status == 65, stderr
    assert "error[other_run]" in stderr
    assert committed(root) == before
    status, stdout, stderr = ended(
        "run", second, "-o", root, *options, "--unit-size", str(UNIT), "--json", "--add", deadline_s=100
    )
    assert status == (3 if failures | more_failures else 0), stderr
    said = json.loads(stdout)
    assert (said["rows"], said["rows_total_exact"], said["truncated"]) == (len(chunks) + len(more), True, 0)
    assert said["rows_total"] == len(chunks) + len(more) + len(failures) + len(more_failures)
    check_complete(root, chunks | more, units=TEXTS // UNIT + 2, dim=DIM, failures=failures | more_failures)

    report = json.loads(succeed("verify", root, "--json"))
    assert report["ok"], report
    assert report["vectors_recomputed"] == len(chunks) + len(more)
