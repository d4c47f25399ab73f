"""State of a run in the broker, and the reports of all workers at one moment, sorted once by run and by model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from embq.app.status.bottleneck import Bottleneck, bottleneck_now, bottleneck_so_far
from embq.app.status.eta import SILENT_S, done_of, holders_wanted
from embq.core.queue.heartbeats import Heard, live_workers, services
from embq.core.queue.keys import run_key
from embq.core.queue.ledger import Ledger, read_meta
from embq.core.run.control import Control, RunState, requested_changes

Report = dict[str, Any]


class Serving:
    """The workers that serve one model; what follows from their reports is computed once for all readers.

    Attributes:
        workers: their reports, by name.
    """

    def __init__(self, workers: Sequence[Report] = ()) -> None:
        self.workers = sorted(workers, key=lambda worker: str(worker.get("name")))

    @cached_property
    def now(self) -> Bottleneck:
        """Their bottleneck now."""
        return bottleneck_now(self.workers)

    @cached_property
    def so_far(self) -> Bottleneck:
        """Their bottleneck since they have work."""
        return bottleneck_so_far(self.workers)

    @cached_property
    def rows_per_s(self) -> float:
        """Of those that are not silent, together."""
        reporting = (worker for worker in self.workers if worker.get("silent_s", 0.0) <= SILENT_S)
        return sum(float(worker.get("rows_per_s", 0)) for worker in reporting)

    @cached_property
    def load_s(self) -> float:
        """Seconds of loading, of the slowest."""
        return max((float(worker.get("load_s", 0)) for worker in self.workers), default=0.0)


class Reports:
    """Reports of all workers, sorted once, because each of many runs looks at them."""

    def __init__(self, workers: Sequence[Report] = ()) -> None:
        by_model: dict[Any, list[Report]] = {}
        self._of_run: dict[str, list[Report]] = {}
        for worker in workers:
            by_model.setdefault(worker.get("model"), []).append(worker)
            for run in worker.get("runs", ()):
                self._of_run.setdefault(run, []).append(worker)
        self._serving = {model: Serving(of_model) for model, of_model in by_model.items()}
        self._free = {str(worker.get("model")) for worker in workers if not worker.get("serves")}

    def serving(self, model: str) -> Serving:
        """The workers that serve a model."""
        return self._serving.get(model) or Serving()

    def other_models(self, model: str) -> list[str]:
        """Models of the workers that can serve this one later."""
        return sorted(self._free - {model})

    def of_run(self, run: str, model: str = "") -> list[Report]:
        """The workers with units of a run, of those that serve a model if one is named."""
        return [worker for worker in self._of_run.get(run, ()) if model in ("", worker.get("model"))]

    def shares(self, run: str, model: str = "") -> list[Mapping[str, Any]]:
        """The part of each live one's report on the run."""
        return [worker["runs"][run] for worker in self.of_run(run, model) if worker["silent_s"] <= SILENT_S]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSnapshot:
    """State of a run in the broker at one moment; the default is that of no broker.

    Attributes:
        meta: counters of the run.
        requested: requests that are not in the output folder yet.
        received, in_flight: numbers of units.
        workers: reports of all workers, also of those that serve other models.
        services: those that report, read while no worker has units of the run.
        begun: finished tokens of units in flight.
        now_ms: by the broker's clock.
    """

    meta: dict[str, str] = field(default_factory=dict)
    requested: dict[str, str] = field(default_factory=dict)
    received: int = 0
    in_flight: int = 0
    workers: Reports = field(default_factory=Reports)
    services: list[Heard] = field(default_factory=list)
    begun: int = 0
    now_ms: int = 0

    def number(self, name: str) -> int:
        """A counter; 0 if there is none."""
        return int(self.meta.get(name) or 0)

    @property
    def state(self) -> RunState:
        """DONE, else the requested state; ABSENT until a writer has set the run up."""
        if not self.meta.get("gen"):
            return RunState.ABSENT
        is_done = self.meta.get("state") == RunState.DONE
        return RunState.DONE if is_done else Control().with_changes(self.meta | self.requested).state

    @property
    def moved_ms(self) -> int:
        """Time of the last commit, or of the run's opening, by the broker's clock."""
        return self.number("last_commit_ms") or self.number("opened_ms")

    @property
    def tokens_left(self) -> int | None:
        """The writer's estimate of tokens in uncommitted units; None without one."""
        return self.number("tokens_left") if self.meta.get("tokens_left") else None

    @property
    def tokens_total(self) -> int | None:
        """Tokens of all units, by the writer's estimate of the rest; None without one."""
        return None if self.tokens_left is None else self.number("tokens") + self.tokens_left

    @property
    def worked_s(self) -> float:
        """Seconds since the first unit was started."""
        began = self.number("began_ms")
        return max(0.0, (self.now_ms - began) / 1000) if began else 0.0

    def committed_per_s(self, committed: int) -> float:
        """Rows per second from the first unit to the last commit, for `committed` rows in all."""
        first, last = self.number("began_ms"), self.number("last_commit_ms")
        rows = committed - self.number("rows_before")
        return round(rows * 1000 / (last - first), 2) if first and last > first and rows > 0 else 0.0

    def timing(self, serving: Serving) -> dict[str, float]:
        """Seconds of loading (the slowest worker), of embedding, and in all; of a run that is over, until its end."""
        opened, first, last = (self.number(name) for name in ("opened_ms", "began_ms", "last_commit_ms"))
        is_done = self.state == RunState.DONE
        return {
            "load_s": self.number("load_ms") / 1000 if is_done else serving.load_s,
            "embed_s": round(max(0, last - first) / 1000, 3) if first and last else 0.0,
            "wall_s": round(max(0, (last if is_done else self.now_ms) - opened) / 1000, 3) if opened else 0.0,
        }


def take_snapshot(ledger: Ledger) -> BrokerSnapshot:
    """Read the state of a run. Raises redis.exceptions.RedisError if the broker is unreachable."""
    workers = Reports(live_workers(ledger.client))
    reports = [] if workers.shares(ledger.run) else services(ledger.client)
    return take_snapshots([ledger], workers, reports)[0]


def take_snapshots(ledgers: Sequence[Ledger], workers: Reports, reports: list[Heard]) -> list[BrokerSnapshot]:
    """Read the states of runs of one broker in one round trip. Raises redis.exceptions.RedisError if it is unreachable.

    Args:
        workers, reports: as read before: tokens of a unit that is published meanwhile are counted in `meta` as
            waiting.
    """
    if not ledgers:
        return []
    shares_of = [workers.shares(ledger.run) for ledger in ledgers]
    with ledgers[0].client.pipeline(transaction=False) as pipe:
        pipe.time()
        for ledger, shares in zip(ledgers, shares_of, strict=True):
            # One field more than is wanted, because HMGET takes no empty list.
            pipe.hmget(run_key(ledger.run, "owner"), ["", *map(str, holders_wanted(shares))])
            pipe.hgetall(run_key(ledger.run, "meta"))
            pipe.hgetall(run_key(ledger.run, "asked"))
            pipe.hlen(run_key(ledger.run, "pub"))
            pipe.hlen(run_key(ledger.run, "owner"))
        (seconds, micros), *answers = pipe.execute()
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    snapshots = []
    for i, shares in enumerate(shares_of):
        holders, meta, requested, received, in_flight = answers[5 * i : 5 * i + 5]
        snapshots.append(
            BrokerSnapshot(
                meta=read_meta(meta),
                requested=requested_changes(requested),
                received=int(received),
                in_flight=int(in_flight),
                workers=workers,
                services=[] if shares else reports,
                begun=done_of(shares, holders[1:]),
                now_ms=now_ms,
            )
        )
    return snapshots
