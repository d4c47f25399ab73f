"""State of a run in the broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from embq.app.status.eta import done_of, holders_wanted
from embq.app.status.reports import Reports, Serving
from embq.core.queue.heartbeats import Heard, live_workers, services
from embq.core.queue.keys import run_key
from embq.core.queue.ledger import Ledger, read_meta
from embq.core.run.control import Control, RunState, requested_changes


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
