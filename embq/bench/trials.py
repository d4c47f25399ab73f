"""Measures conditions: crews in shuffled order, their runs shuffled as well, and all of it warm before the first."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import UsageError
from embq.bench.progress import Course
from embq.bench.services import Crew, Model, Replicate, Services
from embq.bench.statistics import Measured, days_for, number, significant
from embq.bench.texts import write_records


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


WARM_UP_SHARE = 0.4
"""The warm-up goes on until a run has taken this part of `Setup.seconds`: a shorter one tells no speed."""
GROWTH = 4
"""From one run of the warm-up to the next; a slow device is done with the first."""
MOST_RECORDS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What is compared with what.

    Attributes:
        name: unique among the conditions of an experiment.
        unit_size: records per unit.
        grain: records of a replicate are a multiple of this; 0 takes two units for each worker process.
    """

    name: str
    crew: Crew
    unit_size: int
    grain: int = 0

    @property
    def least(self) -> int:
        """Records of which a replicate is a multiple: then every worker process has work."""
        return self.grain or 2 * self.unit_size * self.crew.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an experiment is done.

    Attributes:
        texts: that are embedded, in turn.
        records: of each replicate; 0 takes as many as `seconds` allow, by the speed of the warm-up.
        seconds: that a replicate takes, about.
        replicates: of each condition.
        seed: of the order of conditions.
    """

    model: Model
    texts: Sequence[str]
    records: int
    seconds: float
    replicates: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured of one condition.

    Attributes:
        model: that was measured.
        load_s: what the slowest of its worker processes needed to load the model; part of no other figure.
        device_names: device -> what its maker calls it.
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
        """Part of the time in which a device had a batch in hand, over all worker processes."""
        size = self.condition.crew.size
        return Measured.of([sum(s.busy_s for s in one.shares) / size / one.seconds for one in self.replicates])

    @property
    def memory_mb(self) -> Measured | None:
        """Megabytes of all worker processes together; None where that is not known."""
        known = [one.memory_mb for one in self.replicates if one.memory_mb is not None]
        return Measured.of(known) if known else None


def check_records(conditions: Sequence[Condition], setup: Setup) -> None:
    """Raise UsageError where the records asked for are too few to keep the workers of every condition busy."""
    needed = max(condition.least for condition in conditions)
    if 0 < setup.records < needed:
        raise UsageError(
            f"--records {setup.records:,} are too few: every worker has units to do only from {needed:,} records on",
            next_step=f"give --records {needed:,} or more, or leave it out",
        )


def measure(conditions: Sequence[Condition], setup: Setup, course: Course, look: Callable[[], None]) -> list[Outcome]:
    """The outcomes of all conditions, in their order.

    Args:
        course: is told what goes on.
        look: called again and again; what it raises ends everything, and all processes with it.
    """
    chance = random.Random(setup.seed)
    crews = list(dict.fromkeys(condition.crew for condition in conditions))
    chance.shuffle(crews)
    measured: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="embq-bench-", ignore_cleanup_errors=True) as folder:
        for number, crew in enumerate(crews):
            mine = [condition for condition in conditions if condition.crew == crew]
            inside = Path(folder) / f"crew-{number}"
            inside.mkdir()
            measured |= _measure_crew(crew, mine, setup, chance, inside, course, look)
    return [measured[condition.name] for condition in conditions]


def _measure_crew(
    crew: Crew,
    conditions: list[Condition],
    setup: Setup,
    chance: random.Random,
    folder: Path,
    course: Course,
    look: Callable[[], None],
) -> dict[str, Outcome]:
    course.loading(crew.size)
    keeper = write_records(folder, setup.texts, 1)
    with Services(folder, crew, setup.model, keeper=keeper, look=look) as services:
        course.loaded(crew.size)
        rate = _warm_up(services, conditions[0], setup, folder)
        trials = [(condition, i) for condition in conditions for i in range(setup.replicates)]
        chance.shuffle(trials)
        found: dict[str, list[Replicate]] = {condition.name: [] for condition in conditions}
        for condition, _ in trials:
            count = setup.records or _count(rate * setup.seconds, condition.least)
            course.begins(condition.name)
            records = write_records(folder, setup.texts, count)
            found[condition.name].append(services.measure(records, unit_size=condition.unit_size))
            course.ended(found[condition.name][-1].rate)
        return {
            condition.name: Outcome(
                condition=condition,
                model=setup.model,
                replicates=tuple(found[condition.name]),
                load_s=services.load_s,
                device_names=services.device_names,
            )
            for condition in conditions
        }


def _warm_up(services: Services, condition: Condition, setup: Setup, folder: Path) -> float:
    """Records per second, of runs that grow until one is long enough to tell."""
    count = 2 * services.crew.size * min(condition.unit_size, 16)
    while True:
        took = services.measure(write_records(folder, setup.texts, count), unit_size=min(condition.unit_size, 16))
        enough = took.seconds >= WARM_UP_SHARE * setup.seconds or count * GROWTH > MOST_RECORDS
        if enough or (setup.records and count >= setup.records):
            return took.rate
        count *= GROWTH


def _count(wanted: float, grain: int) -> int:
    """The multiple of `grain` next to what is wanted, at least one of it."""
    return grain * max(1, min(MOST_RECORDS // grain, math.ceil(wanted / grain - 0.5)))
