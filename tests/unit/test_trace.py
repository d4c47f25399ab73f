"""The file that tells each batch of a device and its time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from embq.core.errors import ConfigError
from embq.worker.meter.batch_trace import Trace


def test_each_batch_is_a_line_of_the_workers_own_file(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "t"), worker="box.sim1.ab", device="sim:1")
    before, began = time.time(), time.monotonic()
    trace.batch(began, rows=3, tokens=40, units=[7, 8])
    trace.batch(began, rows=1, tokens=2, units=[9])  # begun on the device while the one before was at work
    trace.close()
    lines = [json.loads(line) for line in (tmp_path / "t" / "box.sim1.ab.jsonl").read_text().splitlines()]
    assert [(line["rows"], line["tokens"], line["units"]) for line in lines] == [(3, 40, [7, 8]), (1, 2, [9])]
    assert all(line["device"] == "sim:1" and line["began"] <= line["ended"] for line in lines)
    assert lines[0]["ended"] <= lines[1]["began"]
    assert lines[0]["began"] == pytest.approx(before, abs=60)


def test_without_a_folder_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = Trace(worker="w", device="cpu")
    trace.batch(time.monotonic(), rows=1, tokens=1, units=[0])
    trace.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"EMBQ_TRACE names .*file/t"):
        Trace(str(tmp_path / "file" / "t"), worker="w", device="cpu")
