"""`embq run` over texts, as a user starts it: its time, its vectors, and what its processes took of the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.runs import watched
from embq.core.run.reader import row_tables

LOOK_S = 0.5
SERVICES = {"embq.worker.process": "worker", "producer": "producer", "writer": "writer", "worker": "supervisor"}
LIMIT_S = 400


def run(
    source: Path, folder: Path, keys: list[str], precision: str, model: str = "minilm"
) -> tuple[np.ndarray, dict[str, Any]]:
    """The vectors in the order of `keys`, shape (keys, dim) in float32, and {"seconds", "cpu_s", "busy", "padding"}.

    `seconds` are those of `embq status`: from the first batch to the last commit. Raises RuntimeError with what the
    command said where it fails.
    """
    output, trace = folder / "out", folder / "trace"
    command = ["-m", "embq", "run", source, "--output", output, "--model", model, "--precision", precision]
    command += ["--dtype", "float32", "--devices", "cpu", "--json"]
    environment = {**os.environ, "EMBQ_TRACE": str(trace)}
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        meter = CpuMeter()
        with watched(process.pid, LOOK_S, meter.look):
            said, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise RuntimeError(errors.strip() or said.strip())
    status = json.loads(said)
    assert status["rows"] == len(keys), status
    passes = [json.loads(line) for path in trace.iterdir() for line in path.read_text().splitlines()]
    seconds = status["timing"]["embed_s"]
    figures = {
        "seconds": seconds,
        "cpu_s": meter.spent(since=min(one["began"] for one in passes)),
        "busy": round(sum(one["ended"] - one["began"] for one in passes) / seconds, 3),
        "passes": len(passes),
        "tokens": sum(one["tokens"] for one in passes),
    }
    return vectors_of(output, keys), figures


def vectors_of(output: Path, keys: list[str]) -> np.ndarray:
    """The committed vector of each key; every key is there once and there are no others."""
    found: dict[str, np.ndarray] = {}
    for table in row_tables(output, ["key", "embedding"]):
        for key, vector in zip(table["key"].to_pylist(), table["embedding"].to_pylist(), strict=True):
            assert key not in found, key
            found[key] = np.asarray(vector, dtype=np.float32)
    assert sorted(found) == sorted(keys)
    return np.stack([found[key] for key in keys])


class CpuMeter:
    """CPU seconds of a process and all its descendants, by service, over time."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, float]]] = {}

    def spent(self, *, since: float) -> dict[str, float]:
        """Service -> CPU seconds since that time (Unix seconds)."""
        found = {}
        for service, looks in self._seen.items():
            before = [cpu for at, cpu in looks if at <= since]
            found[service] = round(looks[-1][1] - (before[-1] if before else 0.0), 2)
        return found

    def look(self, processes: list[psutil.Process]) -> None:
        """Take one look."""
        now = time.time()
        for process in processes:
            with suppress(psutil.Error):  # it has just ended
                times, words = process.cpu_times(), process.cmdline()
                if words:
                    self._seen.setdefault(_service(words), []).append((now, times.user + times.system))


def _service(words: list[str]) -> str:
    """Service that a command line starts."""
    if "-m" not in words:
        return "broker"
    module, *arguments = words[words.index("-m") + 1 :]
    return SERVICES.get(module, SERVICES.get(arguments[0], "session") if arguments else "session")
