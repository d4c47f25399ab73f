"""What the broker says of a run that is at work, and what follows from that alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core.queue.heartbeats import live_workers
from core.queue.keys import RUN_PARTS
from core.queue.ledger import Ledger
from embq.status.eta import done_in_flight, share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSnapshot:
    """One look into the broker; the default is that there is none.

    Attributes:
        meta: counters of the run.
        asked: what a user asked for and is not in the output folder yet.
        received, in_flight: units.
        workers: all that are heard of, also those that serve other models.
        begun: tokens that are done of units in flight.
        now_ms: by the broker's clock.
    """

    meta: dict[str, str] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    received: int = 0
    in_flight: int = 0
    workers: list[dict[str, Any]] = field(default_factory=list)
    begun: int = 0
    now_ms: int = 0

    def number(self, name: str) -> int:
        """One of the counters; 0 where there is none."""
        return int(self.meta.get(name) or 0)

    @property
    def tokens_left(self) -> int | None:
        """Tokens of units that are not committed, as the writer estimates them; None where it cannot yet."""
        return self.number("tokens_left") if self.meta.get("tokens_left") else None

    @property
    def worked_s(self) -> float:
        """Since the first unit was begun."""
        began = self.number("began_ms")
        return max(0.0, (self.now_ms - began) / 1000) if began else 0.0

    def committed_per_s(self, committed: int) -> float:
        """Rows per second from the first unit to the last commit, where `committed` rows are committed now."""
        first, last = self.number("began_ms"), self.number("last_commit_ms")
        rows = committed - self.number("rows_before")
        return round(rows * 1000 / (last - first), 2) if first and last > first and rows > 0 else 0.0

    def timing(self, workers: list[dict[str, Any]]) -> dict[str, float]:
        """Seconds that loading took the slowest of `workers`, that were spent embedding, and in all."""
        opened, first, last = (self.number(name) for name in ("opened_ms", "began_ms", "last_commit_ms"))
        return {
            "load_s": max((float(worker.get("load_s", 0)) for worker in workers), default=0.0),
            "embed_s": round(max(0, last - first) / 1000, 3) if first and last else 0.0,
            "wall_s": round((self.now_ms - opened) / 1000, 3) if opened else 0.0,
        }


def take_snapshot(ledger: Ledger) -> BrokerSnapshot:
    """Look into the broker. Raises redis.exceptions.RedisError where it is away."""
    # In this order: a unit that is published meanwhile is no longer begun, and `meta` counts its tokens as waiting.
    workers = live_workers(ledger.client)
    begun = done_in_flight(ledger, share_of(workers, ledger.run))
    seconds, micros = ledger.client.time()
    received, in_flight = (int(ledger.client.hlen(ledger.keys[RUN_PARTS.index(part)])) for part in ("pub", "owner"))
    return BrokerSnapshot(
        meta=ledger.meta(),
        asked=ledger.asked(),
        received=received,
        in_flight=in_flight,
        workers=workers,
        begun=begun,
        now_ms=seconds * 1000 + micros // 1000,
    )
