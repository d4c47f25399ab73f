"""Decides which model a worker process serves, and for how long, by fair queueing among models.

Work of other kinds is scheduled as a model is, with a queue and a share of the workers' time of its own.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from embq.core.errors import EmbqError
from embq.core.models import ModelConfig
from embq.core.queue import hints
from embq.core.queue.fair_queue import VirtualTimes
from embq.core.queue.keys import TURNS, run_key
from embq.core.queue.other_work import OtherWork, announced
from embq.core.queue.runs import Backlog, RunRecord, active, is_over
from embq.core.queue.scripts import load_scripts
from embq.core.run.control import RunState
from embq.core.run.run_info import WorkerDefaults
from embq.core.service.log import Events

POLL_S = 0.3
IDLE_S = 1.0
"""After so long without a unit in hand or a hint, the scheduler is asked whether something else has work."""
REFUSED_RETRY_S, REFUSED_S = 10.0, 600.0
"""A refused run is claimed again after so long by a process that has its model loaded, and counts as work again after
so long: what it was refused for may be a value in the broker that any user can write, and that its writer mends."""
Work = ModelConfig | OtherWork
"""Work of a process: a model, or work of another kind, such as the build of an index. Each has a queue."""

log = Events("worker")


@dataclass(slots=True)
class Turn:
    """The right to serve a model, or work of another kind, for a while.

    Attributes:
        weight: of the runs that had work for it when the turn began.
        booked_s: device seconds that stand in the virtual times for it.
    """

    model: Work
    weight: int
    booked_s: float

    @property
    def name(self) -> str:
        """Name of what is served, for people."""
        return self.model.spec if isinstance(self.model, ModelConfig) else self.model.name


@dataclass(slots=True)
class _Look:
    """The runs that may be served, as the broker knows them.

    Attributes:
        unfinished: models of runs that are not over, also of those that are paused or cancelled; and work of other
            kinds that somebody waits for, also between two of its stages.
        running: models of running runs -> weight of these.
        waiting: the same, only of runs with units that no worker holds and with room for results, and only of models
            for which hints are there.
    """

    unfinished: set[Work] = field(default_factory=set)
    running: dict[Work, int] = field(default_factory=lambda: defaultdict(int))
    waiting: dict[Work, int] = field(default_factory=lambda: defaultdict(int))


class Scheduler:
    """Decides what one worker process serves. The virtual times are in the broker, shared by all workers.

    Args:
        client: a patient client.
        run: serve only this run, which shares the process with no other; "" serves all.
        slice_s: how long a model is served before another one may have its turn.
        able: whether work of another kind may be served by this process; None serves models only.
        is_aside: whether a run is left to other machines for now.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        run: str,
        slice_s: float,
        able: Callable[[OtherWork], bool] | None = None,
        is_aside: Callable[[str], bool] = lambda _run: False,
    ) -> None:
        self.client = client
        self.run = run
        self.slice_s = slice_s
        self.able = None if run else able
        self.is_aside = is_aside
        self._scripts = load_scripts(client)
        self._refused: set[Work] = set()
        self._refused_runs: dict[str, tuple[float, float]] = {}
        """Run -> when it was refused first, and last."""
        self._has_served = False
        self._first_runs: frozenset[str] | None = None

    def wait(self, stopped: Callable[[], bool]) -> Turn | None:
        """The first turn of a process that has no model loaded; None when stopped, or when the only run is over."""
        while not stopped():
            if self.run and is_over(self.client, self.run):
                return None
            survey = self._survey()
            # Without hints yet, a model may be loaded already while the producer is at it.
            weights = survey.waiting or survey.running
            if weights and (turn := self._choose(weights)):
                return turn
            time.sleep(POLL_S)
        return None

    def another(self, turn: Turn, *, spent_s: float, idle: bool) -> Turn | None:
        """At the end of a slice: the turn of another model, for which the process must change; None if it stays.

        Where it stays, its own turn goes on for another slice.

        Args:
            spent_s: device seconds since the turn began.
            idle: the process has had nothing to do for a while. It changes only if its own model has no work.
        """
        if self.run:
            return None
        waiting = self._survey().waiting
        if not waiting or (idle and turn.model in waiting):
            return None
        return self._choose(waiting, turn, spent_s)

    def end(self, turn: Turn, *, spent_s: float) -> None:
        """Let go of a turn in which `spent_s` device seconds were spent."""
        if not self.run:
            self._swap(lambda turns: (_settled(turns, turn, spent_s), None))

    def refuse(self, turn: Turn) -> None:
        """Never give the turn's model to this process again: it cannot be loaded here. What was booked is given back.

        It may well be loaded elsewhere, and its share there is no smaller because of us.
        """
        self._refused.add(turn.model)
        self.end(turn, spent_s=0.0)

    def refuse_run(self, run: str, error: EmbqError) -> None:
        """Serve a run no more, because of `error`. Raises it if the process serves no other run.

        Safe to call from any thread.
        """
        if self.run:
            raise error
        now = time.monotonic()
        if run not in self._refused_runs:
            log.error("run_refused", run=run, code=error.code, why=error.message, next=error.next_step)
        self._refused_runs[run] = (self._refused_runs.get(run, (now, now))[0], now)

    def refuses(self, run: str) -> bool:
        """Whether a run was refused a moment ago, so that its units are left to other machines."""
        return self._was_refused(run, REFUSED_RETRY_S)

    def _was_refused(self, run: str, within_s: float) -> bool:
        return time.monotonic() - self._refused_runs.get(run, (0.0, float("-inf")))[1] < within_s

    def served(self, run: str) -> None:
        """Note that a unit of a run was claimed."""
        self._has_served = True
        if run in self._refused_runs:  # which is not logged again
            self._refused_runs[run] = (self._refused_runs[run][0], float("-inf"))

    def refuses_all(self) -> bool:
        """Whether this worker is misconfigured: it refuses, again and again, all work that there was when it began.

        A run that came later, or that it has served, proves nothing: any user that may hand runs over could end all
        workers with one value.
        """
        if self._has_served or (self.able is not None and announced(self.client)):
            return False
        last = time.monotonic() - REFUSED_RETRY_S
        again = {run for run, (first, _) in self._refused_runs.items() if first < last}
        return {record.run for record in self._records()} <= again & (self._first_runs or set())

    def is_needed(self, model: Work) -> bool:
        """Whether any run that we may serve is not over yet and needs the model, now or when it is resumed.

        Of work of another kind: whether somebody waits for it.
        """
        return model in self._survey().unfinished

    def defaults_of(self, model: ModelConfig) -> WorkerDefaults:
        """What the runs of a model ask of their workers, the most if they differ."""
        defaults = [record.workers for record in self._records() if record.model == model]
        return WorkerDefaults(
            batch_size=max((workers.batch_size for workers in defaults), default=0),
            prepare_threads=max((workers.prepare_threads for workers in defaults), default=0),
        )

    def _choose(self, weights: dict[Work, int], own: Turn | None = None, spent_s: float = 0.0) -> Turn | None:
        """Book the next slice; None if it is one of `own`, or if there is nothing to choose from."""
        models = {model.queue_key: model for model in weights}
        by_key = {key: weights[model] for key, model in models.items()}
        if self.run:
            return next((Turn(model, weights[model], 0.0) for model in models.values()), None)

        def change(turns: VirtualTimes) -> tuple[VirtualTimes, str]:
            if own is not None:
                turns = _settled(turns, own, spent_s)
            key = turns.next(by_key, own=own.model.queue_key if own is not None else "", slice_s=self.slice_s)
            return (turns.begin(key, by_key, slice_s=self.slice_s) if key else turns), key

        key = self._swap(change)
        if own is not None:
            own.booked_s = spent_s
            if key == own.model.queue_key:
                own.weight, own.booked_s = weights[own.model], spent_s + self.slice_s
                return None
        return Turn(models[key], weights[models[key]], self.slice_s) if key else None

    def _swap(self, change: Callable[[VirtualTimes], tuple[VirtualTimes, Any]]) -> Any:
        """Change the virtual times atomically (compare and swap); returns the second value of `change`."""
        while True:
            stored = cast("bytes | None", self.client.get(TURNS)) or b""
            turns, result = change(VirtualTimes.from_json(stored))
            if self._scripts["swap"](
                keys=[TURNS], args=[stored, turns.to_json(secrets.token_hex(4))], client=self.client
            ):
                return result

    def _survey(self) -> _Look:
        served: list[tuple[str, Work]] = [(record.run, record.model) for record in self._records()]
        if self.able is not None:
            served += [(run, work) for run, work in announced(self.client) if self.able(work)]
        # What cannot be served here is not asked for: an idle process would do so for ever.
        served = [(run, work) for run, work in served if work not in self._refused]
        keys = list({work.queue_key for _, work in served})
        with self.client.pipeline(transaction=False) as pipe:
            for run, _ in served:
                pipe.hmget(run_key(run, "meta"), Backlog.FIELDS)
                pipe.zcard(run_key(run, "hinted"))
                pipe.xlen(run_key(run, "res"))
            for key in keys:
                pipe.llen(hints.hint_queue(self.client, key).key)
            answers = pipe.execute()
        count = len(served)
        hints_of = dict(zip(keys, answers[3 * count :], strict=True))
        survey = _Look()
        for (run, work), values, hinted, results in zip(
            served, answers[: 3 * count : 3], answers[1 : 3 * count : 3], answers[2 : 3 * count : 3], strict=True
        ):
            backlog = Backlog.of(run, values)
            if not isinstance(work, ModelConfig) or backlog.state not in (RunState.DONE, RunState.ABSENT):
                survey.unfinished.add(work)
            refused = self._was_refused(run, REFUSED_S) or self.is_aside(run)
            if backlog.state != RunState.RUNNING or refused:
                continue
            weight = backlog.priority
            if isinstance(work, ModelConfig):  # with others nothing is gained by being there before its units are
                survey.running[work] += weight
            if hints_of[work.queue_key] and _has_work(backlog, hinted, results):
                survey.waiting[work] += weight
        return survey

    def _records(self) -> list[RunRecord]:
        records = [record for record in active(self.client).values() if self.run in ("", record.run)]
        if self._first_runs is None:
            self._first_runs = frozenset(record.run for record in records)
        return records


def _has_work(backlog: Backlog, hinted: int, results: int) -> bool:
    """Whether a run has units that no worker holds, and room for what becomes of them."""
    full = results and (backlog.bytes >= backlog.limit_bytes or results >= backlog.limit_entries)
    return not full and bool(hinted or backlog.unclaimed)


def _settled(turns: VirtualTimes, turn: Turn, spent_s: float) -> VirtualTimes:
    return turns.correct(turn.model.queue_key, weight=turn.weight, seconds=spent_s - turn.booked_s)


class TurnClock:
    """Slice follows slice until no run needs what is served, or until it is another one's turn.

    Args:
        turn: the right to serve; the time spent of it is reported to the scheduler.
        stopped: whether the process is to end.

    Attributes:
        next: the turn of another one, for which the process must change; None as long as it stays.
    """

    def __init__(self, scheduler: Scheduler, turn: Turn, stopped: Callable[[], bool]) -> None:
        self.next: Turn | None = None
        self._scheduler = scheduler
        self._turn = turn
        self._stopped = stopped
        self._no_work_left = False
        self._began = self._ends = self._idle_at = 0.0

    def begin(self) -> None:
        """The first slice begins now."""
        self._began = time.monotonic()
        self._ends = self._began + self._scheduler.slice_s
        self._idle_at = self._began + IDLE_S

    def busy(self) -> None:
        """Work is in hand, or a hint has come."""
        self._idle_at = time.monotonic() + IDLE_S

    def over(self) -> bool:
        """Whether to take nothing more in hand. The scheduler is asked where a slice has just ended."""
        if self._stopped() or self._no_work_left or self.next is not None:
            return True
        now = time.monotonic()
        if now >= self._ends:
            self._look_for_another(idle=False)
            self._ends = now + self._scheduler.slice_s
        return self.next is not None

    def idle(self) -> None:
        """Nothing is in hand and no hint has come. After a while of that others may be served before the slice ends."""
        if time.monotonic() < self._idle_at:
            return
        self._idle_at = time.monotonic() + IDLE_S
        self._no_work_left = not self._scheduler.is_needed(self._turn.model)
        if not self._no_work_left:
            self._look_for_another(idle=True)

    def end(self) -> None:
        """Let go of the turn, unless the process is to end: then what was booked for the turn stays."""
        if not self._stopped():
            self._scheduler.end(self._turn, spent_s=self._spent_s())

    def _look_for_another(self, *, idle: bool) -> None:
        self.next = self._scheduler.another(self._turn, spent_s=self._spent_s(), idle=idle)

    def _spent_s(self) -> float:
        return time.monotonic() - self._began
