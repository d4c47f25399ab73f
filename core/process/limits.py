"""CPU, cores and memory that this process may use, and the errors where memory, threads or processes are used up."""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import resource
from pathlib import Path

from core.errors import ExhaustedError

CGROUP = Path("/sys/fs/cgroup")
"""Limits of a container: `cpu.max` of version 2, `cpu.cfs_*` of version 1 (kernel documentation,
admin-guide/cgroup-v2 and scheduler/sched-bwc)."""


def cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may keep busy, at least 1: by its affinity, and by the quota of its container."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return mine if quota is None else max(1, min(mine, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the container gets; None where it has no limit."""
    try:
        allowed, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            allowed = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    try:
        # "max", or -1, is none.
        return int(allowed) / int(period) if int(allowed) > 0 and int(period) > 0 else None
    except ValueError:
        return None


def cpu_field(names: str) -> str:
    """A field of the first CPU in /proc/cpuinfo, by a pattern of its names; "" where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^(?:{names})\s*: (.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


DECODED_SHARE, DECODED_MOST_BYTES = 2, 8 << 30
"""A reader may hold half of the memory of its process, at most 8 GiB: the rest is the model's, and that of the stages
behind the reader."""

UNIT_SHARE, UNIT_MOST_BYTES = 16, 1 << 30
"""Texts and metadata of one unit. Several units are on their way at once, each up to three times: as it was read, as
columns and as bytes. The bound of 1 GiB is that of a column of Arrow strings, 2 GiB, less a factor of two."""

_processes = 1


def machine_bytes() -> int:
    """Memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_bytes(cgroup: Path = CGROUP) -> int:
    """The memory limit of this container; 0 where there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 writes a number beyond any memory where there is no limit.
        return int(text) if text.isdigit() and int(text) < machine_bytes() else 0
    return 0


@functools.cache
def _container_bytes() -> int:
    """As at the start of this process: a worker looks for each unit, and reading the limit costs 0.1 ms."""
    return container_bytes()


def memory_bytes() -> int:
    """Memory limit of this process: of the machine, its container, and its resource limits (`ulimit -v`, `-d`)."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min(_container_bytes() or machine_bytes(), *(limit for limit in limits if limit > 0), machine_bytes())


def shared_by(processes: int) -> None:
    """Set the number of processes that share `memory_bytes`."""
    global _processes
    _processes = max(1, processes)


def decoded_bytes() -> int:
    """Most bytes that a reader of this process may hold of an input: the file where it is read whole, and what comes
    out of it when it is decompressed or decoded."""
    return min(DECODED_MOST_BYTES, memory_bytes() // _processes // DECODED_SHARE)


def unit_bytes() -> int:
    """Most bytes of texts and metadata that the samples of one unit may have together."""
    return min(UNIT_MOST_BYTES, memory_bytes() // _processes // UNIT_SHARE)


def exhausted(error: BaseException) -> ExhaustedError | None:
    """The error for a user where memory, threads or processes are used up; None for any other error."""
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if is_memory or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):  # of torch
        return ExhaustedError(
            "the memory that this process may use is used up",
            next_step="give the machine or container more memory, or end what else uses it; for workers fewer "
            "--workers-per-device and a smaller --batch-size; `ulimit -v` shows a limit of the shell",
        )
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    if is_thread or isinstance(error, BlockingIOError):
        return ExhaustedError(
            "no further thread or process can be started: a limit on processes or on memory is reached",
            next_step="raise the limit (`ulimit -u` and `ulimit -v`, pids_limit and mem_limit of a container, TasksMax "
            "of systemd), or take fewer --prepare-threads and --workers-per-device",
        )
    return None
