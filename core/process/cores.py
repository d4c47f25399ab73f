"""How many processor cores this process may use, which in a container may be fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limits: `cpu.max` of version 2, `cpu.cfs_*` of version 1 (kernel documentation,
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
