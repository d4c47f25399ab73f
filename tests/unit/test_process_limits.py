"""Memory and cores that a process may use, and the error of one that has used up its memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from embq.core.process.limits import container_bytes, cores, machine_bytes

AT_THE_BOUNDARY = """
import resource, sys, threading
from embq.app.cli import entry_point

def starved(*_, **__):
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, used + 2**20))
    threading.Thread(target=print).start() if sys.argv[1] == "thread" else bytearray(2**30)

entry_point.cli.main = starved
sys.exit(entry_point.run(["status"]))
"""


@pytest.mark.parametrize(("what", "says"), [("memory", "memory that this process may use"), ("thread", "ulimit -u")])
def test_memory_and_threads_that_are_used_up_are_no_bug(what: str, says: str) -> None:
    """Exit 70, and a file of details."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_BOUNDARY, what], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (72, False), done.stderr
    assert "error[exhausted]: " in done.stderr
    assert says in done.stderr


def test_a_limit_of_the_container_or_of_the_process_is_what_it_may_use(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    assert container_bytes(tmp_path) == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert container_bytes(tmp_path) == 0
    limit = machine_bytes() // 4
    told = subprocess.run(
        [sys.executable, "-c", "from embq.core.process.limits import memory_bytes; print(memory_bytes())"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        check=True,
    )
    assert 0 < int(told.stdout) <= limit


def group(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{text}\n")


def test_the_least_limit_of_nested_groups_holds(tmp_path: Path) -> None:
    """Slurm and systemd limit a group below the root of the machine."""
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    group(root / "system.slice/slurmstepd.scope/job_7", "memory.max", "3000000")
    group(root / "system.slice/slurmstepd.scope/job_7", "cpu.max", "100000 100000")
    group(root / "system.slice/slurmstepd.scope/job_7/step_0", "memory.max", "max")
    group(root / "system.slice", "memory.max", "5000000")
    group(root / "elsewhere", "memory.max", "1000000")
    assert (container_bytes(root, own), cores(root, own)) == (3_000_000, 1)


def test_the_older_groups_are_found_by_their_controller(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("5:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm\nnonsense\n0::/\n")
    group(root / "memory/slurm/job_7", "memory.limit_in_bytes", "2000000")
    group(root / "memory", "memory.limit_in_bytes", "9223372036854771712")
    group(root / "cpu/slurm", "cpu.cfs_quota_us", "50000")
    group(root / "cpu/slurm", "cpu.cfs_period_us", "100000")
    assert (container_bytes(root, own), cores(root, own)) == (2_000_000, 1)


@pytest.mark.parametrize("path", ["/../../other", "/docker/0123"])
def test_groups_that_are_not_to_be_seen_leave_the_root_of_the_container(path: str, tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text(f"0::{path}\n")
    group(root, "memory.max", "4000000")
    group(tmp_path / "other", "memory.max", "1000000")
    assert container_bytes(root, own) == 4_000_000


# --- cores ---


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
