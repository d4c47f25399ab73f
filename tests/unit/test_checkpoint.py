"""The checkpoint of a commit log: a shortcut that is passed over wherever it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from embq.core.run import checkpoint
from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.units import canonical_json, sealed
from embq.writer.commit import Committer
from tests.support.outputs.build import build, record_path, write_jsonl

UNITS = 12


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A finished run of 12 units in 14 records, with a checkpoint after each third."""
    monkeypatch.setattr(checkpoint, "EVERY", 3)
    lines = [{"id": str(n), "text": f"text {n}"} for n in range(UNITS)]
    return Layout(
        build(tmp_path / "out", [write_jsonl(tmp_path / "in.jsonl", lines)], unit_samples=1, units_per_commit=1)
    )


@pytest.fixture
def info(layout: Layout) -> RunInfo:
    return load_run(layout.root)


def test_a_log_read_from_its_checkpoint_is_the_whole_log(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CommitLog(layout)
    kept = checkpoint.load(layout, UNITS)
    assert kept.n == 12
    whole = log.replay(UNITS)
    read: list[int] = []
    real = CommitLog.read

    def counted(self: CommitLog, after: int = 0) -> object:
        read.append(after)
        return real(self, after)

    monkeypatch.setattr(CommitLog, "read", counted)
    assert log.replay(UNITS, start=kept) == whole
    assert whole.closed
    assert min(read) == 12


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _count_more(path: Path) -> None:
    path.write_text(path.read_text().replace('"rows":11', '"rows":10'))


def _of_another_log(path: Path) -> None:
    body = json.loads(path.read_text())
    other = LogState(units=UNITS, n=body["n"], prev="0" * 64)
    checkpoint.save(Layout(path.parent.parent), other)


def _keep_less(path: Path) -> None:
    body = json.loads(path.read_text())
    del body["retries"]
    path.write_text(canonical_json(sealed(body)))


def _name_no_files(path: Path) -> None:
    body = json.loads(path.read_text())
    path.write_text(canonical_json(sealed({**body, "named": "none"})))


@pytest.mark.parametrize("damage", [_shorten, _count_more, _of_another_log, _keep_less, _name_no_files, Path.unlink])
def test_a_checkpoint_that_does_not_fit_is_passed_over(layout: Layout, damage: Callable[[Path], None]) -> None:
    before = (layout.writer / "checkpoint.json").read_bytes()
    damage(layout.writer / "checkpoint.json")
    assert (
        not (layout.writer / "checkpoint.json").exists() or (layout.writer / "checkpoint.json").read_bytes() != before
    )
    assert checkpoint.load(layout, UNITS) == LogState(units=UNITS)


def test_a_checkpoint_of_a_record_that_is_gone_is_passed_over(layout: Layout) -> None:
    record_path(layout.root, 12).unlink()
    assert checkpoint.load(layout, UNITS).n == 0


def test_a_writer_that_begins_at_a_checkpoint_still_sweeps_what_its_predecessor_left(
    layout: Layout, info: RunInfo
) -> None:
    record_path(layout.root, 14).unlink()
    record_path(layout.root, 13).unlink()
    log = CommitLog(layout)
    kept = checkpoint.load(layout, UNITS)
    committer = Committer(layout, info, log, log.replay(UNITS, start=kept), writer="next", version="0", swept=12)
    orphan, kept_file = layout.parts / "part-00000013.parquet", layout.parts / "part-00000002.parquet"
    orphan.write_bytes(b"never named")
    (layout.temporary / "part-00000003.1.parquet").write_bytes(b"cut off")
    committer.take_epoch()
    assert not orphan.exists()
    assert kept_file.exists()
    assert list(layout.temporary.iterdir()) == []


def test_a_checkpoint_of_a_run_that_grew_since_is_used(layout: Layout) -> None:
    kept = checkpoint.load(layout, UNITS + 9)
    assert (kept.n, kept.units, len(kept.done)) == (12, UNITS + 9, 3)
    assert not kept.is_done(UNITS + 8)
