"""CPU, cores, memory and open files that this process may use, and the errors where one of them is used up."""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from embq.core.errors import ExhaustedError

CGROUP = Path("/sys/fs/cgroup")
"""Limits of a control group: `cpu.max` and `memory.max` of version 2, `cpu.cfs_*` and `memory.limit_in_bytes` of
version 1 (kernel documentation, admin-guide/cgroup-v2, scheduler/sched-bwc, cgroup-v1/memory)."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""Control groups of this process: "NUMBER:CONTROLLERS:PATH" in each line, "0::PATH" for version 2 (cgroups(7))."""


def cores(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """Cores that this process may keep busy, at least 1: by its affinity, and by the quota of its control groups."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in control_groups("cpu", cgroup, own) if (quota := _quota(folder)) is not None]
    return max(1, min(mine, *map(math.ceil, quotas))) if quotas else mine


def control_groups(controller: str, cgroup: Path, own: Path) -> list[Path]:
    """Folders of the groups that limit this process: in a container its root, elsewhere its own group (Slurm, systemd)
    and all above it. A group outside of the process's namespace has ".." in its path, and no folder."""
    folders = [cgroup, cgroup / controller]
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = Path(path).parts[1:]  # none for "/", whose folder is there already
        if ".." not in parts and controller in (controllers or controller).split(","):
            base = cgroup / controller if controllers else cgroup
            folders += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _quota(folder: Path) -> float | None:
    """Cores' worth of time that a group gets; None if it has no limit."""
    try:
        allowed, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            allowed = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    try:
        # "max", or -1, is none.
        return int(allowed) / int(period) if int(allowed) > 0 and int(period) > 0 else None
    except ValueError:
        return None


def cpu_field(names: str) -> str:
    """A field of the first CPU in /proc/cpuinfo, by a pattern of its names; "" if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^(?:{names})\s*: (.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""


def limit_memory(memory_bytes: int, cpu_s: int) -> None:
    """Bound what this process may take from now on, beyond what it has used: address space and processor time.

    A process over the first gets MemoryError, over the second SIGXCPU. Only Linux tells the address space in use;
    elsewhere it is not bounded.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)


def _lower(kind: int, limit: int) -> None:
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if most < 0 else min(limit, most), most))


DECODED_SHARE, DECODED_MOST_BYTES = 2, 8 << 30
"""A reader may hold half of the memory of its process, at most 8 GiB: the rest is the model's, and that of the stages
behind the reader."""

UNIT_SHARE, UNIT_MOST_BYTES = 16, 1 << 30
"""Texts and metadata of one unit. Several units are on their way at once, each up to three times: as it was read, as
columns and as bytes. The bound of 1 GiB is that of a column of Arrow strings, 2 GiB, less a factor of two."""

FILES, LEAST_FILES = 4096, 128
"""Open files that are asked of the system, and without which no run begins: with 32 to 48 its services wait for
connections without end, because its private broker keeps 32 files for itself."""

_processes = 1


def open_files() -> float:
    """The most files that this process may open, after raising that to `FILES` if the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = FILES if hard < 0 else min(FILES, hard)
    if 0 <= soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return math.inf if soft < 0 else max(soft, target)


def check_open_files() -> None:
    """Raise ExhaustedError if this process and its children may open too few files for a run."""
    if (most := open_files()) < LEAST_FILES:
        problem = f"a process may open {most:.0f} files here, and a run needs {LEAST_FILES}"
        raise ExhaustedError(problem, next_step=_MORE_FILES)


_MORE_FILES = (
    f"`ulimit -n {FILES}` in the shell before the command, after raising the hard limit if need be "
    f"(--ulimit nofile={FILES} of a container, LimitNOFILE of systemd)"
)


def machine_bytes() -> int:
    """Memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_bytes(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """The least memory limit of this process's control groups; 0 if there is none."""
    limits = []
    for folder in control_groups("memory", cgroup, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((folder / name).read_text(encoding="ascii")))
    # Version 1 writes a number beyond any memory if there is no limit.
    return min((limit for limit in limits if 0 < limit < machine_bytes()), default=0)


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
    """Most bytes that a reader of this process may hold of an input: the file if it is read whole, and what comes
    out of it when it is decompressed or decoded."""
    return min(DECODED_MOST_BYTES, memory_bytes() // _processes // DECODED_SHARE)


def unit_bytes() -> int:
    """Most bytes of texts and metadata that the samples of one unit may have together."""
    return min(UNIT_MOST_BYTES, memory_bytes() // _processes // UNIT_SHARE)


def exhausted(error: BaseException) -> ExhaustedError | None:
    """The error for a user if memory, threads, processes or files are used up; None for any other error."""
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if is_memory or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):  # of torch
        return ExhaustedError(
            "the memory that this process may use is used up",
            next_step="give the machine or container more memory, or end what else uses it; for workers fewer "
            "--workers and a smaller --batch-size; `ulimit -v` shows a limit of the shell",
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return ExhaustedError("all files that this process may open at once are open", next_step=_MORE_FILES)
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    if is_thread or isinstance(error, BlockingIOError):
        return ExhaustedError(
            "no further thread or process can be started: a limit on processes or on memory is reached",
            next_step="raise the limit (`ulimit -u` and `ulimit -v`, pids_limit and mem_limit of a container, TasksMax "
            "of systemd), or take fewer --threads and --workers",
        )
    return None
