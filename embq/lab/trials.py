"""Measures the conditions of an experiment: worker sets and their runs in random order, after a warm-up."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from embq.core.errors import UsageError
from embq.core.service.progress_line import ProgressLine, duration
from embq.lab.outcomes import Condition, ConditionOutcome, Replicate, WorkerSet
from embq.lab.services import Services, Setup, services

WARM_UP_SHARE = 0.4
"""The warm-up ends with a run of this fraction of `Setup.seconds`: a shorter one does not give a speed."""
WARM_UP_GROWTH = 4
MOST_RECORDS = 5_000_000


def check_records(conditions: Sequence[Condition], setup: Setup) -> None:
    """Raise UsageError if --records is too small to keep the workers of every condition busy."""
    needed = max(condition.least for condition in conditions)
    if 0 < setup.records < needed:
        raise UsageError(
            f"--records {setup.records:,} are too few: every worker has units only from {needed:,} records on",
            next_step=f"give --records {needed:,} or more, or leave it out",
        )


def measure(
    conditions: Sequence[Condition], setup: Setup, progress: Progress, poll: Callable[[], None]
) -> list[ConditionOutcome]:
    """The outcomes of all conditions, in their order.

    Args:
        progress: shows the progress.
        poll: called repeatedly; an exception that it raises ends the experiment and all its processes.
    """
    chance = random.Random(setup.seed)
    worker_sets = list(dict.fromkeys(condition.worker_set for condition in conditions))
    chance.shuffle(worker_sets)
    measured: dict[Condition, ConditionOutcome] = {}
    with tempfile.TemporaryDirectory(prefix="embq-bench-", ignore_cleanup_errors=True) as folder:
        for number, worker_set in enumerate(worker_sets):
            inside = Path(folder) / f"worker_set-{number}"
            inside.mkdir()
            same_workers = [condition for condition in conditions if condition.worker_set == worker_set]
            measured |= _measure_set(worker_set, same_workers, setup, chance, inside, progress, poll)
    return [measured[condition] for condition in conditions]


def _measure_set(
    worker_set: WorkerSet,
    conditions: list[Condition],
    setup: Setup,
    chance: random.Random,
    folder: Path,
    progress: Progress,
    poll: Callable[[], None],
) -> dict[Condition, ConditionOutcome]:
    progress.begins(f"loading the model into {worker_set.size} worker process{'es' if worker_set.size > 1 else ''}")
    with services(folder, worker_set, setup, poll) as private:
        progress.begins("warming up")
        workers = private.workers()
        rate = _warm_up(private, conditions[0], setup)
        trials = [condition for condition in conditions for _ in range(setup.replicates)]
        chance.shuffle(trials)
        runs: dict[Condition, list[Replicate]] = {condition: [] for condition in conditions}
        for condition in trials:
            batches = rate * setup.seconds / condition.least
            count = condition.least * max(1, min(MOST_RECORDS // condition.least, math.ceil(batches - 0.5)))
            progress.begins_run(condition.name)
            runs[condition].append(private.measure(setup.records or count, unit_size=condition.unit_size))
            progress.ended(runs[condition][-1].rate)
    return {
        condition: ConditionOutcome(
            condition=condition,
            replicates=tuple(runs[condition]),
            load_s=max(float(beat.get("load_s", 0.0)) for beat in workers),
            device_names={str(beat["device"]): str(beat.get("device_name", "")) for beat in workers},
        )
        for condition in conditions
    }


def _warm_up(private: Services, condition: Condition, setup: Setup) -> float:
    """Records per second, measured by runs that grow until one is long enough."""
    unit_size = min(condition.unit_size, 16)
    count = 2 * condition.worker_set.size * unit_size
    while True:
        run = private.measure(count, unit_size=unit_size)
        enough = run.seconds >= WARM_UP_SHARE * setup.seconds or count * WARM_UP_GROWTH > MOST_RECORDS
        if enough or (setup.records and count >= setup.records):
            return run.rate
        count *= WARM_UP_GROWTH


class Progress:
    """Shows progress on stderr: a line for each measured run, with the time left by the runs so far.

    Args:
        line: shows what happens now, and keeps a line for each run.
        runs: to measure.
        clock: monotonic seconds.
    """

    def __init__(self, line: ProgressLine, runs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = line
        self._runs, self._done = runs, 0
        self._clock = clock
        self._started = clock()
        self._step, self._began, self._remaining = "", self._started, ""

    def begins(self, step: str) -> None:
        """A step starts: loading, warming up, or a run."""
        self._step, self._began = step, self._clock()
        self.update()

    def begins_run(self, condition: str) -> None:
        """A run of a condition starts."""
        self.begins(f"{condition}, run {self._done + 1} of {self._runs}")

    def ended(self, rate: float) -> None:
        """A run has ended."""
        self._done += 1
        left_s = (self._clock() - self._started) / self._done * (self._runs - self._done)
        self._remaining = f"; about {duration(left_s)} left" if self._done < self._runs else ""
        self._line.say(f"{self._step}: {rate:,.1f} records/s{self._remaining}")

    def update(self) -> None:
        """Update the shown time."""
        self._line.show(f"{self._step}, {self._clock() - self._began:.0f} s{self._remaining}")
