"""Texts on a CPU: `embq run` beside sentence-transformers and Ray Data, with the same model, texts and vectors.

    python -m bench.text [TEXTS] [RESULTS]

Embeds TEXTS (5,000) docstrings of the standard library with `minilm`, each time in fresh processes. What is compared is
the time after the model is loaded: of `embq run` from the first batch to the last commit, of the others as told in
`bench.text_peers` and `bench.text_ray`. `encode` and the precisions come at the beginning and, the other way round, at
the end, with the others between them, so that a machine that drifts does so for all; the loop, which is to show a few
hundredths, comes three times beside fp32. Figures are medians.

The vectors must be the same: each of the 5,000 of fp32 within 1e-5 of those of `encode`, or the benchmark ends with
status 1. At the end come the CPU seconds of each service, and profiles of where those of the passes go
(`bench.text_profile`).
Ray Data is measured where `make bench-text` has put it, in .venv-bench.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import table, write
from bench.text_peers import DEFAULT, SMALL
from bench.text_plot import plot
from bench.text_profile import flop
from bench.text_run import run
from embq.core.models import PRECISIONS
from embq.worker.supervisor.slot import KEPT_MEMORY
from examples.demo.collect import docstrings

TEXTS = 5_000
LIMIT_S = 400
ROOT = Path(__file__).parent.parent
RAY = ROOT / ".venv-bench" / "bin" / "python"
PEERS = (sys.executable, "-m", "bench.text_peers")
ORDER = (
    *("encode", "fp32", "loop", "bf16", "int8", "pool", "ray", "loop", "fp32", "encode-8", "pool-8", "ray-8"),
    *("encode-bf16", "int8", "bf16", "loop", "fp32", "encode"),
)
"""A precision is `embq run` in it, the others are peers."""
EVERY = {"encode-8": 5, "pool-8": 5, "ray-8": 5, "encode-bf16": 5}
RAYS = {"ray": DEFAULT, "ray-8": SMALL}
"""Peers without a bar embed only every fifth text, and their seconds are told for all."""
EQUALITY = 1e-5
COSINES = {"fp32": 0.9999, "bf16": 0.999, "int8": 0.99}
"""Least cosine of any of the vectors to that of `encode`."""
BARS = (
    *(("encode", "fp32", 1.5), ("encode", "bf16", 2.7), ("encode", "int8", 4.0)),
    *(("pool", "fp32", 1.5), ("ray", "fp32", 1.5), ("loop", "fp32", 0.95)),
    *(("encode-8", "fp32", None), ("pool-8", "fp32", None), ("ray-8", "fp32", None), ("encode-bf16", "bf16", None)),
)
"""Peers that `embq run` is compared with in each precision, and how many times faster it is to be."""
NAMES = {
    "encode": "sentence-transformers encode",
    "encode-8": "encode, batch_size=8",
    "encode-bf16": "encode in bf16",
    "pool": "encode with its pool of 2 processes",
    "pool-8": "the pool, batch_size=8",
    "ray": "Ray Data map_batches, 2 actors",
    "ray-8": "Ray Data, batch_size=8",
    "loop": "the worker's loop without queue and writer",
}


def main() -> int:
    """Measure, print, write and plot; 1 where the vectors of fp32 are others than those of sentence-transformers."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TEXTS
    name = sys.argv[2] if len(sys.argv) > 2 else "text"
    load = os.getloadavg()[0]
    found = docstrings(count)
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        source = Path(folder) / "docstrings.jsonl"
        source.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in found))
        measured = Measured(Path(folder), source, [key for key, _ in found])
        for who in ORDER:
            measured.once(who)
        profiles = measured.profiles()
        utilisation = measured.utilisation(profiles)
    equal, same = measured.equal()
    ratios = measured.ratios()
    table(["vectors", "max abs difference", "min cosine", "bar", "held"], [list(one.values()) for one in equal])
    table(["embq run", "beside", "ratio", "lowest", "highest", "bar", "held"], [list(one.values()) for one in ratios])
    table(["embq run", "seconds", "core seconds of its services", "tokens"], [_services(one) for one in measured.runs])
    table(["forward passes", "where the time goes", "GFLOP/s", "of a large GEMM"], [_passes(one) for one in profiles])
    for line in measured.skipped:
        print("skipped:", line)
    figures = {
        "texts": len(found),
        "seconds": measured.seconds,
        "ratios": ratios,
        "vectors": equal,
        "runs": measured.runs,
        "profiles": profiles,
        "utilisation": utilisation,
        "skipped": sorted(measured.skipped),
        "load_average": round(load, 2),
    }
    print("end to end over a large GEMM's rate:", json.dumps(figures["utilisation"]))
    print("wrote", write(name, figures), "and", plot(ratios, profiles, name))
    if not same:
        print(f"fp32 is NOT EQUAL to sentence-transformers within {EQUALITY:g}", file=sys.stderr)
    return 0 if same else 1


class Measured:
    """Measurements so far.

    Args:
        folder: for what the measurements write.
        source: the texts.
        keys: theirs, in order.

    Attributes:
        seconds: who -> the seconds of each measurement.
        runs: what else each `embq run` told.
        vectors: who -> its vectors, in the order of the keys.
        skipped: what could not be measured here, and why.
    """

    def __init__(self, folder: Path, source: Path, keys: list[str]) -> None:
        self._folder = folder
        self._source = source
        self._keys = keys
        self.vectors: dict[str, np.ndarray] = {}
        self.seconds: dict[str, list[float]] = {}
        self.runs: list[dict[str, Any]] = []
        self.skipped: set[str] = set()

    def once(self, who: str) -> None:
        """One measurement."""
        seconds = self._run(who) if who in COSINES else self._peer(who)
        if seconds is not None:
            self.seconds.setdefault(who, []).append(round(seconds, 3))
            print(f"{who:<12} {seconds:7.2f} s  {len(self._keys) / seconds:7.1f} texts/s", flush=True)

    def _run(self, precision: str) -> float | None:
        if precision not in PRECISIONS:
            self.skipped.add(f"{precision}: this embq does not have it")
            return None
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            try:
                vectors, told = run(self._source, Path(folder), self._keys, precision)
            except RuntimeError as error:
                if precision == "fp32":
                    raise
                self.skipped.add(f"{precision}: {error}")
                return None
        self.vectors[precision] = vectors
        self.runs.append({"precision": precision, **told})
        return float(told["seconds"])

    def _peer(self, who: str) -> float | None:
        if who in RAYS and not RAY.exists():
            self.skipped.add("ray: no .venv-bench, which `make bench-text` makes")
            return None
        target = self._folder / f"{who}.npy"
        source = self._every(EVERY.get(who, 1))
        start = [str(RAY), "-m", "bench.text_ray", str(RAYS[who])] if who in RAYS else [*PEERS, who]
        command = [*start, str(source), str(target)]
        # The loop is that of a worker process, and gets what such a process gets.
        environment = {**os.environ, **(KEPT_MEMORY if who == "loop" else {})}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment, cwd=ROOT
        )
        if done.returncode:
            raise RuntimeError(f"{who}: {done.stderr[-2000:]}")
        told = json.loads(done.stdout.splitlines()[-1])
        if target.exists():
            self.vectors[who] = np.load(target)
        return float(told["seconds"]) * len(self._keys) / len(self._keys[:: EVERY.get(who, 1)])

    def _every(self, step: int) -> Path:
        """The first of every so many texts, as a file."""
        if step == 1:
            return self._source
        path = self._folder / f"every-{step}.jsonl"
        lines = self._source.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[::step]), encoding="utf-8")
        return path

    def equal(self) -> tuple[list[dict[str, Any]], bool]:
        """Distance of the vectors of each from those of `encode`, and whether those of fp32 are the same."""
        rows = []
        for who, vectors in self.vectors.items():
            if who == "encode":
                continue
            expected = self.vectors["encode"][:: EVERY.get(who, 1)]
            least = float(cosines(vectors, expected).min())
            worst = float(np.abs(vectors - expected).max())
            bar = COSINES.get(who)
            held = bar is None or (least >= bar and (who != "fp32" or worst <= EQUALITY))
            rows.append({"who": who, "max_abs": worst, "min_cosine": least, "bar": bar, "held": held})
        return rows, all(row["held"] for row in rows if row["who"] == "fp32")

    def ratios(self) -> list[dict[str, Any]]:
        """Ratio of each one's seconds to those of `embq run`."""
        rows = []
        for who, precision, bar in BARS:
            peer, ours = self.seconds.get(who), self.seconds.get(precision)
            if not peer or not ours:
                continue
            ratio = statistics.median(peer) / statistics.median(ours)
            rows.append(
                {
                    "precision": precision,
                    "beside": NAMES[who],
                    "ratio": round(ratio, 3),
                    "lowest": round(min(peer) / max(ours), 3),
                    "highest": round(max(peer) / min(ours), 3),
                    "bar": bar,
                    "held": "" if bar is None else "yes" if ratio >= bar else "MISSED",
                }
            )
        return rows

    def profiles(self) -> list[dict[str, Any]]:
        """Shares of the passes' time, of `encode` and in each precision that was measured."""
        found = []
        for who in ("encode", *(precision for precision in COSINES if precision in self.seconds)):
            command = [sys.executable, "-m", "bench.text_profile", who, str(self._source)]
            environment = {**os.environ, **KEPT_MEMORY}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environment, cwd=ROOT
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
        return found

    def utilisation(self, profiles: list[dict[str, Any]]) -> dict[str, float]:
        """Precision -> GFLOP/s of `embq run` end to end, over those of a large GEMM on all cores."""
        from bench.text_peers import model_of, texts_of

        tokenizer = model_of("float32").tokenizer
        ids = tokenizer(texts_of(self._source), truncation=True, max_length=256)["input_ids"] if profiles else []
        work = flop([len(one) for one in ids]) / 1e9
        return {
            one["who"]: round(work / statistics.median(self.seconds[one["who"]]) / one["gemm_gflops_all"], 3)
            for one in profiles
            if "gemm_gflops_all" in one
        }


def _services(run: Mapping[str, Any]) -> list[str]:
    spent = ", ".join(f"{service} {cpu_s:.1f}" for service, cpu_s in run["cpu_s"].items())
    return [run["precision"], f"{run['seconds']:.1f}", spent, f"{run['tokens']:,}"]


def _passes(one: Mapping[str, Any]) -> list[str]:
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in one["shares"].items())
    return [one["who"], shares, f"{one['gflops']:.0f}", f"{one['utilisation']:.0%}" if "utilisation" in one else ""]


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each row with the other's, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    found: np.ndarray = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return found


if __name__ == "__main__":
    sys.exit(main())
