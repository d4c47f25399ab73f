"""How far a run is: counts from the commit log, what is in flight from the broker where one answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import redis

from core import checkpoint, generations
from core.commits import CommitLog, LogState
from core.control import Control, load_control
from core.layout import Layout, RunInfo, load_run
from core.ledger import Ledger
from core.objects import Place
from core.registry import RunRecord
from core.scripts import load_scripts
from embq.eta import NO_ETA, predict, share_of
from embq.limits import Limit, limit_now, limit_so_far
from embq.seen import Seen, see

OF_A_WORKER = (
    *("name", "device", "rows_per_s", "unit", "stage", "age_s"),
    *("padding", "memory_full", "recomputed", "limit"),
)
"""What `embq status --json` tells of each worker, of what it says of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What limits a run now, and what has since its workers have work."""

    now: Limit = field(default_factory=Limit)
    so_far: Limit = field(default_factory=Limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a run.

    Attributes:
        state: "running", "paused", "cancelled", "done", or "stopped" where it is to go on and nobody works on it.
        priority: its weight among runs that share the devices.
        rows: committed rows.
        rows_total: samples of the run; estimated from the units done so far where only reading tells.
        truncated: texts among them of which only the beginning was embedded: the model reads no more.
        failures: committed failures.
        done, received, in_flight, queued, quarantined: units; they add up to `units_total`.
        rows_per_s: committed rows per second, from the first unit to the last commit.
        embedding_per_s: what the workers report for the last 20 seconds, together.
        eta_s: seconds until the last commit, or None where that cannot be predicted yet.
        eta_basis: what that counts: "tokens", "samples" or "units"; "" where nothing can be counted.
        tokens: of committed units, as far as workers said.
        tokens_total: of all units; estimated until all are committed, None where nothing is known.
        tokens_per_s: what the workers do now for this run, together.
        limit: what bounds the speed now, in one word; of a run that has ended under our eyes, what did.
        limits: what that follows from, now and since the workers have work.
        waits_for: the models that are served now, where the run's own has to wait for its turn.
        workers: what each worker says of itself.
        timing: load_s, embed_s, wall_s.
    """

    run: str
    output: str
    model: str
    state: str
    priority: int
    rows: int
    rows_total: int | None
    rows_total_exact: bool
    failures: int
    units_total: int
    done: int
    received: int
    in_flight: int
    queued: int
    quarantined: int
    rows_per_s: float
    embedding_per_s: float
    eta_s: float | None
    limit: str
    limits: Limits = field(default_factory=Limits)
    waits_for: list[str] = field(default_factory=list)
    truncated: int = 0
    tokens: int = 0
    tokens_total: int | None = None
    tokens_per_s: float = 0.0
    eta_basis: str = ""
    workers: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)

    def ended_after(self, before: Progress | None) -> Progress:
        """This last look at a run, with what limited it according to the look before, when its workers were there."""
        if before is None or not before.limits.so_far.name:
            return self
        return replace(self, limit=before.limits.so_far.name, limits=before.limits)

    def to_json(self) -> dict[str, Any]:
        """The shape that `embq status --json` promises."""
        return {
            "schema": 1,
            "run": self.run,
            "output": self.output,
            "model": self.model,
            "state": self.state,
            "priority": self.priority,
            "rows": self.rows,
            "rows_total": self.rows_total,
            "rows_total_exact": self.rows_total_exact,
            "failures": self.failures,
            "truncated": self.truncated,
            "units": {
                "done": self.done,
                "received": self.received,
                "in_flight": self.in_flight,
                "queued": self.queued,
                "quarantined": self.quarantined,
                "total": self.units_total,
            },
            "rows_per_s": self.rows_per_s,
            "tokens": self.tokens,
            "tokens_total": self.tokens_total,
            "tokens_per_s": self.tokens_per_s,
            "eta_s": self.eta_s,
            "eta_basis": self.eta_basis,
            "limit": self.limit,
            "limit_detail": {"now": self.limits.now.describe(), "so_far": self.limits.so_far.describe()},
            "waits_for": self.waits_for,
            "workers": [{name: worker.get(name) for name in OF_A_WORKER} for worker in self.workers],
            "timing": self.timing,
        }


class Watch:
    """Looks at one run again and again, reading each commit record once.

    Args:
        root: output folder.
        client: the broker, or None where none answers.
    """

    def __init__(self, root: Place, client: redis.Redis | None) -> None:
        self.info: RunInfo = load_run(root)
        self.root = root
        self.client = client
        self._log = CommitLog(Layout(root))
        self._state = checkpoint.load(Layout(root), self.info.units)
        self._timing: dict[str, float] = {}
        self._scripts = load_scripts(client) if client is not None else {}
        # Once: listing all records is too much for every look.
        self._log.ends_with(self.log_state().n)

    def log_state(self) -> LogState:
        """What the commit log says now, and what was added to the run; the truth about what is done."""
        for commit in self._log.read(after=self._state.n):
            self._log.advance(self._state, commit)
            self._timing = commit.timing or self._timing
        if generations.exists(self._log.layout.manifest, len(self.info.added) + 1):
            self.info = load_run(self.root)
            self._state.grow(self.info.units)
        return self._state

    def look(self) -> Progress:
        """The run now. Raises redis.exceptions.RedisError where the broker is away."""
        log = self.log_state()
        seen = Seen()
        if self.client is not None and not log.closed:
            seen = see(Ledger(self.client, self.info.run, scripts=self._scripts))
        # The broker is ahead of the folder until the writer has noted what was asked for.
        control = load_control(Layout(self.root)).with_wishes(seen.meta | seen.asked)
        total, exact = _rows_total(self.info, log)
        return _progress(
            self.info.run,
            str(self.root),
            self.info.model.spec,
            _Counts(log.rows, log.failures, log.count, log.quarantined, self.info.units, log.truncated, log.tokens),
            (total, exact),
            control,
            seen,
            timing=self._timing if log.closed else None,
            closed=log.closed,
        )


class BrokerWatch:
    """Looks at a run whose folder cannot be seen from here, from a laptop say: all comes from the broker.

    Args:
        record: the run as it was announced.
        client: the broker.
    """

    def __init__(self, record: RunRecord, client: redis.Redis) -> None:
        self.record = record
        self.client = client
        self._ledger = Ledger(client, record.run, scripts=load_scripts(client))

    def look(self) -> Progress:
        """The run now. Raises redis.exceptions.RedisError where the broker is away."""
        return progress_of(self.record, see(self._ledger))


def progress_of(record: RunRecord, seen: Seen) -> Progress:
    """A run as far as the broker alone tells.

    Args:
        record: the run as it was announced.
        seen: one look into the broker.
    """
    names = ("rows", "failures", "done", "quarantined", "truncated", "tokens")
    rows, failures, done, quarantined, truncated, tokens = map(seen.number, names)
    units = seen.number("total") or record.units
    closed = seen.meta.get("state") == "done"
    estimate = _estimate(rows + failures, done, units - record.retries)
    return _progress(
        record.run,
        record.output,
        record.model.spec,
        _Counts(rows, failures, done, quarantined, units, truncated, tokens),
        (rows + failures, True) if closed else (estimate, False),
        Control().with_wishes(seen.meta | seen.asked),
        seen,
        closed=closed,
    )


def _estimate(samples: int, done: int, units: int) -> int | None:
    """Samples of `units` units, from those of the units that are done; retries, which come last, add none."""
    return round(samples / min(done, units) * units) if done and units > 0 else None


class _Counts(NamedTuple):
    """Rows and failures that are committed, and units by where they are."""

    rows: int
    failures: int
    committed: int
    quarantined: int
    units: int
    truncated: int
    tokens: int


def _progress(
    run: str,
    output: str,
    model: str,
    counts: _Counts,
    rows_total: tuple[int | None, bool],
    control: Control,
    seen: Seen,
    *,
    closed: bool,
    timing: dict[str, float] | None = None,
) -> Progress:
    """What follows from the counts; `timing` where it is recorded, else it is taken from the broker's `meta`."""
    queued = max(0, counts.units - counts.committed - seen.received - seen.in_flight)
    workers, others = _by_model(seen.workers, model)
    waits_for = others if queued and control.state == "running" and not workers else []
    total, exact = rows_total
    rate = sum(float(worker.get("rows_per_s", 0)) for worker in workers)
    samples_left = max(0, total - counts.rows - counts.failures) if total is not None else None
    tokens_left = seen.tokens_left
    eta = NO_ETA
    if control.state == "running" and not closed:
        eta = predict(
            share_of(workers, run),
            tokens_left=None if tokens_left is None else tokens_left - seen.number("tokens_waiting"),
            begun=seen.begun,
            samples_left=samples_left,
            exact=exact,
            samples_per_s=rate,
            queued=queued,
            worked_s=seen.worked_s,
        )
    rows_per_s = seen.committed_per_s(counts.rows) if timing is None else timing.get("rows_per_s", 0.0)
    timing = seen.timing(workers) if timing is None else timing
    limits = Limits() if closed else Limits(now=limit_now(workers), so_far=limit_so_far(workers))
    return Progress(
        run=run,
        output=output,
        model=model,
        state=_state(control, closed=closed, at_work=bool(workers or waits_for)),
        priority=control.priority,
        rows=counts.rows,
        rows_total=total,
        rows_total_exact=exact,
        failures=counts.failures,
        units_total=counts.units,
        done=counts.committed - counts.quarantined,
        received=seen.received,
        in_flight=seen.in_flight,
        queued=queued,
        quarantined=counts.quarantined,
        rows_per_s=rows_per_s,
        embedding_per_s=rate,
        eta_s=0.0 if closed else eta.seconds,
        eta_basis=eta.basis,
        tokens=counts.tokens,
        tokens_total=counts.tokens if closed else None if tokens_left is None else seen.number("tokens") + tokens_left,
        tokens_per_s=round(eta.per_s, 1) if eta.basis == "tokens" else 0.0,
        limit="turn" if waits_for else limits.now.name,
        limits=limits,
        waits_for=waits_for,
        truncated=counts.truncated,
        workers=sorted(workers, key=lambda worker: str(worker.get("name"))),
        timing={name: value for name, value in timing.items() if name != "rows_per_s"},
    )


def _by_model(workers: list[dict[str, Any]], model: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The workers that serve a model, and the models of the others that will serve it when it is its turn."""
    others = {str(w.get("model")) for w in workers if w.get("model") != model and not w.get("serves")}
    return [w for w in workers if w.get("model") == model], sorted(others)


def _state(control: Control, *, closed: bool, at_work: bool) -> str:
    if closed:
        return "done"
    return control.state if at_work or control.state != "running" else "stopped"


def _rows_total(info: RunInfo, log: LogState) -> tuple[int | None, bool]:
    if info.samples is not None and info.model.chunking is None:
        return info.samples, True
    if log.count == info.units:
        return log.rows + log.failures, True
    # Retries add no sample, so they say nothing of how many a unit holds.
    done, units = log.count - log.retries, info.units - info.retries
    if done > 0:
        return round((log.rows + log.failures) / done * max(units, done)), False
    return None, False
