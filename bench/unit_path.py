"""Counts the files and functions of embq that one unit passes, from `embq run` to the committed row.

    python -m bench.unit_path [--checkout FOLDER] [--list]

Each process of `embq run` is traced with `sys.setprofile`, through a `sitecustomize` on PYTHONPATH. Two runs take about
the same time on the stub model: one of a single unit of 3 texts, one of 20 units of 3 texts. "Whole" is every function
that the run of one unit calls, with start-up, supervision and display. "Unit" is every function that the run of 20
units calls at least 5 times more often, so what each unit passes: planning, queueing, claiming, reading, embedding,
publishing and committing. Both runs are done twice, so that loops which happen to turn more often in one of them do
not count. Bodies of modules and classes, lambdas and comprehensions do not count either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path

PACKAGES = tuple(f"embq/{name}" for name in ("core", "sources", "producer", "worker", "writer", "index", "app"))
UNIT_SIZE, UNITS = 3, 20
RUN_MS = 2000.0
"""Device time of each run."""
MORE_CALLS = 5
REPEATS = 2

Function = tuple[str, str]
"""File and qualified name."""

SITECUSTOMIZE = """
import atexit, collections, os, sys, threading
ROOT, OUT = {root!r}, {out!r}
PREFIXES = tuple(ROOT + os.sep + name + os.sep for name in {packages!r})
calls = collections.Counter()
ours = dict()  # code -> whether it is a function of embq

def profile(frame, event, arg):
    if event != "call":
        return
    code = frame.f_code
    known = ours.get(code)
    if known is None:
        # No body of a module or class, no lambda and no comprehension.
        known = ours[code] = (
            code.co_filename.startswith(PREFIXES) and not code.co_name.startswith("<") and bool(code.co_flags & 1)
        )
    if known:
        calls[code] += 1

def write():
    with open(os.path.join(OUT, str(os.getpid())), "w") as out:
        for code, count in list(calls.items()):
            print(code.co_filename[len(ROOT) + 1:], code.co_qualname, count, file=out)

atexit.register(write)
os.register_at_fork(after_in_child=calls.clear)
threading.setprofile(profile)
sys.setprofile(profile)
"""


def main() -> None:
    """Trace both runs, and print how many files and functions of each package they pass."""
    parser = argparse.ArgumentParser(description="files and functions that one unit passes")
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help="checkout to trace")
    parser.add_argument("--list", action="store_true", help="print every function of the unit's path")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    whole, unit = paths(checkout)
    if options.list:
        print("\n".join(f"{path}:{name}" for path, name in sorted(unit)))
    report(whole=whole, unit=unit)


def paths(checkout: Path) -> tuple[set[Function], set[Function]]:
    """Every function of a run of one unit, and those of the unit's path."""
    found = []
    for _ in range(REPEATS):
        one, many = calls_of_run(checkout, 1), calls_of_run(checkout, UNITS)
        found.append((set(one), {function for function, count in many.items() if count - one[function] >= MORE_CALLS}))
    wholes, units = zip(*found, strict=True)
    return set.union(*wholes), set.intersection(*units)


def calls_of_run(checkout: Path, units: int) -> Counter[Function]:
    """Calls of each function in an `embq run`, over all its processes."""
    with tempfile.TemporaryDirectory(prefix="embq-path-") as name:
        folder = Path(name)
        site, calls, texts = folder / "site", folder / "calls", folder / "texts.jsonl"
        site.mkdir()
        calls.mkdir()
        text = SITECUSTOMIZE.format(root=str(checkout), out=str(calls), packages=PACKAGES)
        (site / "sitecustomize.py").write_text(text, encoding="utf-8")
        rows = ({"id": str(i), "text": f"sample number {i}"} for i in range(UNIT_SIZE * units))
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        model = f"stub:8?ms_per_sample={RUN_MS / UNIT_SIZE / units}"
        subprocess.run(
            [
                *(sys.executable, "-m", "embq", "run", str(texts), "--output", str(folder / "out"), "--quiet"),
                *("--model", model, "--unit-size", str(UNIT_SIZE), "--devices", "cpu"),
            ],
            env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{checkout}"},
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found: Counter[Function] = Counter()
        for line in (line for path in calls.iterdir() for line in path.read_text(encoding="utf-8").splitlines()):
            path, function, count = line.split(" ")
            found[path, function] += int(count)
    return found


def report(**traces: Collection[Function]) -> None:
    """Print files and functions of each trace, by package and in all."""
    print(f"{'':<14}" + "".join(f"{name + ' files':>14}{'functions':>11}" for name in traces))
    for package in (*PACKAGES, ""):
        row = f"{package or 'in all':<14}"
        for passed in traces.values():
            paths = [path for path, _ in passed if path.startswith(f"{package}/" if package else "")]
            row += f"{len(set(paths)):>14}{len(paths):>11}"
        print(row)


if __name__ == "__main__":
    main()
