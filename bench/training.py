"""Samples that reach a training step, beside webdataset's loader on the same shards; exact epochs and resampled ones.

    python -m bench.training [SAMPLES] [ROUNDS]

Shards hold photographs of 500x375 with the numbers of their classes, as ImageNet's are on average. Both loaders read
them whole, shuffle in a buffer of 1,000, crop at random to 224, flip, normalise, and give batches of 64: into nothing,
and into a step of a tiny model. They take turns, and who is first changes. What a sample costs in each stage names the
bottleneck, and what a picture costs in other ways stands beside it. Exact and resampled epochs are trained by
`embq train classify` in two processes, in turns too.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.report import table, write
from bench.training_epochs import one_training
from bench.training_loaders import LOADERS, STEPS, rate
from bench.training_pictures import ways
from bench.training_set import training_set
from bench.training_stages import costs
from embq.core.process.limits import cores
from embq.training.shards.shard_set import Shards, open_shards

SAMPLES, ROUNDS = 2_400, 5
LOADER_WORKERS = (1, 2)
BAR_LOADER, BAR_EXACT = 1.0, 0.95
"""At least as fast as webdataset's own; exact epochs at most 5 % slower than resampled ones."""


def main() -> None:
    """Measure, print and write."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else SAMPLES
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        shards = open_shards(str(training_set(Path(folder) / "shards", samples)))
        loaders = [compared(shards, step, workers, rounds) for step in STEPS for workers in LOADER_WORKERS]
        stages = costs(shards)
        pictures = ways()
        epochs = exact_beside_resampled(shards, Path(folder), rounds)
    table(list(loaders[0]), [list(row.values()) for row in loaders])
    table(list(pictures[0]), [list(row.values()) for row in pictures])
    table(["stage", "us of a sample"], list(stages["us"].items()))
    table(list(epochs), [list(epochs.values())])
    print(f"median of {rounds} rounds, then the lowest and the highest; load average at the start {load:.2f}")
    slower = [f"{row['into']}, {row['loader_workers']} workers" for row in loaders if row["times"] < BAR_LOADER]
    print("as fast as webdataset's own: " + (f"MISSED: {'; '.join(slower)}" if slower else "held"))
    print("exact epochs within 5 % of resampled: " + ("held" if epochs["times"] >= BAR_EXACT else "MISSED"))
    versions = {name: version(name) for name in ("webdataset", "torch", "torchvision", "pillow")}
    figures = {
        "loaders": loaders,
        "stages": stages,
        "pictures": pictures,
        "epochs": epochs,
        "samples": samples,
        "rounds": rounds,
    }
    about = {"bars": [BAR_LOADER, BAR_EXACT], "cores": cores(), "versions": versions, "load_average": round(load, 2)}
    print("wrote", write("training", figures | about))


def compared(shards: Shards, step: str, workers: int, rounds: int) -> dict[str, Any]:
    """Samples per second of both loaders, and how many times the one is the other."""
    rates: dict[str, list[float]] = {who: [] for who in LOADERS}
    for number in range(rounds):
        for who in list(LOADERS)[:: 1 if number % 2 else -1]:
            rates[who].append(rate(who, step, shards, workers, epoch=number))
    times = [one / other for one, other in zip(*rates.values(), strict=True)]
    row: dict[str, Any] = {"into": step, "loader_workers": workers}
    for who, measured in rates.items():
        row |= {f"{who}_per_s": round(statistics.median(measured)), f"{who}_spread": spread(measured, 0)}
    return row | {"times": round(statistics.median(times), 2), "times_spread": spread(times, 2)}


def exact_beside_resampled(shards: Shards, folder: Path, rounds: int) -> dict[str, Any]:
    """Samples per second of both kinds of epochs, of two processes together."""
    rates: dict[str, list[float]] = {"exact": [], "resampled": []}
    for number in range(rounds):
        for kind in list(rates)[:: 1 if number % 2 else -1]:
            rates[kind].append(one_training(shards, folder / f"{kind}-{number}", kind))
    times = [exact / resampled for exact, resampled in zip(*rates.values(), strict=True)]
    told = {f"{kind}_per_s": round(statistics.median(measured), 1) for kind, measured in rates.items()}
    spreads = {f"{kind}_spread": spread(measured, 1) for kind, measured in rates.items()}
    return told | spreads | {"times": round(statistics.median(times), 3), "times_spread": spread(times, 3)}


def spread(values: Sequence[float], digits: int) -> list[float]:
    """The lowest and the highest."""
    return [round(min(values), digits), round(max(values), digits)]


if __name__ == "__main__":
    main()
