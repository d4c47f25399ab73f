"""What an experiment found, in the shape that all three share: rows of a table, figures for a file, sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.experiments.statistics import Measured, days_for, number, significant
from embq.experiments.trials import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One experiment, done.

    Attributes:
        name: of the experiment, and of its files.
        header, rows: of the table.
        figures: JSON-ready, beyond what `of_condition` says of each condition.
        findings: sentences that follow from the figures alone.
        draw: draws the plot to a file; raises ModuleNotFoundError where matplotlib is not installed.
    """

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: dict[str, Any]
    findings: tuple[str, ...]
    draw: Callable[[Path], None]


def of_condition(outcome: Outcome, chunks: int) -> dict[str, Any]:
    """The figures of one condition, JSON-ready."""
    records = sum(one.records for one in outcome.replicates)
    tokens, rows = (sum(getattr(s, name) for r in outcome.replicates for s in r.shares) for name in ("tokens", "rows"))
    memory = outcome.memory_mb
    return {
        "name": outcome.condition.name,
        "devices": list(outcome.condition.crew.devices),
        "device_names": outcome.device_names,
        "workers_per_device": outcome.condition.crew.per_device,
        "unit_size": outcome.condition.unit_size,
        "records": [one.records for one in outcome.replicates],
        "failures": sum(one.failures for one in outcome.replicates),
        "embedded_twice": rows - records,
        "seconds": [one.seconds for one in outcome.replicates],
        "records_per_s": outcome.rate.describe(),
        "tokens_per_record": significant(tokens / rows) if rows else None,
        "device_busy": outcome.busy.describe(),
        "memory_mb": memory.describe() if memory is not None else None,
        "load_s": outcome.load_s,
        "days": days_for(chunks, outcome.rate).describe(),
    }


def days_sentence(outcome: Outcome, chunks: int) -> str:
    """How long a large corpus would take at the speed of one condition."""
    days = days_for(chunks, outcome.rate)
    tokens = sum(share.tokens for one in outcome.replicates for share in one.shares)
    rows = sum(share.rows for one in outcome.replicates for share in one.shares)
    return (
        f"At the rate of {outcome.condition.name}, {outcome.rate} records/s, {chunks:,} chunks take {time_text(days)}"
        f", if they have {number(tokens / rows) if rows else '?'} tokens each, as these records on average."
    )


def time_text(days: Measured) -> str:
    """Days, or hours or minutes where they are few."""
    for unit, factor in (("days", 1.0), ("hours", 24.0)):
        if days.mean * factor >= 1:
            return f"{days.scaled(factor)} {unit}"
    return f"{days.scaled(24 * 60)} minutes"


def names(texts: Sequence[str]) -> str:
    """a, b and c."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last
