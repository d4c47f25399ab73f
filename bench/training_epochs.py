"""Trainings by `embq train classify` in two processes, with exact epochs and with resampled ones."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from embq.training.shards.shard_set import Shards

ARCH = "timm:test_resnet"
"""Made for tests: a step takes hardly longer than its samples."""

EPOCHS, PROCESSES = 3, 2


def one_training(shards: Shards, out: Path, kind: str) -> float:
    """Samples per second of both processes together, median of all epochs but the first, in which all is cold."""
    flags = ["--model", ARCH, "--epochs", EPOCHS, "--batch-size", 32, "--image-size", 96, "--workers", 1]
    flags += ["--num-devices", PROCESSES, "--device", "cpu", "--lr", 0.01, "--output", out]
    flags += ["--splitshards"] if kind == "exact" else []
    folder = str(Path(shards.urls[0]).parent)
    command = [sys.executable, "-m", "embq", "train", "classify", folder, *map(str, flags)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    rates = [line["samples_per_s"] for line in lines if line["kind"] == "epoch"]
    if len(rates) != EPOCHS:
        raise AssertionError(f"{len(rates)} of {EPOCHS} epochs were trained")
    return float(statistics.median(rates[1:]))
