"""What follows from counting: how far a run is, what it does now, what limits it, and when it will end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.models import ModelConfig
from core.run.control import Control
from embq.eta import NO_ETA, Eta, predict, share_of
from embq.limits import limit_now, limit_so_far
from embq.progress import Limits, Progress
from embq.seen import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What is committed of a run, and what there is to do.

    Attributes:
        rows, failures, truncated, tokens: committed; of texts that were cut off, the number.
        units: of the whole run.
        committed: units; `quarantined` are among them.
        samples: of the whole run; None where that cannot be said yet.
        exact: whether `samples` is counted, and not estimated.
        closed: whether the run is over.
    """

    rows: int
    failures: int
    truncated: int
    tokens: int
    units: int
    committed: int
    quarantined: int
    samples: int | None
    exact: bool
    closed: bool


def reckon(
    run: str,
    output: str,
    model: ModelConfig,
    counts: Counts,
    control: Control,
    seen: Seen,
    *,
    timing: Mapping[str, float] | None = None,
) -> Progress:
    """One look at a run.

    Args:
        run, output, model: its id, its folder, and what it computes with.
        control: state and priority, with what was asked for last.
        seen: one look into the broker.
        timing: where it is recorded; otherwise the broker's counters give it.
    """
    queued = max(0, counts.units - counts.committed - seen.received - seen.in_flight)
    workers, others = _by_model(seen.workers, model.spec)
    waits_for = others if queued and control.state == "running" and not workers else []
    eta = NO_ETA
    if control.state == "running" and not counts.closed:
        eta = _predicted(run, counts, seen, workers, queued=queued)
    rows_per_s = seen.committed_per_s(counts.rows) if timing is None else timing.get("rows_per_s", 0.0)
    timing = seen.timing(workers) if timing is None else timing
    limits = Limits() if counts.closed else Limits(now=limit_now(workers), so_far=limit_so_far(workers))
    return Progress(
        run=run,
        output=output,
        model=model.spec,
        precision=model.precision,
        state=_state(control, closed=counts.closed, at_work=bool(workers or waits_for)),
        priority=control.priority,
        rows=counts.rows,
        rows_total=counts.samples,
        rows_total_exact=counts.exact,
        failures=counts.failures,
        units_total=counts.units,
        done=counts.committed - counts.quarantined,
        received=seen.received,
        in_flight=seen.in_flight,
        queued=queued,
        quarantined=counts.quarantined,
        rows_per_s=rows_per_s,
        embedding_per_s=_rate(workers),
        eta_s=0.0 if counts.closed else eta.seconds,
        eta_basis=eta.basis,
        tokens=counts.tokens,
        tokens_total=counts.tokens if counts.closed else _tokens_expected(seen),
        tokens_per_s=round(eta.per_s, 1) if eta.basis == "tokens" else 0.0,
        limit="turn" if waits_for else limits.now.name,
        limits=limits,
        waits_for=waits_for,
        truncated=counts.truncated,
        workers=sorted(workers, key=lambda worker: str(worker.get("name"))),
        timing={name: value for name, value in timing.items() if name != "rows_per_s"},
    )


def _predicted(run: str, counts: Counts, seen: Seen, workers: list[dict[str, Any]], *, queued: int) -> Eta:
    left = None if counts.samples is None else max(0, counts.samples - counts.rows - counts.failures)
    return predict(
        share_of(workers, run),
        tokens_left=None if seen.tokens_left is None else seen.tokens_left - seen.number("tokens_waiting"),
        begun=seen.begun,
        samples_left=left,
        exact=counts.exact,
        samples_per_s=_rate(workers),
        queued=queued,
        worked_s=seen.worked_s,
    )


def _rate(workers: list[dict[str, Any]]) -> float:
    return sum(float(worker.get("rows_per_s", 0)) for worker in workers)


def _tokens_expected(seen: Seen) -> int | None:
    """Tokens of all units, by the writer's estimate of those that are left; None where it has none."""
    return None if seen.tokens_left is None else seen.number("tokens") + seen.tokens_left


def _by_model(workers: list[dict[str, Any]], model: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The workers that serve a model, and the models of the others that will serve it when it is its turn."""
    others = {str(w.get("model")) for w in workers if w.get("model") != model and not w.get("serves")}
    return [w for w in workers if w.get("model") == model], sorted(others)


def _state(control: Control, *, closed: bool, at_work: bool) -> str:
    if closed:
        return "done"
    return control.state if at_work or control.state != "running" else "stopped"
