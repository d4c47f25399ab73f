"""Result files of benchmarks, with the machine, the versions and the commit that they belong to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embq.core import benchmark_record
from embq.core.benchmark_record import machine

__all__ = ["RESULTS", "machine", "table", "write"]

RESULTS = Path(os.environ.get("BENCH_RESULTS") or Path(__file__).parents[1] / "build" / "bench")
"""Folder that benchmarks write to. bench/results has the figures that the documentation quotes, and tests compare them:
a benchmark writes there only where it is told to keep its result."""


def write(name: str, figures: Mapping[str, Any]) -> Path:
    """Write the figures of one benchmark to its result file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    return benchmark_record.write(RESULTS / f"{name}.json", benchmark_record.described(name, figures))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print figures in columns."""
    print(benchmark_record.table(header, rows))
