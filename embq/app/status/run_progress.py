"""Derives progress, rate, bottleneck and ETA of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

from embq.app.status.broker_snapshot import BrokerSnapshot, Serving
from embq.app.status.eta import NO_ETA, SILENT_S, Eta, embedded_in_flight, in_hand_s, predict
from embq.core.errors import Exit
from embq.core.models import ModelConfig
from embq.core.queue.heartbeats import Device
from embq.core.run.control import Control, RunState

OF_A_WORKER = (
    *("name", "device", "rows_per_s", "unit", "stage", "age_s"),
    *("padding", "memory_full", "recomputed", "limit"),
)
"""Fields of a worker's report that `embq status --json` has."""
UNIT_STATES = ("done", "received", "in_flight", "queued", "quarantined")
"""Fields of `RunProgress` that count units and add up to `units_total`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """Committed and total counts of a run, and its age.

    Attributes:
        rows, failures, tokens: committed; tokens as far as workers report them.
        truncated: texts among the rows that were truncated to the model's limit.
        rows_total: samples of the run; None if they are not known yet.
        rows_total_exact: whether `rows_total` is counted, not estimated from the units done so far.
        units_total, done, quarantined: units; committed ones are either done or quarantined.
        closed: whether the run is over.
        created_s: when it was planned (announced, if only the broker tells), in seconds since the epoch; None if
            that is unknown.
    """

    rows: int
    rows_total: int | None
    rows_total_exact: bool
    failures: int
    truncated: int = 0
    tokens: int = 0
    units_total: int
    done: int
    quarantined: int
    closed: bool = False
    created_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress(RunCounts):
    """A run at one moment.

    Attributes:
        priority: its weight among runs that share the devices.
        received, in_flight, queued: units that are not committed; with those that are, they add up to `units_total`.
        rows_per_s: committed rows per second, from the first unit to the last commit.
        embedding_per_s: rows per second of all workers in the last 20 seconds.
        eta_s: seconds until the last commit; None if it cannot be predicted yet.
        eta_basis: what it counts: "tokens", "samples" or "units"; "" for nothing.
        tokens_total: of all units; estimated until all are committed, None if nothing is known.
        tokens_per_s: of all workers, now and for this run.
        limit: name of the bottleneck now; of a run that has just ended, of the whole run.
        limits: the workers with its details, `now` and `so_far`.
        loading_on: devices that load its model.
        downloaded: bytes of models that were downloaded meanwhile, by `embq run` on this machine.
        embedded: samples with a row or failure, committed or not; an estimate of those in published units.
        finish_s: seconds until the units in hand are embedded, at the present speed; None if unknown.
        waits_for: the models that are served now, while the run's own waits for its turn.
        workers: reports of the workers.
        timing: load_s, embed_s, wall_s.
    """

    run: str
    output: str
    model: str
    state: RunState
    priority: int
    received: int
    in_flight: int
    queued: int
    rows_per_s: float
    embedding_per_s: float
    eta_s: float | None
    limit: str
    precision: str = ""
    limits: Serving = field(default_factory=Serving)
    waits_for: list[str] = field(default_factory=list)
    loading_on: list[str] = field(default_factory=list)
    downloaded: int = 0
    embedded: int = 0
    finish_s: float | None = None
    tokens_total: int | None = None
    tokens_per_s: float = 0.0
    eta_basis: str = ""
    workers: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def created(self) -> str:
        """`created_s` as UTC time, ISO 8601; "" if it is not known."""
        if self.created_s is not None:
            with suppress(ValueError, OverflowError, OSError):  # what a broker holds may be no time of a calendar
                return datetime.fromtimestamp(self.created_s, UTC).isoformat(timespec="seconds")
        return ""

    @property
    def exit_status(self) -> Exit:
        """Exit status of the commands that end with the run."""
        if self.state != RunState.DONE:
            return Exit.INTERRUPTED
        return Exit.SOME_FAILED if self.failures else Exit.DONE

    @property
    def speed(self) -> float:
        """Rows per second: embedded now; committed on average, for a run that is over."""
        return self.rows_per_s if self.state == RunState.DONE else self.embedding_per_s

    @property
    def share_committed(self) -> float:
        """Committed share of the run, by tokens if these are known."""
        if self.tokens_total:
            return self.tokens / self.tokens_total
        return (self.done + self.quarantined) / self.units_total if self.units_total else 0.0

    @property
    def share_embedded(self) -> float:
        """Embedded share of the run; at least the committed one."""
        share = self.embedded / self.rows_total if self.rows_total else 0.0
        return max(self.share_committed, min(1.0, share))

    @property
    def share_failed(self) -> float:
        """Share of the run that has ended in failures; at most the committed one."""
        ended = self.rows + self.failures
        return self.share_committed * self.failures / ended if ended else 0.0

    def ended_after(self, last: RunProgress | None) -> RunProgress:
        """The progress of a session that has ended, with what only the broker knew by `last`, that of its work."""
        if last is None or not last.limits.so_far.name:
            return self
        tokens = self.tokens_total if self.closed else last.tokens_total
        return replace(self, limit=last.limits.so_far.name, limits=last.limits, tokens_total=tokens)

    def to_json(self) -> dict[str, Any]:
        """The shape that `embq status --json` promises."""
        return {
            "schema": 1,
            **self._fields("run", "output", "model", "precision", "state", "created", "priority"),
            **self._fields("rows", "rows_total", "rows_total_exact", "failures", "truncated"),
            "units": {**self._fields(*UNIT_STATES), "total": self.units_total},
            **self._fields("rows_per_s", "tokens", "tokens_total", "tokens_per_s", "eta_s", "eta_basis", "limit"),
            "limit_detail": {"now": self.limits.now.describe(), "so_far": self.limits.so_far.describe()},
            "waits_for": self.waits_for,
            "workers": [{name: worker.get(name) for name in OF_A_WORKER} for worker in self.workers],
            "timing": self.timing,
        }

    def _fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


def derive_progress(
    run: str,
    output: str,
    model: ModelConfig,
    counts: RunCounts,
    control: Control,
    snapshot: BrokerSnapshot,
    *,
    timing: Mapping[str, float] | None = None,
) -> RunProgress:
    """Progress of a run from its counts and the state of the broker.

    Args:
        run, output, model: its id, folder and model.
        control: state and priority, with the last requests.
        snapshot: the broker's state.
        timing: as recorded; None takes the broker's counters.
    """
    queued = max(0, counts.units_total - counts.done - counts.quarantined - snapshot.received - snapshot.in_flight)
    serving, shares = snapshot.workers.serving(model.spec), snapshot.workers.shares(run, model.spec)
    is_running = control.state == RunState.RUNNING
    waits_for = snapshot.workers.other_models(model.spec) if queued and is_running and not serving.workers else []
    eta = NO_ETA
    if is_running and not counts.closed:
        eta = _predicted(counts, snapshot, shares, serving.rows_per_s, queued=queued)
    devices = [] if counts.closed else _devices(snapshot, run, model.spec)
    rows_per_s = snapshot.committed_per_s(counts.rows) if timing is None else timing.get("rows_per_s", 0.0)
    timing = snapshot.timing(serving) if timing is None else timing
    limits = Serving() if counts.closed else serving
    return RunProgress(
        **{field.name: getattr(counts, field.name) for field in fields(counts)},
        run=run,
        output=output,
        model=model.spec,
        precision=model.precision,
        state=RunState.DONE if counts.closed else _state(control, devices, at_work=bool(serving.workers or waits_for)),
        priority=control.priority,
        received=snapshot.received,
        in_flight=snapshot.in_flight,
        queued=queued,
        rows_per_s=rows_per_s,
        embedding_per_s=serving.rows_per_s,
        eta_s=0.0 if counts.closed else eta.seconds,
        eta_basis=eta.basis,
        tokens_total=counts.tokens if counts.closed else snapshot.tokens_total,
        tokens_per_s=round(eta.per_s, 1) if eta.basis == "tokens" else 0.0,
        limit="turn" if waits_for else limits.now.name,
        limits=limits,
        waits_for=waits_for,
        loading_on=[device.device for device in devices if device.state == "loading"],
        embedded=_embedded(counts, snapshot, shares),
        finish_s=in_hand_s(snapshot.workers.of_run(run, model.spec), run),
        workers=serving.workers,
        timing={name: value for name, value in timing.items() if name != "rows_per_s"},
    )


def _predicted(
    counts: RunCounts, snapshot: BrokerSnapshot, shares: list[Mapping[str, Any]], rows_per_s: float, *, queued: int
) -> Eta:
    samples_left = None if counts.rows_total is None else max(0, counts.rows_total - counts.rows - counts.failures)
    return predict(
        shares,
        tokens_left=None if snapshot.tokens_left is None else snapshot.tokens_left - snapshot.number("tokens_waiting"),
        begun=snapshot.begun,
        samples_left=samples_left,
        exact=counts.rows_total_exact,
        samples_per_s=rows_per_s,
        queued=queued,
        worked_s=snapshot.worked_s,
    )


def _embedded(counts: RunCounts, snapshot: BrokerSnapshot, shares: list[Mapping[str, Any]]) -> int:
    """Samples with a row or failure; those of published units are taken to be as many as those of a mean unit."""
    committed = counts.rows + counts.failures
    if counts.closed or not counts.units_total:
        return committed
    of_unit = (counts.rows_total or 0) / counts.units_total
    # A report may be older than the end of units that it counts as in hand.
    ended = max(0, sum(int(share["units"]) for share in shares) - snapshot.in_flight)
    in_flight = min(embedded_in_flight(shares) - round(of_unit * ended), round(of_unit * snapshot.in_flight))
    return committed + round(of_unit * snapshot.received) + max(0, in_flight)


def _devices(snapshot: BrokerSnapshot, run: str, model: str) -> list[Device]:
    """The devices of the workers that may serve a run.

    A device does not say which model it loads; while no worker has units of the run, it is taken to be this one.
    """
    services = [
        report.service
        for report in snapshot.services
        if report.service.role == "worker"
        and report.service.state == "running"
        and report.service.run in ("", run)
        and report.silent_s <= SILENT_S
        and model not in report.service.refused
    ]
    return [device for service in services for device in service.devices]


def _state(control: Control, devices: list[Device], *, at_work: bool) -> RunState:
    if at_work or control.state != RunState.RUNNING:
        return control.state
    states = {device.state for device in devices}
    if "loading" in states:
        return RunState.LOADING
    return RunState.STARTING if states & {"starting", "idle"} else RunState.STOPPED
