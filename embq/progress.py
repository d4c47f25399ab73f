"""One look at a run, as `embq status` and the display show it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from embq.limits import Limit

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
        precision: that the model is computed in.
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
    precision: str = ""
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
            "precision": self.precision,
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
