"""Measurements of one worker process: counters, speeds, time per stage, and the steps in progress.

Work is counted in tokens; a sample counts one at least. The tokens of a unit are not known before it is embedded, but
its bytes are, and the cost of a byte of recent units: so long texts that come after short ones are not taken for short
ones. Where a unit has no bytes, or none of its kind is done yet, its number of samples is used.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from embq.core.run.unit_sizes import UnitSize, size_of
from embq.core.units import Unit
from embq.worker.claim.lease import LeasedUnit, UnitPart
from embq.worker.meter.batch_trace import Trace
from embq.worker.meter.progress_board import ProgressBoard, Span
from embq.worker.meter.stage_times import Stage, StageTimes

MEMORY_S = 10.0
"""A measurement of that age counts a third: a throttled card is known to be slow after seconds."""
UNITS_REMEMBERED = 10
"""The usual unit is the mean of this many."""
WINDOW_S = 20.0
LEAST_BATCHES = 4
"""Speeds in reports are those of the last 20 seconds; per run of the last 4 batches if these took longer."""
BIN_S = 0.25
"""Batches that end closer to each other than that are counted as one, so that few are kept."""
MEASURE_S, MEASURE_LEAST_S = 10.0, 2.0
"""A measured rate covers so much time with units in hand, or the last of it if that is not shorter than 2 s."""


class Recent:
    """Work of late: decaying sums, in which work that ended `MEMORY_S` earlier counts a third.

    Attributes:
        seconds: that the work took.
        amount: rows, or bytes.
        tokens: of these.
    """

    def __init__(self) -> None:
        self.seconds = self.amount = self.tokens = 0.0

    def add(self, seconds: float, amount: float, tokens: float) -> None:
        """Add work that took `seconds`."""
        decay = math.exp(-seconds / MEMORY_S)
        self.seconds = self.seconds * decay + seconds
        self.amount = self.amount * decay + amount
        self.tokens = self.tokens * decay + tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Rate; None before the first work."""
        return self.tokens / self.seconds if self.amount and self.seconds > 0.0 else None


class DeviceRate(NamedTuple):
    """Tokens per second of a device while it has work, and whether that was measured in full passes."""

    per_s: float
    full: bool


class Meter:
    """Counters, speeds and times of one worker process. Safe to use from any thread, but for `report` and `measured`.

    Attributes:
        times: time of each stage by state.
        board: steps in progress, which the supervisor reads.
        trace: file in which batches are noted.
        throughput: speed at which rows come out, whatever holds them up, and the size of units.
        rows: samples that got a vector.
        tokens: their own, as `Embedder.length` counts them.
        processed: tokens that the device computed for them, with the padding.
        memory_full: passes for which the device had no room.
        recomputed: samples whose vectors were not finite, and were computed once more in fp32.
        failed: samples and units that did not get one.
        units: units published.
        last_batch_at: monotonic seconds of the end of the last batch; None before.

    Args:
        threads: those that decode and tokenise.
        board: None for one that no other process reads.
        trace: None for none.
    """

    def __init__(self, threads: int = 1, *, board: ProgressBoard | None = None, trace: Trace | None = None) -> None:
        self._lock = threading.Lock()
        self.times = StageTimes(threads)
        self.board = board if board is not None else ProgressBoard()
        self.trace = trace or Trace()
        self.throughput = Throughput()
        self.rows = 0
        self.tokens = 0
        self.processed = 0
        self.memory_full = 0
        self.recomputed = 0
        self.failed = 0
        self.units = 0
        self._run_speeds = RunSpeeds()
        self._passes = {True: Recent(), False: Recent()}
        self._first_batch_at: float | None = None
        self.last_batch_at: float | None = None
        self._reported: list[tuple[float, int]] = []
        self._busy_from: tuple[float, int] | None = None

    @contextmanager
    def stage(self, stage: Stage, parts: Sequence[UnitPart] = ()) -> Iterator[None]:
        """This thread works in a stage, with parts of units in hand: for the watchdog, the times and the status.

        Several threads may prepare at once, and a unit may be read, prepared and embedded at once: its status is the
        last stage other than `prepare` that took it.
        """
        spans = [Span(part.lease.token, part.lease.u, part.first, part.last) for part in parts]
        if stage == "prepare":
            with self.times.preparing(), self.board.step(stage, spans):
                yield
            return
        for part in parts:
            part.lease.stage = stage
        with self.times.at(stage, "busy"), self.board.step(stage, spans):
            yield

    def batch_done(
        self,
        rows: int,
        tokens: Mapping[str, int],
        *,
        processed: int,
        took_s: float,
        full: bool = True,
        claimed_at: float | None = None,
    ) -> None:
        """Count a batch of vectors that has just ended, the tokens of each run in it, and all of them with the padding.

        Args:
            took_s: of the device.
            full: the batch was about as large as suits the device; a smaller one does not show what the device can do.
            claimed_at: when the first sample of it was claimed; None leaves the throughput as it is.
        """
        now = time.monotonic()
        with self._lock:
            self._run_speeds.batch(now - took_s, now, tokens)
            self.rows += rows
            self.tokens += sum(tokens.values())
            self.processed += processed
            self._passes[full].add(took_s, rows, max(rows, sum(tokens.values())))
            self.last_batch_at = now
            self._first_batch_at = self._first_batch_at or now
        if claimed_at is not None:
            self.throughput.batch_done(rows, sum(tokens.values()), since=claimed_at)

    def tokens_per_s(self) -> tuple[dict[str, float], dict[str, float]]:
        """Run -> tokens per second by the last batches, and tokens done of the one in hand."""
        now = time.monotonic()
        with self._lock:
            return self._run_speeds.per_s(now), self._run_speeds.in_hand(now)

    def rested(self) -> None:
        """Forget the speeds per run: nothing was in hand for a while."""
        with self._lock:
            self._run_speeds.rest()

    def unit_done(self, failures: int) -> None:
        """Count a published unit."""
        with self._lock:
            self.units += 1
            self.failed += failures

    def device_per_s(self) -> DeviceRate | None:
        """Rate of the device while it has work, by its last full passes if there are any; None before the first
        pass. With smaller ones it is the least that the device can do."""
        with self._lock:
            for full, passes in self._passes.items():
                if rate := passes.tokens_per_s:
                    return DeviceRate(rate, full)
            return None

    def report(self, now: float) -> dict[str, Any]:
        """Counters and rate for the report of this worker, see `embq.core.queue.heartbeats.WorkerReport`."""
        self._reported = [(at, rows) for at, rows in self._reported if now - at <= WINDOW_S]
        self._reported.append((now, self.rows))
        began, first_rows = self._reported[0]
        fields = {
            "rows": self.rows,
            "units": self.units,
            "rows_per_s": round((self.rows - first_rows) / (now - began), 2) if now > began else 0.0,
            "padding": round(1 - self.tokens / self.processed, 3) if self.processed else 0.0,
            "memory_full": self.memory_full,
            "recomputed": self.recomputed,
        }
        if self._first_batch_at is not None and self.last_batch_at is not None:
            fields["embed_s"] = round(self.last_batch_at - self._first_batch_at, 2)
        return fields

    def measured(self, now: float, *, busy: bool) -> float | None:
        """Rows per second of a time in which units were in hand, whenever one ends; waiting for work does not count."""
        began, first_rows = self._busy_from or (now, self.rows)
        seconds, rows = now - began, self.rows - first_rows
        if busy and 0.0 < seconds < MEASURE_S:
            return None
        self._busy_from = (now, self.rows) if busy else None
        return round(rows / seconds, 2) if rows and seconds >= MEASURE_LEAST_S else None


class Throughput:
    """Rows and tokens per second of one worker process, as they come out: a slow reader makes a worker slow as well.

    A sample counts one token at least. Safe to use from any thread.

    Attributes:
        unit_samples: samples of a unit of usual size; None if none is known yet.

    Args:
        clock: monotonic seconds, as `LeasedUnit.claimed_at` has them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent = Recent()
        self.unit_samples: float | None = None
        self._late: deque[tuple[UnitSize, int | None]] = deque(maxlen=UNITS_REMEMBERED)
        self._costs: dict[str, Recent] = {}
        self._last_at: float | None = None
        self._last_s = 0.0

    def batch_done(self, rows: int, tokens: int, *, since: float) -> None:
        """Count a batch that has ended now, of which the first sample was claimed at `since`.

        It took the time from the end of the batch before; waiting for units to be had does not count.
        """
        with self._lock:
            now = self._clock()
            began = since if self._last_at is None else max(since, self._last_at)
            self._last_s = max(1e-6, now - began)
            self._last_at = now
            self._recent.add(self._last_s, rows, max(rows, tokens))

    def unit_claimed(self, unit: Unit) -> None:
        """Count a unit as one of late, which those that come will be like."""
        with self._lock:
            self._late.append((size_of(unit), unit.expected))
            if unit.expected is not None:
                self._count(unit.expected)

    def unit_read(self, samples: int) -> None:
        """Count the samples of a unit whose number was unknown before it was read."""
        with self._lock:
            self._count(samples)

    def unit_done(self, lease: LeasedUnit) -> None:
        """Learn what a byte costs from a unit of which every sample is embedded, or is a failure."""
        with self._lock:
            rate = self._recent.tokens_per_s
            if rate is None or not lease.tokens or not lease.extent.bytes:
                return
            cost = self._costs.setdefault(lease.extent.kind, Recent())
            cost.add(lease.tokens / rate, lease.extent.bytes, max(len(lease.samples), lease.tokens))

    @property
    def rows_per_s(self) -> float | None:
        """Speed of late; None before the first batch."""
        with self._lock:
            return self._recent.amount / self._recent.seconds if self._recent.amount else None

    @property
    def tokens_per_s(self) -> float | None:
        """The same in tokens."""
        with self._lock:
            return self._recent.tokens_per_s

    @property
    def unit_s(self) -> float | None:
        """Seconds for a unit like those of late; None if their size or the speed is not known yet."""
        with self._lock:
            rate = self._recent.tokens_per_s
            sizes = [tokens for late in self._late if (tokens := self._tokens_of(*late)) is not None]
            return None if rate is None or not sizes else max(1e-6, sum(sizes) / len(sizes) / rate)

    def seconds_of(self, unit: Unit) -> float | None:
        """Seconds for one unit; None if its size or the speed is not known yet."""
        with self._lock:
            rate, tokens = self._recent.tokens_per_s, self._tokens_of(size_of(unit), unit.expected)
            return None if rate is None or tokens is None else tokens / rate

    def ahead_s(self, held: Iterable[LeasedUnit]) -> float | None:
        """Seconds until the device has finished units; None if that is not known yet."""
        remaining = 0.0
        with self._lock:
            rate = self._recent.tokens_per_s
            for lease in held:
                tokens = self._tokens_of(lease.extent, lease.planned)
                if rate is None or tokens is None:
                    return None
                remaining += lease.left_of(tokens)
            if not remaining or rate is None or self._last_at is None:
                return 0.0
            # The batch in hand is done in part.
            return max(0.0, remaining / rate - min(self._clock() - self._last_at, self._last_s))

    def outlook(self, held: Sequence[LeasedUnit]) -> dict[str, tuple[float, float]]:
        """Token -> seconds until a unit is finished, and its size in units of the usual size; empty if not known.

        The device finishes them one after the other, in the given order, that of their claims. The time counts from its
        last batch, or from the claim if it had nothing to do then: where the next batch never ends, the unit is
        late, and the seconds are below 0. They are 0 if the unit waits for nothing but to be published.
        """
        unit_s, outlook, left_s = self.unit_s, {}, 0.0
        with self._lock:
            rate = self._recent.tokens_per_s
            if rate is None or unit_s is None or self._last_at is None:
                return {}
            now, since = self._clock(), self._last_at
            for lease in held:
                tokens = self._tokens_of(lease.extent, lease.planned) or 0.0
                if not left_s:
                    since = max(self._last_at, lease.claimed_at)
                left_s += lease.left_of(tokens) / rate
                outlook[lease.token] = (left_s - (now - since) if left_s else 0.0, tokens / rate / unit_s)
        return outlook

    def _tokens_of(self, extent: UnitSize, samples: int | None) -> float | None:
        """About how many tokens a unit has."""
        cost = self._costs.get(extent.kind) if extent.bytes else None
        if cost is not None:
            return extent.bytes * cost.tokens / cost.amount
        count = self.unit_samples if samples is None else samples
        return count * self._recent.tokens / self._recent.amount if count is not None and self._recent.amount else None

    def _count(self, samples: int) -> None:
        usual = samples if self.unit_samples is None else self.unit_samples
        self.unit_samples = usual + (samples - usual) / UNITS_REMEMBERED


class _Point(NamedTuple):
    ended: float
    tokens: Counter[str]
    """Run -> tokens of all batches until then."""


class RunSpeeds:
    """Tokens per second of each run, for the ETA. Measured from the end of one batch to the end of another, so that a
    device whose batches take seconds is as fast right after one as it is right before the next.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()

    def batch(self, began: float, ended: float, tokens: Mapping[str, int]) -> None:
        """Count a batch: how many tokens it had, by run."""
        if not self._points:
            self._points.append(_Point(began, Counter()))
        total = self._points[-1].tokens
        if len(self._points) > 2 and ended - self._points[-2].ended < BIN_S:
            self._points.pop()
        self._points.append(_Point(ended, total + Counter(tokens)))
        while len(self._points) > LEAST_BATCHES + 1 and self._points[1].ended <= ended - WINDOW_S:
            self._points.popleft()

    def rest(self) -> None:
        """The device has had nothing to do, which says nothing of its speed."""
        self._points.clear()

    def per_s(self, now: float) -> dict[str, float]:
        """Run -> tokens per second; those of a device that has not finished a batch are not known.

        A batch that takes longer than all before it counts as the largest of them, at most, once it ends.
        """
        if len(self._points) < 2:
            return {}
        first, last = self._points[0], self._points[-1]
        done = last.tokens - first.tokens
        all_done, span = done.total(), last.ended - first.ended
        if not all_done or span <= 0:
            return {}
        at_most = (all_done + self._largest()) / (now - first.ended) if now > last.ended else all_done / span
        share = min(1.0, at_most / (all_done / span))
        return {run: tokens / span * share for run, tokens in done.items()}

    def in_hand(self, now: float) -> dict[str, float]:
        """Run -> tokens that are probably done of the batch in hand, which is taken for one like the largest."""
        speeds = self.per_s(now)
        if not speeds:
            return {}
        seconds = min(now - self._points[-1].ended, self._largest() / sum(speeds.values()))
        return {run: speed * max(0.0, seconds) for run, speed in speeds.items()}

    def _largest(self) -> int:
        pairs = zip(self._points, list(self._points)[1:], strict=False)
        return max(after.tokens.total() - earlier.tokens.total() for earlier, after in pairs)
