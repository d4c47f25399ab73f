"""Size of embq on a laptop: a fresh environment with nothing but `pip install .`, its size and its start.

    python -m bench.footprint

Installs this checkout with constraints.txt into a temporary virtual environment. pip itself (10 MB) is not in it: what
is counted is what embq needs. Sizes are bytes on disk as `du` counts them, compiled modules included; times are medians
from the shell, after one call that fills the page cache. The goal is at most 250 MB.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from bench.report import table, write

ROOT = Path(__file__).resolve().parents[1]
GOAL_MB = 250
LARGEST = 5
CALLS = 7

TIMED = (["--help"], ["enqueue", "--help"], ["search", "--help"])

MUST_BE_ABSENT = ("torch", "numpy", "faiss", "transformers", "h5py", "starlette")
"""Packages of other roles."""


def main() -> None:
    """Install, measure, print and write."""
    with tempfile.TemporaryDirectory(prefix="embq-footprint-") as folder:
        figures = measured(Path(folder))
    table(["part", "MB"], [[part["name"], part["mb"]] for part in figures["largest"]])
    print(f"\nall {figures['mb']} MB, goal {GOAL_MB}; installing took {figures['install_s']} s")
    for name, start in figures["starts"].items():
        print(f"embq {name}: {start['ms']} ms, {start['cpu_ms']} ms of processor time")
    write("footprint", figures)


def measured(folder: Path) -> dict[str, Any]:
    """The figures of an environment that is made in `folder`."""
    home = folder / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = next(home.glob("lib/python*/site-packages"))
    began = time.perf_counter()
    install = ["install", "-q", "--no-warn-script-location", "-c", ROOT / "constraints.txt", ROOT]
    subprocess.run([sys.executable, "-m", "pip", f"--python={python}", *map(str, install)], check=True)
    install_s = time.perf_counter() - began
    there = {name for name in MUST_BE_ABSENT if (site / name).exists()}
    assert not there, f"the base install brings {there}"
    command = home / "bin" / "embq"
    starts = {" ".join(arguments): _start(command, arguments) for arguments in TIMED}
    sizes = {path.name: _disk_bytes(path) for path in site.iterdir()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST]
    inside = {path.name: _disk_bytes(path) for path in (site / "pyarrow").iterdir()}
    return {
        "mb": _mb(_disk_bytes(home)),
        "goal_mb": GOAL_MB,
        "install_s": round(install_s, 1),
        "starts": starts,
        "load_average": round(os.getloadavg()[0], 2),
        "largest": [{"name": name, "mb": _mb(size)} for name, size in largest],
        "largest_of_pyarrow": [
            {"name": name, "mb": _mb(size)} for name, size in sorted(inside.items(), key=lambda item: -item[1])[:8]
        ],
        "distributions": sorted(path.name.removesuffix(".dist-info") for path in site.glob("*.dist-info")),
    }


def _start(command: Path, arguments: list[str]) -> dict[str, float]:
    """Milliseconds of one start, and of its processor time, which a busy machine does not change."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    took, used = [], []
    for _ in range(CALLS + 1):
        began, before = time.perf_counter(), _cpu_s()
        subprocess.run([command, *arguments], check=True, capture_output=True, env=environment)
        took.append(1000 * (time.perf_counter() - began))
        used.append(1000 * (_cpu_s() - before))
    return {"ms": round(statistics.median(took[1:]), 1), "cpu_ms": round(statistics.median(used[1:]), 1)}


def _cpu_s() -> float:
    said = resource.getrusage(resource.RUSAGE_CHILDREN)
    return said.ru_utime + said.ru_stime


def _disk_bytes(path: Path) -> int:
    said = subprocess.run(["du", "-s", "--block-size=1", str(path)], check=True, capture_output=True, text=True)
    return int(said.stdout.split()[0])


def _mb(size: int) -> float:
    return round(size / 1e6, 1)


if __name__ == "__main__":
    main()
