"""Ledger of one run in Redis: leases, published results and done units.

A thin, typed interface: the scripts of `embq.core.queue.lua` decide, atomically, on the server.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, cast

import redis
from redis.exceptions import AuthenticationError, ConnectionError, OutOfMemoryError

from embq.core.broker.client import now_ms
from embq.core.broker.retry_policy import not_retried
from embq.core.queue import keys
from embq.core.queue.keys import MAX_ATTEMPTS, RUN_PARTS, run_key
from embq.core.queue.lua import MAX_BLAMED, MAX_UNITS
from embq.core.queue.result_stream import (
    LIMIT_BYTES,
    LIMIT_ENTRIES,
    Entry,
    PublishVerdict,
    ResultStream,
    Sender,
    in_pieces,
    read_fields,
)
from embq.core.queue.scripts import Script, load_scripts
from embq.core.run.control import Control, RunState, requested_changes
from embq.core.wire import MalformedError, malformed, skipped

T = TypeVar("T")

BULK_BYTES = 256 * 1024
"""A larger result is sent by the client with the longer time-out."""
BULK_TRIES = 3
"""Connections that the broker may close on one large result before it counts as out of memory for it."""


_NUMBERS = frozenset(
    (
        *("priority", "total", "cursor", "done", "bytes", "limit_bytes", "limit_entries", "rows", "failures", "n"),
        *("quarantined", "truncated", "tokens", "tokens_left", "tokens_waiting", "opened_ms", "began_ms"),
        *("last_commit_ms", "rows_before", "unit_ms", "fed_ms", "helped_ms", "load_ms"),
    )
)
"""Fields of `meta` that hold numbers."""
_FINGERPRINT = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_PLAIN = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Claim:
    """Answer to a claim: `word` is "ok" or the reason for the refusal, with its `detail`.

    `poison` holds the ordinals of samples that killed their worker and are left out.
    """

    word: str
    detail: str
    poison: frozenset[int] = frozenset()

    @property
    def granted(self) -> bool:
        """True if the lease was granted."""
        return self.word == "ok"

    @property
    def attempts(self) -> int:
        """Attempts at this unit that ended badly before; only where granted."""
        return int(self.detail)


def new_token(gen: str, worker: str) -> str:
    """A fencing token for one claim attempt."""
    return f"{gen}:{worker}:{secrets.token_hex(6)}"


class Ledger:
    """Typed access to the scripts for one run and one connection. Safe to share between threads.

    Attributes:
        results: published results that are not committed yet.

    Args:
        bulk: client for results that take long to send; None if there are none.
    """

    def __init__(
        self,
        client: redis.Redis,
        run: str,
        *,
        scripts: Mapping[str, Script] | None = None,
        bulk: redis.Redis | None = None,
    ) -> None:
        self.client = client
        self.bulk = bulk or client
        self.run = run
        self.keys = [run_key(run, part) for part in RUN_PARTS]
        self.results = ResultStream(client, run, on_lost=lambda: self._call("recheck"))
        self._scripts = scripts if scripts is not None else load_scripts(client)

    def _call(self, script: str, *arguments: Any, client: redis.Redis | None = None) -> Any:
        return self._scripts[script](keys=self.keys, args=list(arguments), client=client or self.client)

    def meta(self) -> dict[str, str]:
        """The run's counters and settings; empty if the broker does not know the run."""
        return read_meta(cast("dict[bytes, bytes]", self.client.hgetall(self.keys[0])))

    def repair(self, fields: Mapping[str, int | str]) -> list[str]:
        """Restore `fields` in `meta`, and 0 for malformed numbers; returns the names of the fields that were wrong.

        For the writer: other users with the right to write there may have written anything.
        """
        raw = cast("dict[bytes, bytes]", self.client.hgetall(self.keys[0]))
        current = {_text(name): _text(value) for name, value in raw.items()}
        corrected = read_meta(raw)
        if int(corrected.get("cursor", 0)) > int(fields.get("total", 0)):
            corrected["cursor"] = "0"
        corrected |= {name: str(value) for name, value in fields.items()}
        wrong = {name: value for name, value in corrected.items() if current.get(name) != value}
        if wrong and "gen" in current:
            self.client.hset(self.keys[0], mapping=cast("Any", wrong))
        return sorted(wrong)

    def sent(self, entries: Sequence[Entry], units: int) -> tuple[list[tuple[Entry, Sender, bool]], list[Entry]]:
        """Check entries of the result stream, to which every user with the right to publish may add anything.

        Returns (entry, its sender, whether it was published under a lease) of the well-formed ones, and the others.

        Args:
            units: how many the run has.
        """
        sent, invalid = [], []
        for entry in entries:
            try:
                sender = read_fields(Sender, entry)
                if sender.u >= units:
                    raise malformed("result", f"the run has no unit {sender.u}")
                sent.append((entry, sender))
            except MalformedError as error:
                if entry.fields:  # an entry without fields was deleted
                    skipped("result", f"{self.run} {entry.id}", error)
                invalid.append(entry)
        if not sent:
            return [], invalid
        names = [str(sender.u) for _, sender in sent]
        values = cast("list[bytes | None]", self.client.hmget(self.keys[RUN_PARTS.index("pub")], names))
        published = [_text(value) for value in values]
        return [
            (entry, by, f"{by.token} {entry.id}" == value) for (entry, by), value in zip(sent, published, strict=True)
        ], invalid

    def note_unleased(self, sender: Sender) -> None:
        """Log that a result is dropped because its sender does not hold the unit."""
        skipped(
            "result without a lease", f"{self.run} {sender.u} {sender.token}", f"unit {sender.u} was not leased to it"
        )

    def leased(self) -> list[int]:
        """The units that are leased."""
        return self._units("owner")

    def published(self) -> list[int]:
        """The units that are published and not committed."""
        return self._units("pub")

    def _units(self, part: str) -> list[int]:
        names = cast("list[bytes]", self.client.hkeys(self.keys[RUN_PARTS.index(part)]))
        return [int(name) for name in names if len(name) < 10 and name.isdigit()]

    def gen(self) -> str:
        """The queue's generation; "" if the broker does not know the run, or only in another protocol version."""
        gen, version = cast("list[bytes | None]", self.client.hmget(self.keys[0], ["gen", "v"]))
        return _text(gen) if _text(version) == str(keys.VERSION) else ""

    # --- worker ---

    def claim(
        self, u: int, token: str, *, lease_s: float, fingerprint: str, idle: bool = False, unit_s: float = 0.0
    ) -> Claim:
        """Ask for the lease on unit `u` under `token`.

        Args:
            idle: the worker holds nothing, so at the tail of a run it may help with a unit that another one holds.
            unit_s: seconds that the worker needs for the unit; 0 if unknown.
        """
        gen = token.split(":", 1)[0]
        own_ms = math.ceil(unit_s * 1000)
        word, detail, poison = self._call("claim", u, token, gen, int(lease_s * 1000), fingerprint, int(idle), own_ms)
        named = (ordinal for ordinal in _text(poison).split() if ordinal.isascii() and ordinal.isdigit())
        return Claim(_text(word), _text(detail), frozenset(int(ordinal[:18]) for ordinal in named))

    def start(self, held: Iterable[tuple[int, str]]) -> set[str]:
        """Charge an attempt to each (u, token) that is now begun; returns the tokens whose lease is lost."""
        return {_text(token) for part in _parts([*held]) for token in self._call("start", *_flat(part))}

    def beat(
        self,
        gen: str,
        held: Iterable[tuple[int, str]],
        *,
        lease_s: float,
        outlook: Mapping[str, tuple[float, float]] | None = None,
    ) -> tuple[str, set[str]]:
        """Extend leases; returns the run's state ("gen" where the queue was rebuilt) and the tokens that are lost.

        Args:
            outlook: token -> seconds until the holder ends the unit, below 0 if it is late, and its size in units of
                the usual size. An idle worker that would end it sooner may help.
        """
        scaled = {token: (round(left_s * 1000), round(size * 100)) for token, (left_s, size) in (outlook or {}).items()}
        state, lost = "", set[str]()
        for part in _parts([*held]):
            each = [value for u, token in part for value in (u, token, *scaled.get(token, ("", "")))]
            now, *tokens = self._call("beat", gen, int(lease_s * 1000), *each)
            state, lost = _text(now), lost | {_text(token) for token in tokens}
        return state, lost

    def publish(self, u: int, token: str, fields: Mapping[str, str | bytes | int], *, size: int) -> PublishVerdict:
        """Hand a result to the writer.

        A broker may have memory for every other command and not for a large result: it refuses the command, or closes
        the connection where clients have too much together (maxmemory-clients).
        """
        is_bulk = size > BULK_BYTES
        client = self.bulk if is_bulk else self.client
        parts = [part for pair in in_pieces(fields) for part in pair]
        for _ in range(BULK_TRIES):
            try:
                with not_retried(OutOfMemoryError, *([ConnectionError] if is_bulk else [])):
                    return PublishVerdict(self._call("publish", u, token, size, *parts, client=client))
            except OutOfMemoryError:
                break
            except ConnectionError as error:
                if not is_bulk or isinstance(error, AuthenticationError):
                    raise
                self.client.time()  # returns once the broker answers
        return PublishVerdict.NO_MEMORY

    def hint_again(self, u: int) -> None:
        """Have a unit whose hint was popped, and that was not claimed, hinted again as soon as its run has room."""
        self.client.zadd(run_key(self.run, "hinted"), {str(u): 0}, xx=True)

    def disk_full(self) -> None:
        """Have no unit of the run hinted for two seconds: its disk is full, which workers alone see."""
        with suppress(OutOfMemoryError), not_retried(OutOfMemoryError):
            self.client.hset(self.keys[0], "full_ms", now_ms(self.client))

    def release(self, u: int, token: str, *, failed: tuple[str, str] | None = None) -> bool:
        """Give a lease back: uncharged, or charged with (code, message). False if it was lost already."""
        code, message = failed or ("", "")
        mode = "fail" if failed else "undo"
        return bool(self._call("release", u, token, mode, code, message[:1000], MAX_ATTEMPTS))

    # --- state and priority ---

    def request(self, wishes: Mapping[str, str]) -> dict[str, str]:
        """Change `state` or `priority`, at once; returns both as they are now.

        The change is kept in the broker until the run's writer has written it to the output folder: see `requested`.
        """
        return self._control(0, wishes)

    def requested(self) -> dict[str, str]:
        """Requested changes that are not in the output folder yet."""
        raw = cast("dict[bytes, bytes]", self.client.hgetall(run_key(self.run, "asked")))
        return requested_changes(raw)

    def restore(self, control: Control) -> dict[str, str]:
        """Make the broker agree with the output folder, except for later requests; returns what holds now."""
        return self._control(1, control.fields())

    def _control(self, durable: int, fields: Mapping[str, str]) -> dict[str, str]:
        pairs = [part for pair in fields.items() for part in pair]
        keys = [*self.keys, run_key(self.run, "asked")]
        state, priority = self._scripts["control"](keys=keys, args=[durable, *pairs], client=self.client)
        return {"state": _text(state), "priority": _text(priority)}

    # --- supervisor and feeder ---

    def abandon(self, worker: str, message: str, *, blame: Mapping[str, int | None]) -> int:
        """Free every lease of a dead worker; returns their number.

        Args:
            blame: token of each unit that the worker had in hand, which alone are charged -> ordinal of the sample in
                hand, if it was one.
        """
        blamed = islice(blame.items(), MAX_BLAMED)
        named = [part for token, ordinal in blamed for part in (token, "" if ordinal is None else ordinal)]
        freed = 0
        for lane in ("spare", "owner"):
            cursor = "0"
            while True:
                count, after = self._call("abandon", worker, MAX_ATTEMPTS, message[:1000], lane, cursor, *named)
                freed, cursor = freed + int(count), _text(after)
                if cursor == "0":
                    break
        return freed

    def next_units(
        self,
        gen: str,
        room: int,
        *,
        queue_empty: bool,
        reap_at: int,
        idle: int = 0,
        fresh: int | None = None,
        unit_s: float = 0.0,
    ) -> tuple[list[int], list[int]]:
        """The units to hint now, urgent ones first apart; see the script `next`.

        Args:
            room: most units to give; urgent ones are given in any case, and use it up.
            fresh: most units among them that are hinted for the first time; None for no such limit.
            reap_at: time of the decision that overdue leases may be taken away, in ms of the broker's clock; 0 if
                they may not.
            idle: workers that hold nothing, and could help at the tail of the run.
            unit_s: seconds that the fastest of them needs for a unit; 0 if unknown.
        """
        room = max(0, room)
        most = room if fresh is None else fresh
        own_ms = math.ceil(unit_s * 1000)
        urgent, *units = self._call("next", gen, room, int(queue_empty), reap_at, MAX_ATTEMPTS, idle, most, own_ms)
        numbers = [int(u) for u in units]
        return numbers[: int(urgent)], numbers[int(urgent) :]

    # --- writer ---

    def commit(
        self,
        pairs: Sequence[tuple[str, int | None]],
        *,
        rows: int,
        failures: int,
        quarantined: int,
        number: int,
        truncated: int = 0,
        tokens: int = 0,
        tokens_left: int | None = None,
    ) -> int:
        """Mark (receipt of an entry or "", u or None) as done after commit record `number`; returns the units done.

        Args:
            tokens: of the committed units.
            tokens_left: estimate for the other units; None if unknown.
        """
        estimate = "" if tokens_left is None else tokens_left
        count = 0
        for part in _parts(pairs):
            chunk = [value for receipt, u in part for value in (receipt, "" if u is None else u)]
            count = int(self._call("commit", rows, failures, quarantined, number, truncated, tokens, estimate, *chunk))
        return count

    def reject(self, receipt: str, u: int, token: str, code: str, message: str) -> None:
        """Drop a result that cannot be used; its unit runs again, charged."""
        self._call("reject", receipt, u, token, code, message[:1000], MAX_ATTEMPTS)

    def grow(self, gen: str, total: int) -> None:
        """Raise the number of units to `total`, after a generation was added. A finished run goes on."""
        self._call("grow", gen, total)

    def done_bits(self) -> bytes:
        """The bitmap of committed units as the server has it (bit 0 is the highest bit of byte 0)."""
        return cast("bytes | None", self.client.get(self.keys[RUN_PARTS.index("done")])) or b""

    def rebuild(
        self,
        *,
        gen: str,
        total: int,
        done: bytes,
        counters: Mapping[str, int | str],
        control: Control = Control(),  # noqa: B008 - it is frozen
    ) -> None:
        """Rebuild the run's queue from the commit log, on a first start and after a loss of the broker alike.

        Args:
            gen: the new generation; no token of an older one can claim or publish afterwards.
            total: number of units.
            done: bitmap of the committed units.
            counters: rows, failures, quarantined, truncated, tokens, n and fingerprint as the commit log has them.
            control: state and priority as the output folder has them.
        """
        meta, *rest = self.keys
        seconds, micros = self.client.time()
        with self.client.pipeline(transaction=True) as pipe:
            pipe.delete(meta, *rest)
            if done:
                pipe.set(self.keys[RUN_PARTS.index("done")], done)
            count = sum(byte.bit_count() for byte in done)
            fields: dict[str, int | str] = {
                "v": keys.VERSION,
                "gen": gen,
                "state": RunState.DONE if count == total else control.state,
                "priority": control.priority,
                "total": total,
                "cursor": 0,
                "done": count,
                "bytes": 0,
                "limit_bytes": LIMIT_BYTES,
                "limit_entries": LIMIT_ENTRIES,
                "opened_ms": seconds * 1000 + micros // 1000,
                "rows_before": counters.get("rows", 0),
                **counters,
            }
            pipe.hset(meta, mapping=cast("Any", fields))
            pipe.execute()
        self.results.make_group()

    def lock_writer(self, writer: str, *, ttl_s: float, takeover: bool = False) -> str:
        """Take or renew the writer lock; returns "" or the id of the writer that holds it."""
        script = self._scripts["writer_lock"]
        key = run_key(self.run, "writer")
        return _text(script(keys=[key], args=[writer, int(ttl_s * 1000), int(takeover)], client=self.client))

    def unlock_writer(self, writer: str) -> None:
        """Drop the writer lock where `writer` holds it, so that the next writer need not wait."""
        key = run_key(self.run, "writer")
        if _text(self.client.get(key)) == writer:
            self.client.delete(key)


def read_meta(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """A run's `meta` as texts; numeric fields are numbers, whatever was written there."""
    return {_text(name): _plain(_text(name), _text(value)) for name, value in raw.items()}


def _parts(units: Sequence[T]) -> Iterator[Sequence[T]]:
    """What is said about each of some units, in parts of one call each; of no unit one call as well."""
    for start in range(0, len(units), MAX_UNITS) or (0,):
        yield units[start : start + MAX_UNITS]


def _flat(held: Iterable[tuple[int, str]]) -> list[int | str]:
    return [part for pair in held for part in pair]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _plain(name: str, value: str) -> str:
    """A field of `meta`; "0" for a malformed number, "" for a malformed fingerprint."""
    if name == "fingerprint":
        return value if _FINGERPRINT.fullmatch(value) else ""
    if name not in _NUMBERS or _PLAIN.fullmatch(value) or (name == "tokens_left" and not value):
        return value
    return "0"
