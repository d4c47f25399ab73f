"""How much memory this process may use, which in a container may be less than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

from core.cores import CGROUP


def machine_bytes() -> int:
    """Memory of the machine."""
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


def memory_bytes() -> int:
    """What this process may use at most."""
    return container_bytes() or machine_bytes()
