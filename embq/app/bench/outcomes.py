"""Conditions of an experiment, their outcomes, and what follows from these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.app.bench.services import Model, Replicate, WorkerSet
from embq.app.bench.statistics import Measured, days_for, number, significant, together


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One configuration that an experiment measures.

    Attributes:
        name: unique among the conditions of an experiment.
        unit_size: records per unit.
        grain: records of a replicate are a multiple of this; 0 for two units per worker process.
    """

    name: str
    worker_set: WorkerSet
    unit_size: int
    grain: int = 0

    @property
    def least(self) -> int:
        """Smallest replicate in which every worker process has work; replicates are a multiple of it."""
        return self.grain or 2 * self.unit_size * self.worker_set.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements of one condition.

    Attributes:
        model: the measured one.
        load_s: time of the slowest worker process to load the model; not part of any other figure.
        device_names: device -> product name.
    """

    condition: Condition
    model: Model
    replicates: tuple[Replicate, ...]
    load_s: float
    device_names: dict[str, str]

    @property
    def rate(self) -> Measured:
        """Records per second."""
        return Measured.of([replicate.rate for replicate in self.replicates])

    @property
    def busy(self) -> Measured:
        """Fraction of the time that devices computed, over all worker processes."""
        size = self.condition.worker_set.size
        return Measured.of([sum(s.busy_s for s in one.shares) / size / one.seconds for one in self.replicates])

    @property
    def memory_mb(self) -> Measured | None:
        """Megabytes of all worker processes together; None where that is not known."""
        known = [one.memory_mb for one in self.replicates if one.memory_mb is not None]
        return Measured.of(known) if known else None


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome with the highest mean rate."""
    return max(outcomes, key=lambda one: one.rate.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Rates of devices alone and together.

    Attributes:
        alone: device -> its rate alone, in records per second.
        devices: all of them, in the order of `shares`.
        rate: of all of them together.
        shares: fraction of the work that each did when all worked together.
    """

    alone: dict[str, Measured]
    devices: tuple[str, ...]
    rate: Measured
    shares: tuple[Measured, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Fleet:
        """The fleet of some outcomes: those of single devices, then that of all together."""
        *single, last = outcomes
        rows = [[share.rows for share in one.shares] for one in last.replicates]
        return cls(
            alone={one.condition.worker_set.devices[0]: one.rate for one in single},
            devices=tuple(share.device for share in last.replicates[0].shares),
            rate=last.rate,
            shares=tuple(
                Measured.of([mine / sum(run) for mine, run in zip(of_device, rows, strict=True)])
                for of_device in zip(*rows, strict=True)
            ),
        )

    @property
    def ideal(self) -> Measured:
        """The sum of the rates. Devices of one name are measured once, so that their errors add up linearly."""
        return together([rate.scaled(self.devices.count(device)) for device, rate in self.alone.items()])

    @property
    def equal(self) -> Measured:
        """The rate of an equal split, where all wait for the slowest device."""
        return min(self.alone.values(), key=lambda rate: rate.mean).scaled(len(self.devices))

    @property
    def rate_shares(self) -> list[float]:
        """Fraction of `ideal` of each device's rate."""
        return [self.alone[device].mean / self.ideal.mean for device in self.devices]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentResult:
    """The result of an experiment.

    Attributes:
        name: of the experiment, and of its files.
        header, rows: of the printed table.
        figures: JSON-ready, beyond what `of_condition` says of each condition.
        findings: conclusions from the figures, one sentence each.
        draw: writes the plot to a file; raises ModuleNotFoundError where matplotlib is not installed.
    """

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: dict[str, Any]
    findings: tuple[str, ...]
    draw: Callable[[Path], None]


def condition_figures(outcome: Outcome, corpus: int | None) -> dict[str, Any]:
    """The figures of one condition, JSON-ready."""
    records = sum(one.records for one in outcome.replicates)
    tokens, rows = (sum(getattr(s, name) for r in outcome.replicates for s in r.shares) for name in ("tokens", "rows"))
    memory = outcome.memory_mb
    return {
        "name": outcome.condition.name,
        "devices": list(outcome.condition.worker_set.devices),
        "device_names": outcome.device_names,
        "workers_per_device": outcome.condition.worker_set.per_device,
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
        **({} if corpus is None else {"days": days_for(corpus, outcome.rate).describe()}),
    }


def days_header(corpus: int | None) -> tuple[str, ...]:
    """The column of `days_cell`."""
    return () if corpus is None else (f"days for {corpus:,}",)


def days_cell(corpus: int | None, rate: Measured) -> tuple[str, ...]:
    """Days for a corpus of so many records; empty without one."""
    return () if corpus is None else (str(days_for(corpus, rate)),)


def days_sentences(outcome: Outcome, corpus: int | None) -> tuple[str, ...]:
    """The time for a corpus at the rate of one condition, as a sentence; empty without one."""
    if corpus is None:
        return ()
    days = days_for(corpus, outcome.rate)
    tokens = sum(share.tokens for one in outcome.replicates for share in one.shares)
    rows = sum(share.rows for one in outcome.replicates for share in one.shares)
    return (
        f"At the rate of {outcome.condition.name}, {outcome.rate} records/s, {corpus:,} records take {time_text(days)}"
        f", if they have {number(tokens / rows) if rows else '?'} tokens each, as these on average.",
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
