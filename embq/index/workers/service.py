"""Serves one build of an index: holds the lease on one unit at a time, while a child process does the work.

The unit is looked after in the loop that receives hints, so everything happens in one thread.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.core.errors import ConfigError
from embq.core.process.children import PYTHON, ChildEndedError, JsonChild
from embq.core.process.limits import exhausted
from embq.core.queue import hints
from embq.core.queue.heartbeats import WORKER_REPORTS
from embq.core.queue.keys import VERSION
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.scripts import load_scripts
from embq.core.service.log import Events
from embq.index.workers.builds import IndexBuild, announced
from embq.index.workers.hint import IndexHint
from embq.worker.claim.lease import Lease
from embq.worker.claim.rq_worker import HintReceiver
from embq.worker.claim.scheduler import Turn, TurnClock
from embq.worker.context import WorkerContext
from embq.worker.meter.progress_board import Span

LOOK_S = 0.25
"""Time to wait for an answer at once; a request to stop is noticed only after it."""
REPORT_S = 1.0
ELSEWHERE = frozenset({"EmbqError", "ConfigError", "AwayError", "BrokerError"})
"""Errors that may be this machine's own: the unit is tried again, and by others. All others are the unit's, or of what
every worker shares, such as a full disk, and end the build."""


@dataclass(slots=True)
class _InHand:
    """A unit in hand.

    Attributes:
        step: the board's step, open as long as the unit is in hand.
        answer: what to publish, once there is an answer.
    """

    hint: IndexHint
    lease: Lease
    step: ExitStack
    answer: dict[str, str | bytes | int] | None = None


class IndexService:
    """Serves one build until it is over, until it is another's turn, or until stopped.

    Args:
        turn: the right to do so.
    """

    def __init__(self, context: WorkerContext, turn: Turn, build: IndexBuild) -> None:
        self.context = context
        self.build = build
        self.log = Events("worker")
        self._client = context.connect()
        self._scripts = load_scripts(self._client)
        threads = context.settings.omp_threads
        self._child = IndexChild(
            worker=context.options.name,
            threads=int(threads) if threads.isdigit() else 1,
            memory_bytes=build.memory_bytes // max(1, context.options.siblings),
            on_gpu=context.options.device.startswith("cuda"),
        )
        self._turns = TurnClock(context.scheduler, turn, context.stopped)
        self._unit: _InHand | None = None
        self._units = 0
        self._beat_at = self._reported_at = 0.0

    def serve(self) -> Turn | None:
        """Work until the turn ends; returns the one that comes after it, if there is one.

        Raises what the broker refuses.
        """
        client = self.context.connect()
        receiver = HintReceiver(
            hints.hint_queue(client, self.build.queue_key),
            name=self.context.options.name,
            read=IndexHint.from_job,
        )
        self._turns.begin()
        try:
            with self.context.board.pulse():
                with receiver:
                    self._work(receiver)
                self._drain()
        finally:
            if self._unit is not None:
                self._child.kill()
            self._child.close()
        WORKER_REPORTS.sign_off(self._client, self.context.options.name)
        self._turns.end()
        client.close()
        self._client.close()
        return self._turns.next

    def _work(self, receiver: HintReceiver[IndexHint]) -> None:
        while not self._turns.over():
            receiver.beat()
            self._report()
            if self._unit is not None:
                self._attend(self._unit)
            else:
                with receiver.receive(1) as received:
                    for hint in received:
                        self._claim(hint, receiver)
            if self._unit is not None:
                self._turns.busy()
            else:
                self._turns.idle()

    def _drain(self) -> None:
        """Finish the unit in hand, however long it takes; after a stop for `drain_s` at most."""
        while (unit := self._unit) is not None:
            if self.context.stopped.longer_than(self.context.options.drain_s):
                self._child.kill()
                unit.lease.release()
                self._let_go(unit)
                return
            self._report()
            self._attend(unit)

    # --- one unit ---

    def _claim(self, hint: IndexHint, receiver: HintReceiver[IndexHint]) -> None:
        if not self._is_ours(hint):
            self.log.info("hint_not_ours", run=hint.run, u=hint.u)
            return

        def report() -> None:
            receiver.beat()
            self._report()

        try:
            self._child.start(str(hint.unit.get("stage")), report)
        except TimeoutError as error:
            next_step = "run the worker on a machine that is less busy, or with Python on a local disk"
            raise ConfigError(f"the process that builds the index {error}", next_step=next_step) from error
        except OSError as error:
            message = f"the process that builds the index cannot be started: {error.strerror}"
            raise exhausted(error) or ConfigError(message, next_step=f"check {PYTHON} on this machine") from error
        except ChildEndedError:
            pass  # the unit meets it again, and is charged: perhaps its stage ends the process
        ledger = Ledger(self._client, hint.run, scripts=self._scripts)
        lease = Lease(hint.run, hint.gen, hint.u, new_token(hint.gen, self.context.options.name), ledger)
        claim = ledger.claim(hint.u, lease.token, lease_s=self.context.settings.lease_s, fingerprint=self.build.build)
        if not claim.granted:
            self.log.info("claim_refused", run=hint.run, u=hint.u, why=claim.word)
            return
        if not lease.begin():
            return
        step = ExitStack()
        step.enter_context(self.context.board.step("index", [Span(lease.token, hint.u)]))
        self._unit = _InHand(hint, lease, step)
        self._beat_at = time.monotonic()
        self._child.send(hint.unit)

    def _is_ours(self, hint: IndexHint) -> bool:
        """Whether a unit is one of the build that is served, and so of a folder that this machine agreed to."""
        runs = {stage.run for stage in announced(self._client) if stage.build == self.build}
        same = hint.unit.get("index") == self.build.index and hint.unit.get("build") == self.build.build
        return hint.run in runs and same

    def _attend(self, unit: _InHand) -> None:
        """Wait a moment for the answer, publish it, and keep the lease."""
        if unit.answer is None:
            try:
                answer = self._child.answer(LOOK_S)
            except ChildEndedError as ended:
                if self._child.leave_gpu():
                    # faiss ends the process on most errors of a GPU.
                    self.log.warning("index_on_cpu", why=f"the process that used the GPU {ended}")
                    self._child.send(unit.hint.unit)
                    return
                why = f"the process that did the unit {ended}; where memory ran out, give the build less of it"
                self._give_up(unit, "crash", why)
                return
            if answer is not None:
                self._answered(unit, answer)
        else:
            time.sleep(LOOK_S)
        if unit.answer is not None:
            self._publish(unit, unit.answer)
        if self._unit is not None:
            self._beat(unit)

    def _answered(self, unit: _InHand, answer: dict[str, Any]) -> None:
        error = answer.get("error")
        if error is not None and error.get("kind") in ELSEWHERE:
            self._give_up(unit, str(error.get("code")), str(error.get("message")))
            return
        unit.answer = {"v": VERSION, "worker": self.context.options.name}
        if error is not None:
            unit.answer |= {name: str(error.get(name, "")) for name in ("kind", "code", "message", "next_step")}

    def _publish(self, unit: _InHand, answer: dict[str, str | bytes | int]) -> None:
        verdict = unit.lease.publish(answer, size=sum(len(str(value)) for value in answer.values()))
        if verdict.is_full:
            return  # asked again at the next look
        if verdict is not PublishVerdict.ACCEPTED:
            self.log.info("result_not_taken", run=unit.hint.run, u=unit.hint.u, answer=verdict.value)
        self._units += 1
        self.context.report.finished()
        self._let_go(unit)

    def _beat(self, unit: _InHand) -> None:
        board, settings, lease = self.context.board, self.context.settings, unit.lease
        if self._child.has_progressed():
            board.advance()
        now = time.monotonic()
        if now - self._beat_at < settings.beat_s or board.stuck(settings.stall_s):
            return
        self._beat_at = now
        _, lost = lease.ledger.beat(lease.gen, [(lease.u, lease.token)], lease_s=settings.lease_s)
        if lost:
            self.log.warning("lease_lost", run=lease.run, u=lease.u)
            self._child.kill()
            self._let_go(unit)

    def _give_up(self, unit: _InHand, code: str, message: str) -> None:
        """Have the unit run again, charged; the last attempt that is allowed ends the build with this error."""
        self.log.warning("index_unit_failed", run=unit.hint.run, u=unit.hint.u, code=code, why=message)
        unit.lease.release(failed=(code, message))
        self._let_go(unit)

    def _let_go(self, unit: _InHand) -> None:
        unit.step.close()
        self._unit = None

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        unit = self._unit
        fields: dict[str, Any] = {
            **self.context.identity(),
            "model": "index",
            "units": self._units,
            "rows": 0,
            "rows_per_s": 0.0,
            "held": int(unit is not None),
            "runs": {},
            "unit": f"{unit.hint.unit.get('stage')}-{unit.hint.unit.get('number')}" if unit is not None else "",
            "run": "",
            "stage": "index" if unit is not None else "idle",
            "age_s": round(now - unit.lease.claimed_at, 1) if unit is not None else 0.0,
        }
        life_s = self.context.settings.lease_s * 3
        WORKER_REPORTS.report(self._client, fields, life_s=life_s, scripts=self._scripts)


class IndexChild(JsonChild):
    """`python -m embq.index.stages.process` with one unit in hand at a time. Used by one thread.

    Args:
        worker: name that stands in what it makes.
        threads: that it may use.
        memory_bytes: that it may take.
        on_gpu: whether it may use the GPU that this process sees.
    """

    def __init__(self, *, worker: str, threads: int, memory_bytes: int, on_gpu: bool = False) -> None:
        options = (
            "--worker",
            worker,
            "--threads",
            str(threads),
            "--memory",
            str(memory_bytes),
            *(["--gpu"] if on_gpu else []),
        )
        # No address of the broker: what this process reads are files.
        super().__init__(
            "-m",
            "embq.index.stages.process",
            *options,
            OMP_NUM_THREADS=str(threads),
            EMBQ_BROKER_URL="",
        )
        self._activity = (0, "")

    def leave_gpu(self) -> bool:
        """Have the processes that are started from now on use the CPU alone; False if they do so already."""
        if "--gpu" not in self.command:
            return False
        self.command.remove("--gpu")
        return True

    def has_progressed(self) -> bool:
        """Whether it has computed, read or written anything since the last call, or waits for storage.

        Elsewhere than on Linux it counts as moving as long as it lives.
        """
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
            io = Path(f"/proc/{self.pid}/io").read_text(encoding="ascii")
        except OSError:
            return True
        fields = stat.rpartition(")")[2].split()
        previous, self._activity = self._activity, (self.pid, " ".join([*fields[11:13], *io.split()]))
        return fields[0] == "D" or previous != self._activity
