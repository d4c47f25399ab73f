"""Runs index units on the workers of a broker that share the index's folder or bucket.

A stage is a run of its own in the broker. This process is both producer and writer to it: it pushes hints, reads
results, and sets the bit of a unit whose sidecar it has seen. The sidecar on the shared storage decides; what the
broker holds is rebuilt from it whenever it is lost.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import redis

from embq.core import errors
from embq.core.errors import EmbqError
from embq.core.queue import hints
from embq.core.queue.keys import RUN_PARTS
from embq.core.queue.ledger import Ledger
from embq.core.queue.outage_detector import OutageDetector
from embq.core.queue.result_stream import MOST_TEXT_BYTES, Entry, Sender
from embq.core.queue.scripts import Loader, Script, load_scripts
from embq.core.redaction import masked
from embq.core.service.log import Events
from embq.core.units import content_hash
from embq.index.index_files.files import to_json, write_current
from embq.index.stages.runners import Done
from embq.index.stages.units import IndexUnit, Sidecar, find, finished
from embq.index.workers import builds
from embq.index.workers.builds import SHARED, IndexBuild, IndexStage, read_nonce
from embq.index.workers.hint import IndexHint

RENEW_S = 5.0
ROUND_MS = 250
AHEAD = 64
"""Limit of waiting hints: far more than workers take between two rounds, and far less than a message of a few kB each
would matter."""
SCAN_S = 5.0
"""Interval at which the folder is scanned for finished units, besides reading results."""
VISIBLE_S = 20.0
"""Longest time that a sidecar of a worker takes to be seen through a network file system."""
LONELY_S = 10.0
"""Time without a worker at work after which one message reports that."""


class QueueRunner:
    """Does the units of a build by workers of a broker.

    Args:
        client: a patient client.
        url: of the broker, for messages.
        memory_bytes: that all processes of one machine may take together.
        lease_s: how long a unit stays with a worker that is no longer heard of, as the workers have it.
        say: called with messages for the user.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        url: str,
        memory_bytes: int,
        lease_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._url = masked(url)
        self._memory_bytes = memory_bytes
        self._lease_s = lease_s
        self._say = say
        self._scripts = load_scripts(client)
        self._loader = Loader(client, self._scripts)
        self._log = Events("index")
        self._build: IndexBuild | None = None

    def run(self, units: Sequence[IndexUnit], done: Done) -> None:
        """Do all of these units, which belong to one stage; `done` is called for each as it is done, in any order.

        Raises the EmbqError of the first that cannot be done.
        """
        if not units:
            return
        build = self._shared(units[0])
        stage = _Stage(self._client, self._scripts, build, units, done, lease_s=self._lease_s, log=self._log)
        taken_at, warned = time.monotonic(), False
        with stage.at_work():
            while not stage.over:
                self._loader.load_missing()
                if stage.turn():
                    taken_at, warned = time.monotonic(), False
                elif not warned and time.monotonic() - taken_at > LONELY_S:
                    warned = True
                    self._say(self._call_for_workers())

    def close(self) -> None:
        """Let the workers go: no further stage follows."""
        if self._build is not None:
            # A broker that is away at the end is no reason to lose what was done: the record lapses by itself.
            with contextlib.suppress(redis.exceptions.RedisError, EmbqError):
                builds.withdraw(self._client, self._build, scripts=self._scripts)

    def _shared(self, unit: IndexUnit) -> IndexBuild:
        """The build of a unit, with the nonce by which workers know its folder."""
        if self._build is not None and (self._build.index, self._build.build) == (unit.index, unit.build):
            return self._build
        self.close()
        builds.forget_abandoned(self._client, scripts=self._scripts)
        folder = unit.build_dir.folder
        try:
            nonce = read_nonce(folder)
        except OSError:
            nonce = secrets.token_hex(16)
            write_current(folder / SHARED, nonce.encode())
        self._build = IndexBuild(
            index=unit.index,
            build=unit.build,
            folder=str(unit.build_dir.folder),
            nonce=nonce,
            memory_bytes=self._memory_bytes,
        )
        return self._build

    def _call_for_workers(self) -> str:
        return (
            f"no worker has taken a unit for {LONELY_S:.0f} s: start `embq worker --broker {self._url}` on machines "
            "that see the index's folder or bucket; one that cannot take part says why (index_refused in its log)"
        )


class _Stage:
    """One stage as a run in the broker."""

    def __init__(
        self,
        client: redis.Redis,
        scripts: Mapping[str, Script],
        build: IndexBuild,
        units: Sequence[IndexUnit],
        done: Done,
        *,
        lease_s: float,
        log: Events,
    ) -> None:
        self._client = client
        self._units = list(units)
        self._done = done
        self._log = log
        run = content_hash([build.index, build.build, units[0].stage, [unit.digest for unit in units]])
        self._record = IndexStage(build=build, stage=units[0].stage, run=run)
        self._ledger = Ledger(client, run, scripts=scripts)
        self._queue = hints.hint_queue(client, build.queue_key)
        self._steady = OutageDetector(client, lease_s=lease_s, pause_s=ROUND_MS / 1000)
        self._remaining = dict(enumerate(self._units))
        self._gen = ""
        self._renewed_at = self._scanned_at = float("-inf")

    @property
    def over(self) -> bool:
        """True once all units are done."""
        return not self._remaining

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep the stage in the broker for the length of the block."""
        self._scan()
        try:
            yield
        finally:
            with contextlib.suppress(redis.exceptions.RedisError, EmbqError):  # as in `close`
                hints.withdraw(self._client, self._queue, self._record.run)
                self._client.delete(*self._ledger.keys)

    def turn(self) -> bool:
        """One round: push hints, read results, look for finished units; returns whether a worker is at work."""
        self._steady.listen()
        previous = len(self._remaining)
        if not self._gen or self._ledger.gen() != self._gen:
            self._begin()
        now = time.monotonic()
        if now - self._renewed_at >= RENEW_S:
            builds.announce(self._client, self._record)
            self._renewed_at = now
        self._feed()
        entries = self._ledger.results.read(">", count=100, block_ms=ROUND_MS)
        if not entries and now - self._scanned_at >= SCAN_S:
            # Those whose delivery was lost with a connection; and what stands in the folder without a result.
            entries = self._ledger.results.read("0", count=100, block_ms=None)
            self._scan()
        sent, foreign = self._ledger.sent(entries, len(self._units))
        for entry in foreign:
            self._commit(entry.receipt, None)
        for entry, sender, published in sent:
            self._accept(entry, sender, published=published)
        self._steady.rest()
        # Units that are leased, or were and will be tried again, have been taken by a worker.
        return len(self._remaining) < previous or bool(self._client.zcard(self._ledger.keys[RUN_PARTS.index("due")]))

    def _begin(self) -> None:
        """Make the stage's queue anew: a first start and a lost broker are the same thing."""
        if self._gen:
            self._log.warning("index_queue_lost", stage=self._record.stage, run=self._record.run)
        self._scan()
        bits = bytearray((len(self._units) + 7) // 8)
        for u in range(len(self._units)):
            if u not in self._remaining:
                bits[u // 8] |= 0x80 >> u % 8
        self._gen = secrets.token_hex(6)
        self._ledger.rebuild(gen=self._gen, total=len(self._units), done=bytes(bits), counters={"fingerprint": ""})
        self._renewed_at = float("-inf")

    def _feed(self) -> None:
        waiting = self._client.llen(self._queue.key)
        with self._steady.answered():
            urgent, units = self._ledger.next_units(
                self._gen,
                max(0, AHEAD - waiting),
                queue_empty=waiting == 0,
                reap_at=self._steady.reap_at(),
            )
        # A client may have set a larger total in the broker.
        hints.push(self._queue, [self._hint(u) for u in urgent if u < len(self._units)], at_front=True)
        hints.push(self._queue, [self._hint(u) for u in units if u < len(self._units)], at_front=False)

    def _hint(self, u: int) -> IndexHint:
        return IndexHint(run=self._record.run, gen=self._gen, u=u, unit=to_json(self._units[u]))

    def _accept(self, entry: Entry, sender: Sender, *, published: bool) -> None:
        unit = self._remaining.get(u := sender.u)
        if unit is not None and not published:
            self._ledger.note_unleased(sender)
        if unit is None or not published:
            self._commit(entry.receipt, None)
            return
        fields = {name: value.decode(errors="replace")[:MOST_TEXT_BYTES] for name, value in entry.fields.items()}
        if "code" in fields:
            raise _error_in(fields, unit)
        sidecar = _seen_within(unit, VISIBLE_S)
        if sidecar is None:
            why = f"{fields.get('worker', 'a worker')} reported {unit.sidecar} as done, and it is missing"
            self._log.warning("index_result_rejected", u=u, why=why)
            self._ledger.reject(entry.receipt, u, sender.token, "index_damaged", why)
            return
        self._finish(entry.receipt, u, unit, sidecar)

    def _scan(self) -> None:
        """Look in the folder itself for units that are done."""
        numbers = {unit.number: u for u, unit in self._remaining.items()}
        for unit, sidecar in finished(list(self._remaining.values())):
            self._finish("", numbers[unit.number], unit, sidecar)
        self._scanned_at = time.monotonic()

    def _finish(self, receipt: str, u: int, unit: IndexUnit, sidecar: Sidecar) -> None:
        del self._remaining[u]
        self._done(unit, sidecar)
        if self._gen:
            self._commit(receipt, u)

    def _commit(self, receipt: str, u: int | None) -> None:
        finished = len(self._units) - len(self._remaining)
        self._ledger.commit([(receipt, u)], rows=finished, failures=0, quarantined=0, number=finished)


def _seen_within(unit: IndexUnit, seconds: float) -> Sidecar | None:
    """The sidecar that a worker wrote; a network file system may show it only after a moment."""
    end = time.monotonic() + seconds
    while (sidecar := find(unit)) is None and time.monotonic() < end:
        # Reading the folder makes an NFS client ask the server about it.
        for path in (unit.sidecar.parent, unit.build_dir.index):
            with contextlib.suppress(OSError):
                next(path.iterdir(), None)
        time.sleep(0.1)
    return sidecar


def _error_in(fields: dict[str, str], unit: IndexUnit) -> EmbqError:
    """The error with which a unit ended; without a kind it is what its last attempt left behind."""
    if "kind" in fields:
        return errors.error_of(fields)
    return errors.OutputError(
        f"the unit {unit.number} of the stage {unit.stage} was given up after {fields.get('attempts', 'some')} "
        f"attempts: {fields.get('message', '')}",
        next_step="the workers' logs say more; the same command goes on where it stopped",
        code=fields["code"],
    )
