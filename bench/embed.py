"""`embq.embed` beside `embq run` and sentence-transformers' `encode`: short texts on the CPU.

    python -m bench.embed [TEXTS]

TEXTS (10,000) are the first lines of docstrings, the same for all, each contender in fresh processes, in turns. The
time is that after the model is loaded: of `embq run` from the first batch to the last commit.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.report import table, write
from bench.text_peers import DEFAULT, WARM_UP, encode, texts_of
from bench.text_run import run
from examples.demo.collect import docstrings

TEXTS, CHARS = 10_000, 120
ROUNDS = 3
RUN_BAR, ENCODE_BAR = 0.97, 1.5
"""Least rate of `embq.embed`, as a multiple of those of `embq run` and of `encode`."""
EQUALITY = 1e-5


def main() -> int:
    """Measure, print a table and write the figures; 1 where vectors differ."""
    if sys.argv[1:2] == ["one"]:
        return one(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TEXTS
    seconds: dict[str, list[float]] = {"embed": [], "run": [], "encode": []}
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
        folder = Path(name)
        source = written(folder / "texts.jsonl", count)
        keys = [str(number) for number in range(count)]
        vectors: dict[str, np.ndarray] = {}
        for number in range(ROUNDS):
            order = list(seconds) if number % 2 == 0 else list(reversed(seconds))
            for who in order:
                if who == "run":
                    vectors[who], figures = run(source, new(folder / f"{number}"), keys, "fp32")
                    seconds[who].append(figures["seconds"])
                else:
                    command = [sys.executable, "-m", "bench.embed", "one", who, str(source), str(folder / "v.npy")]
                    seconds[who].append(json.loads(subprocess.check_output(command))["seconds"])
                    vectors[who] = np.load(folder / "v.npy")
    worst = max(float(np.abs(vectors["embed"] - vectors[who]).max()) for who in ("run", "encode"))
    rates = {who: count / statistics.median(all_of) for who, all_of in seconds.items()}
    rows = [
        ("embq.embed", f"{rates['embed']:,.0f}", "", ""),
        ("embq run", f"{rates['run']:,.0f}", f"{rates['embed'] / rates['run']:.3f}", f">= {RUN_BAR}"),
        ("encode", f"{rates['encode']:,.0f}", f"{rates['embed'] / rates['encode']:.2f}", f">= {ENCODE_BAR}"),
    ]
    table(("", "texts/s", "embq.embed is", "bar"), rows)
    write("embed", {"texts": count, "seconds": seconds, "rates": rates, "largest_difference": worst})
    return int(worst > EQUALITY)


def one(who: str, source: Path, output: Path) -> int:
    """One measurement in this process."""
    texts = texts_of(source)
    if who == "encode":
        vectors, seconds = encode(texts, DEFAULT, "float32")
    else:
        import embq

        model = embq.Model("minilm", device="cpu", precision="fp32")
        model.encode(texts[:WARM_UP])
        began = time.perf_counter()
        vectors = embq.embed(texts, model)
        seconds = time.perf_counter() - began
    np.save(output, vectors)
    sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")
    return 0


def written(path: Path, count: int) -> Path:
    """So many short texts as JSON lines."""
    lines = [line.strip() for _, text in docstrings(count) for line in text.splitlines()]
    lines = [line[:CHARS] for line in lines if len(line) > CHARS // 4]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps({"id": str(number), "text": lines[number % len(lines)]}) + "\n")
    return path


def new(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
