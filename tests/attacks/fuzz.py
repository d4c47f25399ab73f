"""Search for bytes that a reader of `borders` does not survive, guided by coverage (atheris).

    python -m tests.attacks.fuzz [--seconds 3600] [--only NAME] [--sanitize] [--corpus .fuzz] [--output FILE]

The seconds are shared out among the borders, as many of which run at a time as there are cores. What was found to reach
new code is kept in a folder of the corpus for each border, and is where the next search begins. Bytes that a reader did
not survive are kept beside it as `crash-*`, `oom-*` or `timeout-*`. The exit status is 1 where there are any.

With --sanitize the borders of the native library alone: it is built from `native/` by clang with AddressSanitizer and
UndefinedBehaviorSanitizer, and its own code guides the search.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

ROOM_MB = 2_048
"""Memory of a reader, with what is imported: any that takes more has no bound."""
SLOWEST_S = 10
MOST_BYTES = 65_536
MEMORY = Path("/dev/shm")
NATIVE = Path(__file__).parents[2] / "native"


def main() -> int:
    """Fuzz, print a table, and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.fuzz", description="Search for bytes that break a reader."
    )
    parser.add_argument("--seconds", type=float, default=3_600.0)
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), metavar="FOLDER")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        if asked.library:
            sys.modules["embq_native"] = cast("ModuleType", SimpleNamespace(LIBRARY=asked.library))
        _fuzz_one(asked.one, asked.corpus, int(asked.seconds))
    from bench.report import table
    from embq.core.benchmark_record import described, write
    from tests.attacks.borders import borders, forget

    names = [asked.only] if asked.only else sorted(borders())
    options, environment = [], {}
    if asked.sanitize:
        names = [name for name in names if name.endswith("by embq-native")]
        options, environment = _sanitized(asked.corpus)
    forget()
    at_once = min(len(names), len(os.sched_getaffinity(0)))
    seconds = max(1, int(asked.seconds * at_once / len(names)))
    with ThreadPoolExecutor(at_once) as pool:
        each = pool.map(lambda name: _fuzzed(name, asked.corpus, seconds, options, environment), names)
        found = dict(zip(names, each, strict=True))
    columns = ["border", "executions", "seconds", "kept", "crashes"]
    table(columns, [[name, *(one[column] for column in columns[1:])] for name, one in found.items()])
    if asked.output:
        write(asked.output, described("fuzz", found))
    return int(any(one["crashes"] for one in found.values()))


def _sanitized(corpus: Path) -> tuple[list[str], dict[str, str]]:
    """Build the native library with sanitizers; gives the option and the environment of a fuzzer that loads it."""
    import atheris

    corpus.mkdir(parents=True, exist_ok=True)
    library = (corpus / "embq_native.so").resolve()
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fsanitize=address,undefined,fuzzer-no-link"]
    flags += ["-fno-sanitize-recover=all", "-fno-sanitize=vptr,function"]  # atheris brings no runtime for these two
    subprocess.run(["clang++", *flags, "-o", library, *sorted(NATIVE.glob("*.cpp")), "-ldl"], check=True)
    runtime = Path(atheris.path()) / "asan_with_fuzzer.so"
    return ["--library", str(library)], {"LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0"}


def _fuzzed(
    name: str, corpus: Path, seconds: int, options: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """The figures of one border, which is fuzzed by a process of its own."""
    folder = corpus / re.sub(r"\W+", "-", name)
    (folder / "kept").mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.attacks.fuzz", "--one", name, "--corpus", folder, "--seconds", str(seconds)]
    command += options
    # The fuzzer ends its process without a word to Python, so what that wrote is removed here.
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as place:
        said, status = _ended([*map(str, command)], {**os.environ, **environment, "TMPDIR": place})
    (folder / "log").write_text(said)
    executions = re.search(r"stat::number_of_executed_units:\s+(\d+)", said) or re.search(r"Done (\d+) runs", said)
    broken = [path for path in folder.iterdir() if path.name.startswith(("crash-", "oom-", "timeout-", "leak-"))]
    if status and not broken:
        raise SystemExit(f"{name}: the fuzzer ended with status {status}, see {folder / 'log'}")
    return {
        "executions": int(executions[1]) if executions else 0,
        "seconds": round(time.monotonic() - began, 1),
        "kept": sum(1 for _ in (folder / "kept").iterdir()),
        "crashes": len(broken),
    }


def _ended(command: Sequence[str], environment: dict[str, str]) -> tuple[str, int]:
    """Output of a command, and its status."""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.decode(errors="replace"), done.returncode


def _fuzz_one(name: str, folder: Path, seconds: int) -> None:
    """Fuzz one border in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["embq"]):
        from tests.attacks.borders import borders, survives
    from tests.attacks.mutations import mutated

    border = borders()[name]
    seeds = folder / "seeds"
    seeds.mkdir(exist_ok=True)
    for number, seed in enumerate(border.seeds):
        (seeds / str(number)).write_bytes(seed)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        turn = random.Random(seed)
        made = mutated(bytes(data), turn) if turn.random() < 0.7 else atheris.Mutate(bytes(data), most)
        return bytes(made[:most])

    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={ROOM_MB}", f"-timeout={SLOWEST_S}", "-print_final_stats=1"]
    limits += [f"-max_len={MOST_BYTES}", f"-artifact_prefix={folder}/"]
    atheris.Setup(
        [sys.argv[0], *limits, str(folder / "kept"), str(seeds)],
        lambda data: survives(border, data) and None,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
