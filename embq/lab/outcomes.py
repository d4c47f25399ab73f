"""Conditions of an experiment, their outcomes, and figures derived from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embq.lab.statistics import Measured, UnitCost, days_for, number, significant, together, unit_cost

NO_DIFFERENCE = ", which is no difference beyond the deviations"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSet:
    """The worker processes of a condition: `per_device` on each of `devices`, named as in `--devices`."""

    devices: tuple[str, ...]
    per_device: int = 1

    @property
    def size(self) -> int:
        """Worker processes."""
        return len(self.devices) * self.per_device


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
class WorkerShare:
    """Work of one worker process in a run.

    Attributes:
        device: as `--devices` names it.
        rows: that its device embedded, also if another worker's copy of a unit was faster.
        tokens: of these.
        busy_s: seconds that the device had a batch in hand.
    """

    device: str
    rows: int
    tokens: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """One measured run.

    Attributes:
        records: of the input, equal to rows plus failures.
        failures: records without a row.
        seconds: from the start of the first unit to the last commit, by the broker's clock.
        shares: work of each worker process, in the order of the devices.
        memory_mb: of all worker processes together, after the run; None if unknown.
    """

    records: int
    failures: int
    seconds: float
    shares: tuple[WorkerShare, ...]
    memory_mb: float | None

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionOutcome:
    """The measurements of one condition.

    Attributes:
        load_s: time of the slowest worker process to load the model; not part of any other figure.
        device_names: device -> product name.
    """

    condition: Condition
    replicates: tuple[Replicate, ...]
    load_s: float
    device_names: dict[str, str]

    @property
    def rate(self) -> Measured:
        """Records per second."""
        return Measured.of([run.rate for run in self.replicates])

    @property
    def busy(self) -> Measured:
        """Fraction of the time that devices computed, over all worker processes."""
        size = self.condition.worker_set.size
        return Measured.of([sum(share.busy_s for share in run.shares) / size / run.seconds for run in self.replicates])

    @property
    def memory_mb(self) -> Measured | None:
        """Megabytes of all worker processes together; None if unknown."""
        measured = [run.memory_mb for run in self.replicates if run.memory_mb is not None]
        return Measured.of(measured) if measured else None

    @property
    def tokens_per_record(self) -> float | None:
        """Mean tokens of an embedded record; None without records."""
        shares = [share for run in self.replicates for share in run.shares]
        rows = sum(share.rows for share in shares)
        return sum(share.tokens for share in shares) / rows if rows else None


def best_of(outcomes: Sequence[ConditionOutcome]) -> ConditionOutcome:
    """The outcome with the highest mean rate."""
    return max(outcomes, key=lambda outcome: outcome.rate.mean)


def cost_of(outcomes: Sequence[ConditionOutcome]) -> UnitCost | None:
    """The cost of a unit, fitted to outcomes with several unit sizes."""
    return unit_cost([(outcome.condition.unit_size, run.rate) for outcome in outcomes for run in outcome.replicates])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Rates of devices alone and together.

    Attributes:
        single_rates: device -> its rate alone, in records per second.
        devices: all of them, in the order of `shares`.
        rate: of all of them together.
        shares: fraction of the work that each did when all worked together.
    """

    single_rates: dict[str, Measured]
    devices: tuple[str, ...]
    rate: Measured
    shares: tuple[Measured, ...]

    @classmethod
    def of(cls, outcomes: Sequence[ConditionOutcome]) -> Fleet:
        """The fleet of some outcomes: those of single devices, then that of all together."""
        *single, last = outcomes
        rows = [[share.rows for share in run.shares] for run in last.replicates]
        return cls(
            single_rates={outcome.condition.worker_set.devices[0]: outcome.rate for outcome in single},
            devices=tuple(share.device for share in last.replicates[0].shares),
            rate=last.rate,
            shares=tuple(map(Measured.of, zip(*([row / sum(run) for row in run] for run in rows), strict=True))),
        )

    @property
    def ideal(self) -> Measured:
        """The sum of the rates. Devices of one name are measured once, so that their errors add up linearly."""
        return together([rate.scaled(self.devices.count(device)) for device, rate in self.single_rates.items()])

    @property
    def equal(self) -> Measured:
        """The rate of an equal split, where all wait for the slowest device."""
        return min(self.single_rates.values(), key=lambda rate: rate.mean).scaled(len(self.devices))

    @property
    def rate_shares(self) -> list[float]:
        """Fraction of `ideal` of each device's rate."""
        return [self.single_rates[device].mean / self.ideal.mean for device in self.devices]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentResult:
    """The result of an experiment.

    Attributes:
        name: of the experiment, and of its files.
        columns: of the printed table, header -> cells.
        figures: JSON-ready, beyond those of each condition.
        findings: conclusions from the figures, one sentence each.
        title: of the plot, the main conclusion.
    """

    name: str
    outcomes: Sequence[ConditionOutcome]
    columns: dict[str, list[str]]
    figures: dict[str, Any]
    findings: tuple[str, ...]
    title: str


def condition_figures(outcome: ConditionOutcome, corpus: int | None) -> dict[str, Any]:
    """The figures of one condition, JSON-ready."""
    runs, condition, memory, tokens = (
        outcome.replicates,
        outcome.condition,
        outcome.memory_mb,
        outcome.tokens_per_record,
    )
    records = [run.records for run in runs]
    return {
        "name": condition.name,
        "devices": list(condition.worker_set.devices),
        "device_names": outcome.device_names,
        "workers_per_device": condition.worker_set.per_device,
        "unit_size": condition.unit_size,
        "records": records,
        "failures": sum(run.failures for run in runs),
        "embedded_twice": sum(share.rows for run in runs for share in run.shares) - sum(records),
        "seconds": [run.seconds for run in runs],
        "records_per_s": outcome.rate.describe(),
        "tokens_per_record": tokens and significant(tokens),
        "device_busy": outcome.busy.describe(),
        "memory_mb": memory and memory.describe(),
        "load_s": outcome.load_s,
        **({} if corpus is None else {"days": days_for(corpus, outcome.rate).describe()}),
    }


def days_column(corpus: int | None, rates: Sequence[Measured]) -> dict[str, list[str]]:
    """A column with the days for a corpus of this many records at each rate; none without a corpus."""
    return {} if corpus is None else {f"days for {corpus:,}": [str(days_for(corpus, rate)) for rate in rates]}


def days_sentences(outcome: ConditionOutcome, corpus: int | None) -> list[str]:
    """The time for a corpus at the rate of one condition, as a sentence; none without a corpus."""
    if corpus is None:
        return []
    tokens = outcome.tokens_per_record
    return [
        f"At the rate of {outcome.condition.name}, {outcome.rate} records/s, {corpus:,} records take "
        f"{time_text(days_for(corpus, outcome.rate))}, if they have {number(tokens) if tokens else '?'} tokens each, "
        "as these on average."
    ]


def time_text(days: Measured) -> str:
    """Days, or hours or minutes if they are few."""
    for unit, factor in (("days", 1.0), ("hours", 24.0)):
        if days.mean * factor >= 1:
            return f"{days.scaled(factor)} {unit}"
    return f"{days.scaled(24 * 60)} minutes"


def plural(count: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
