"""The price of losing nothing: a run beside the same pipeline with the leases off, in turns on one machine.

    python -m bench.price [ROUNDS]

Both embed the same units of the same texts with the stub, whose simulated device only waits, and write the same parts:
once as `embq run` starts them, with broker, hints, leases, heartbeats, supervisor and status; and once as in
`bench.bare`, which has none of these. What is compared is the time from the reader's first unit to the last commit;
starting processes and loading the model are apart. Where a device is the limit, the price is to be at most 3 % of the
run's time. Without device time both are limited by the two processes that read and write, and on a machine with few
cores everything else takes its share from them: that figure is the price for a device that takes no time at all.

The order of the two changes from round to round; the price is the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import table, write
from bench.runs import write_texts

ROUNDS = 5
BAR = 0.03
DIM = 384


@dataclass(frozen=True, slots=True)
class Case:
    """Units of one size on a device of one speed. `bar` says whether a device is the limit, and so the bar holds."""

    name: str
    unit_samples: int
    units: int
    ms_per_sample: float
    bar: bool

    @property
    def samples(self) -> int:
        return self.unit_samples * self.units

    @property
    def model(self) -> str:
        return f"stub:{DIM}?ms_per_sample={self.ms_per_sample:g}"


CASES = (
    Case("device, units of 1 s", 1000, 20, 1.0, bar=True),
    Case("device, units of 0.1 s", 100, 200, 1.0, bar=True),
    Case("no device time", 1000, 300, 0.0, bar=False),
)


def main() -> None:
    """Measure, print and write."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        figures = [measure(Path(folder), case, rounds) for case in CASES]
    table(list(figures[0]), [list(row.values()) for row in figures])
    print(f"median of {rounds} rounds; load average at the start {load:.2f}")
    missed = [row["case"] for case, row in zip(CASES, figures, strict=True) if case.bar and row["price"] > BAR]
    print(
        f"at most {BAR:.0%} where the device is the limit: " + (f"MISSED by {', '.join(missed)}" if missed else "held")
    )
    print("wrote", write("price", {"rows": figures, "rounds": rounds, "bar": BAR, "load_average": round(load, 2)}))


def measure(folder: Path, case: Case, rounds: int) -> dict[str, Any]:
    """The two in turns: their seconds, the price of the one over the other, and how far the rounds are apart."""
    source = write_texts(folder / f"{case.samples}.jsonl", case.samples)
    seconds: dict[str, list[float]] = {"bare": [], "run": []}
    for number in range(rounds):
        for who in ("bare", "run") if number % 2 == 0 else ("run", "bare"):
            seconds[who].append(_embed_s(who, case, source, folder / f"out-{who}"))
    ratios = [run / bare - 1 for run, bare in zip(seconds["run"], seconds["bare"], strict=True)]
    bare, run = statistics.median(seconds["bare"]), statistics.median(seconds["run"])
    return {
        "case": case.name,
        "units": case.units,
        "bare_s": round(bare, 3),
        "run_s": round(run, 3),
        "price": round(statistics.median(ratios), 4),
        "lowest": round(min(ratios), 4),
        "highest": round(max(ratios), 4),
        "ms_per_unit": round((run - bare) * 1000 / case.units, 2),
        "bare_spread": round((max(seconds["bare"]) - min(seconds["bare"])) / bare, 4),
    }


def _embed_s(who: str, case: Case, source: Path, output: Path) -> float:
    """Seconds from the first unit to the last commit."""
    if who == "bare":
        command = ["-m", "bench.bare", source, output, case.model, case.unit_samples]
    else:
        command = ["-m", "embq", "run", source, "--output", output, "--model", case.model]
        command += ["--unit-size", case.unit_samples, "--devices", "cpu", "--json"]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=True, timeout=600)
    status = json.loads(done.stdout)
    subprocess.run(["rm", "-r", str(output)], check=True)
    assert status["rows"] == case.samples, status
    seconds: float = status["embed_s"] if who == "bare" else status["timing"]["embed_s"]
    return seconds


if __name__ == "__main__":
    main()
