"""Queue of a run in the broker, kept in agreement with the commit log."""

from __future__ import annotations

from collections.abc import Sequence

from embq.core.queue.heartbeats import live_workers
from embq.core.queue.keys import VERSION
from embq.core.queue.ledger import Ledger
from embq.core.queue.result_stream import LIMIT_BYTES, LIMIT_ENTRIES
from embq.core.queue.runs import RunRecord, end, go_on, is_over, register
from embq.core.run.control import Control
from embq.core.service.log import Events
from embq.writer.commit import Committer
from embq.writer.token_estimate import TokenEstimate


class RunQueue:
    """Queue of one run in the broker; the log of `committer` decides which units are done.

    Args:
        nonce: content of a file in the staging folder, by which workers find out whether they share it.
    """

    def __init__(
        self, ledger: Ledger, record: RunRecord, committer: Committer, workload: TokenEstimate, *, nonce: str
    ) -> None:
        self._ledger = ledger
        self._record = record
        self._committer = committer
        self._workload = workload
        self._nonce = nonce
        self._log = Events("writer")
        self._rebuilds = 0

    def adopt(self) -> bool:
        """Continue with the queue in the broker; False if it does not fit the commit log."""
        gen = self._ledger.gen()
        state = self._committer.state
        if not gen:
            return False
        queue_bits = self._ledger.done_bits().ljust(len(state.done), b"\0")
        if len(queue_bits) > len(state.done) or any(a & ~b for a, b in zip(queue_bits, state.done, strict=True)):
            return False
        self._committer.generation = gen
        missing = [
            8 * i + bit
            for i, (a, b) in enumerate(zip(queue_bits, state.done, strict=True))
            if a != b
            for bit in range(8)
            if (b & ~a) & (0x80 >> bit)
        ]
        self.mark([("", u) for u in missing])
        self._ledger.client.hset(self._ledger.keys[0], "nonce", self._nonce)
        self._ledger.results.make_group()
        return True

    def rebuild(self, total: int, control: Control) -> None:
        """Rebuild the queue with `total` units; nothing claimed from the last one can be published."""
        state = self._committer.state
        gen = f"{self._committer.epoch or state.epoch}-{self._rebuilds}"
        self._rebuilds += 1
        register(self._ledger.client, self._record)
        self._ledger.rebuild(
            gen=gen,
            total=total,
            done=bytes(state.done),
            counters={**self._counters(), "fingerprint": state.fingerprint, "nonce": self._nonce},
            control=control,
        )
        self._committer.generation = gen
        self._log.info("queue_built", run=self._record.run, gen=gen, done=state.count)

    def grow(self, total: int) -> None:
        """Raise the number of units to `total`, if it is lower."""
        self._ledger.grow(self._committer.generation, total)

    def set_over(self, *, is_over: bool) -> None:
        """Tell whether all units are written and the log is closed: then no service looks at the run any more."""
        if is_over:
            end(self._ledger.client, self._record.run, self._committer.state.count)
        else:
            go_on(self._ledger.client, self._record.run)

    def mark(self, pairs: Sequence[tuple[str, int | None]]) -> None:
        """Acknowledge (receipt of an entry or "", u or None) after the last record, see `Ledger.commit`."""
        state = self._committer.state
        self._ledger.commit(
            pairs,
            rows=state.rows,
            failures=state.failures,
            quarantined=state.quarantined,
            truncated=state.truncated,
            tokens=state.tokens,
            tokens_left=self._workload.tokens_left,
            number=state.n,
        )

    def is_lost(self) -> bool:
        """True if the broker has no queue of the run, or another one."""
        return self._ledger.gen() != self._committer.generation

    def differs(self) -> bool:
        """True if the broker has another number of units as done than the log."""
        return int(self._ledger.meta().get("done", 0)) != self._committer.state.count

    def repair(self, total: int, fingerprint: str, control: Control) -> None:
        """Restore the run's counters and settings where another user has overwritten them."""
        optional: dict[str, int | str] = {"fingerprint": fingerprint} if fingerprint else {}
        if is_over(self._ledger.client, self._record.run) and self._committer.state.count < total:
            optional["state"] = control.state  # the broker does not hand out units of a run that is done
        settings: dict[str, int | str] = {
            "v": VERSION,
            "total": total,
            "limit_bytes": LIMIT_BYTES,
            "limit_entries": LIMIT_ENTRIES,
            **optional,
        }
        if not self._committer.state.closed:
            go_on(self._ledger.client, self._record.run)
        if wrong := self._ledger.repair(settings):
            self._log.warning("queue_mended", run=self._record.run, fields=",".join(wrong)[:200])

    def timing(self) -> dict[str, float]:
        """Times and rate of the run by the broker's clock, for `embq status` once workers and broker are gone."""
        load_s = max((float(w.get("load_s", 0)) for w in live_workers(self._ledger.client)), default=0.0)
        self._ledger.client.hset(self._ledger.keys[0], "load_ms", round(1000 * load_s))
        meta = self._ledger.meta()
        opened, first, last = (int(meta.get(name, 0)) for name in ("opened_ms", "began_ms", "last_commit_ms"))
        embed_s = (last - first) / 1000 if first else 0.0
        rows = self._committer.state.rows - int(meta.get("rows_before", 0))
        return {
            "load_s": load_s,
            "embed_s": round(embed_s, 3),
            "wall_s": round((last - opened) / 1000, 3) if opened else 0.0,
            "rows_per_s": round(rows / embed_s, 2) if embed_s else 0.0,
        }

    def _counters(self) -> dict[str, int]:
        state = self._committer.state
        names = ("rows", "failures", "quarantined", "truncated", "tokens", "n")
        estimate = self._workload.tokens_left
        return {name: getattr(state, name) for name in names} | ({} if estimate is None else {"tokens_left": estimate})
