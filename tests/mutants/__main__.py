"""How many random small mutants of embq the tests notice: `make mutants`.

    python -m tests.mutants [--room ROOM] [-n 30] [--seed N] [--jobs 2] [--limit 120] [--executed FILE]
        [--output FILE] [--at-least RATE]

A mutant is one small change inside of a function (`mutations.py`); 88 % of the places that could be changed are there.
The tests are collected once, and a fork for each mutant runs them until one fails or the limit of seconds is over:
first the tests of `make test` that execute its line (`executed.py`), then those nearest to its place (`nearness.py`). A
test that fails without the mutant as well does not count.

Why not mutmut or cosmic-ray: cosmic-ray starts the test command anew for each mutant, which is half a minute of
collection here. mutmut 3 forks as well, but it rewrites all functions of a copy into trampolines that choose a mutant,
so that tests run other code than embq's, and it first runs the whole suite to learn which test calls which function.
What happens in processes that a test starts is not seen there, and much of embq runs in such.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.report import table
from tests.mutants.mutations import Mutant, mutants

ROOT = Path(__file__).parents[2]
ROOMS = {
    **{room: f"embq/{room}" for room in ("core", "writer", "producer", "sources", "index")},
    **{room: f"embq/worker/{room}" for room in ("claim", "stages", "embedders")},
    "verify": "embq/app/verify",
    "searching": "embq/retrieval/searching",
    "fleet": "embq/fleet",
}
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
"""Mutants that behave as embq does, a line each: path | original line | mutated line | reason."""


def drawn(rooms: list[str], number: int, rng: random.Random) -> list[tuple[str, Mutant]]:
    """Mutants of rooms, as many of each room; each kind is as likely as the others that a room has."""
    chosen = []
    for place, room in enumerate(rng.sample(rooms, len(rooms))):
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        for path in sorted((ROOT / ROOMS[room]).rglob("*.py")):
            for mutant in mutants(str(path.relative_to(ROOT)), path.read_bytes()):
                kinds[mutant.kind].append(mutant)
        missing = number // len(rooms) + (place < number % len(rooms))
        while missing and (left := [kind for kind in sorted(kinds) if kinds[kind]]):
            options = kinds[rng.choice(left)]
            mutant = options.pop(rng.randrange(len(options)))
            with suppress(SyntaxError):
                compile(mutant.applied((ROOT / mutant.path).read_bytes()), mutant.path, "exec", dont_inherit=True)
                chosen.append((room, mutant))
                missing -= 1
    return chosen


def is_equivalent(mutant: Mutant) -> bool:
    """Whether a mutant is listed as one that changes nothing."""
    key = f"{mutant.path} | {mutant.original} | {mutant.mutated} | "
    return any(line.startswith(key) for line in EQUIVALENT.read_text().splitlines())


def copied(name: str) -> Path:
    """A copy of the files that git knows, below build/mutants."""
    copy = ROOT / "build" / "mutants" / name
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for file in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / file).exists():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
    return copy


def judged(
    job: int, waiting: queue.SimpleQueue[tuple[str, Mutant]], limit_s: float, executed: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Judge waiting mutants by one process of pytest in a copy of the tree."""
    copy = copied(str(job))
    ours, theirs = socket.socketpair()
    marks = "not slow and not fault and not pages and not gpu"
    others = "--ignore=tests/unit/test_mutants.py"  # which looks at the lines of the list of equivalent mutants
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.plugin", "-m", marks, others]
    environment = {**os.environ, "PYTHONPATH": str(copy), "EMBQ_TEST_MUTANTS": str(theirs.fileno())}
    if executed:
        environment["EMBQ_TEST_EXECUTED"] = str(executed.resolve())
    options: Any = {"cwd": copy, "env": environment, "pass_fds": [theirs.fileno()], "stderr": subprocess.STDOUT}
    with copy.with_suffix(".log").open("w") as log, ours, ours.makefile("rw") as lines:
        process = subprocess.Popen(command, stdout=log, **options)
        theirs.close()
        try:
            with suppress(queue.Empty):
                while True:
                    room, mutant = waiting.get_nowait()
                    print(json.dumps({"mutant": asdict(mutant), "limit_s": limit_s}), file=lines, flush=True)
                    yield {"room": room, **asdict(mutant), **json.loads(lines.readline())}
        except (ConnectionError, json.JSONDecodeError) as error:
            raise SystemExit(f"pytest ended; see {log.name}") from error
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
            shutil.rmtree(copy)


def shown(results: list[dict[str, Any]]) -> float:
    """Print a row for each room, then the survivors. Returns the rate of killed mutants."""
    rows, total = [], Counter[str]()
    for room in ROOMS:
        judgements = [result for result in results if result["room"] == room]
        counts = Counter(result["verdict"] for result in judgements)
        counts["quick"] = sum(result.get("quick", False) for result in judgements)
        total += counts
        rows += [(room, *_row(counts))] if counts else []
    headers = ("room", "drawn", "killed", "by make test", "survived", "equivalent", "rate", "of make test")
    table(headers, [*rows, ("all", *_row(total))])
    for it in results:
        if it["verdict"] == "survived":
            change = f"{it['original']} -> {it['mutated']}"
            click.echo(f"{it['path']}:{it['line']} {it['kind']}: {change}   ({it['tests']} tests ran)")
    return total["killed"] / max(1, total["killed"] + total["survived"])


def _row(counts: Counter[str]) -> tuple[object, ...]:
    killed, quick, survived, equivalent = (counts[it] for it in ("killed", "quick", "survived", "equivalent"))
    rates = [f"{it / (killed + survived):.0%}" if killed + survived else "-" for it in (killed, quick)]
    return killed + survived + equivalent, killed, quick, survived, equivalent, *rates


def main() -> int:
    """Draw mutants, judge them and print the table."""
    parser = argparse.ArgumentParser(prog="tests.mutants", description="How many random mutants the tests notice.")
    parser.add_argument("--room", choices=ROOMS, help="all mutants of this one; else the same number of each")
    parser.add_argument("-n", "--number", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 24))
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side, 2 GB of memory for each")
    parser.add_argument("--limit", type=float, default=120, metavar="S", help="seconds of tests for each mutant")
    parser.add_argument("--executed", type=Path, metavar="FILE", help="coverage data with the tests of each line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the verdicts as JSON")
    parser.add_argument("--at-least", type=float, default=0, metavar="RATE", help="exit 1 if less of 1 is killed")
    options = parser.parse_args()
    click.echo(f"mutants with SEED={options.seed}")
    rooms = [options.room] if options.room else [*ROOMS]
    results, waiting = [], queue.SimpleQueue[tuple[str, Mutant]]()
    for room, mutant in drawn(rooms, options.number, random.Random(options.seed)):
        if is_equivalent(mutant):
            results.append({"room": room, **asdict(mutant), "verdict": "equivalent"})
        else:
            waiting.put((room, mutant))

    def work(job: int) -> None:
        for it in judged(job, waiting, options.limit, options.executed):
            results.append(it)
            click.echo(f"{it['seconds']:6.1f} s  {it['verdict']}  {it['path']}:{it['line']} {it['kind']}")

    with suppress(KeyboardInterrupt), ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, range(options.jobs)))
    rate = shown(results)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"seed": options.seed, "rate": rate, "mutants": results}, indent=1))
    return int(rate < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
