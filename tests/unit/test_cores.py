"""Cores that a container leaves to a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.process.limits import cores

MINE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("max 100000\n", MINE),
        ("50000 100000\n", 1),
        ("100000 100000\n", 1),
        ("150000 100000\n", min(MINE, 2)),
        (f"{100_000 * (MINE + 5)} 100000\n", MINE),
        ("nonsense\n", MINE),
        ("-1 0\n", MINE),
    ],
)
def test_a_quota_leaves_as_many_cores_as_it_keeps_busy(said: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(said)
    assert cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", MINE), ("30000\n", 1)])
def test_the_older_files_are_read_too(quota: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(tmp_path) == expected


def test_without_a_container_it_is_the_affinity(tmp_path: Path) -> None:
    assert cores(tmp_path) == MINE
