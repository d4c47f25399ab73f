"""Measures the conditions of an experiment: worker sets and their runs in random order, after a warm-up."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from embq.app.bench.outcomes import Condition, Outcome
from embq.app.bench.services import Model, Replicate, Services, WorkerSet
from embq.app.bench.texts import write_records
from embq.core.errors import UsageError
from embq.core.process.limits import cores
from embq.core.service.progress_line import ProgressLine, duration

WARM_UP_SHARE = 0.4
"""The warm-up ends with a run of this fraction of `Setup.seconds`: a shorter one does not give a speed."""


GROWTH = 4
"""Growth of the runs of the warm-up."""


MOST_RECORDS = 5_000_000

BETWEEN_S = 1.5
"""Assumed seconds between two runs, before any was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of an experiment.

    Attributes:
        texts: to embed, in turn.
        records: of each replicate; 0 for as many as fit in `seconds`, by the speed of the warm-up.
        seconds: approximate duration of a replicate.
        replicates: of each condition.
        seed: of the order of conditions.
    """

    model: Model
    texts: Sequence[str]
    records: int
    seconds: float
    replicates: int
    seed: int


def check_records(conditions: Sequence[Condition], setup: Setup) -> None:
    """Raise UsageError where --records is too small to keep the workers of every condition busy."""
    needed = max(condition.least for condition in conditions)
    if 0 < setup.records < needed:
        raise UsageError(
            f"--records {setup.records:,} are too few: every worker has units only from {needed:,} records on",
            next_step=f"give --records {needed:,} or more, or leave it out",
        )


def measure(
    conditions: Sequence[Condition], setup: Setup, progress: Progress, poll: Callable[[], None]
) -> list[Outcome]:
    """The outcomes of all conditions, in their order.

    Args:
        progress: shows the progress.
        poll: called repeatedly; an exception that it raises ends the experiment and all its processes.
    """
    chance = random.Random(setup.seed)
    worker_sets = list(dict.fromkeys(condition.worker_set for condition in conditions))
    chance.shuffle(worker_sets)
    measured: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="embq-bench-", ignore_cleanup_errors=True) as folder:
        for number, worker_set in enumerate(worker_sets):
            mine = [condition for condition in conditions if condition.worker_set == worker_set]
            inside = Path(folder) / f"worker_set-{number}"
            inside.mkdir()
            measured |= _measure_set(worker_set, mine, setup, chance, inside, progress, poll)
    return [measured[condition.name] for condition in conditions]


def _measure_set(
    worker_set: WorkerSet,
    conditions: list[Condition],
    setup: Setup,
    chance: random.Random,
    folder: Path,
    progress: Progress,
    poll: Callable[[], None],
) -> dict[str, Outcome]:
    progress.loading(worker_set.size)
    keeper = write_records(folder, setup.texts, 1)
    with Services(folder, worker_set, setup.model, keeper=keeper, poll=poll) as services:
        progress.loaded(worker_set.size)
        rate = _warm_up(services, conditions[0], setup, folder)
        trials = [(condition, i) for condition in conditions for i in range(setup.replicates)]
        chance.shuffle(trials)
        found: dict[str, list[Replicate]] = {condition.name: [] for condition in conditions}
        for condition, _ in trials:
            count = setup.records or _count(rate * setup.seconds, condition.least)
            progress.begins(condition.name)
            records = write_records(folder, setup.texts, count)
            found[condition.name].append(services.measure(records, unit_size=condition.unit_size))
            progress.ended(found[condition.name][-1].rate)
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
    """Records per second, measured by runs that grow until one is long enough."""
    count = 2 * services.worker_set.size * min(condition.unit_size, 16)
    while True:
        took = services.measure(write_records(folder, setup.texts, count), unit_size=min(condition.unit_size, 16))
        enough = took.seconds >= WARM_UP_SHARE * setup.seconds or count * GROWTH > MOST_RECORDS
        if enough or (setup.records and count >= setup.records):
            return took.rate
        count *= GROWTH


def _count(wanted: float, grain: int) -> int:
    """The multiple of `grain` nearest to `wanted`, at least one."""
    return grain * max(1, min(MOST_RECORDS // grain, math.ceil(wanted / grain - 0.5)))


# --- progress ---


class Progress:
    """Shows progress on stderr: a line for each measured run, with the time left.

    The time left is known once the first worker set is loaded, estimated from the durations so far.

    Args:
        worker_sets: processes of each worker set that will be loaded.
        runs: to measure.
        seconds: assumed duration of a run, before any was measured.
        stream: stderr by default.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        worker_sets: list[int],
        runs: int,
        seconds: float,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runs = runs
        self.done = 0
        self._sets = list(worker_sets)
        self._seconds = seconds
        self._clock = clock
        self._line = ProgressLine(every_s=math.inf, stream=stream)
        self._now = ""
        self._at = clock()
        self._load_s: list[float] = []
        self._run_s: list[float] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def loading(self, processes: int) -> None:
        """The model is loading in this many worker processes."""
        self._next(f"loading the model into {processes} worker process{'es' if processes > 1 else ''}")

    def loaded(self, processes: int) -> None:
        """The model is loaded; the warm-up starts."""
        self._sets.remove(processes)
        self._load_s.append((self._clock() - self._at) / _rounds(processes))
        self._next("warming up")

    def begins(self, condition: str) -> None:
        """A run of a condition starts."""
        self._next(f"{condition}, run {self.done + 1} of {self.runs}")

    def ended(self, rate: float) -> None:
        """A run has ended."""
        self.done += 1
        self._run_s.append(self._clock() - self._at)
        left = f"; about {duration(self.left_s() or 0.0)} left" if self.done < self.runs else ""
        self._line.say(f"{self._now}: {rate:,.1f} records/s{left}")

    def left_s(self) -> float | None:
        """Seconds until the end; None before the first load."""
        if not self._load_s:
            return None
        load = sum(self._load_s) / len(self._load_s)
        run = sum(self._run_s) / len(self._run_s) if self._run_s else self._seconds + BETWEEN_S
        # A worker set is loaded, and warmed up for about half a run.
        return sum(load * _rounds(size) + run / 2 for size in self._sets) + (self.runs - self.done) * run

    def update(self) -> None:
        """Update the shown time."""
        left = self.left_s()
        about = f"; about {duration(left)} left" if left is not None else ""
        self._line.show(f"{self._now}, {self._clock() - self._at:.0f} s{about}")

    def _next(self, what: str) -> None:
        self._now, self._at = what, self._clock()
        self.update()


def _rounds(processes: int) -> int:
    """Factor by which this many processes load slower than one: they share the cores."""
    return math.ceil(processes / cores())
