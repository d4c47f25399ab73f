"""Supervises worker processes: replaces those that die or hang, and gives up devices that cannot serve."""

from __future__ import annotations

import queue
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import redis

from embq.core.errors import EmbqError, Exit
from embq.core.queue.heartbeats import WORKER_REPORTS
from embq.core.queue.ledger import Ledger
from embq.core.queue.other_work import announced
from embq.core.queue.runs import active
from embq.core.queue.scripts import load_scripts
from embq.core.service.log import Events
from embq.core.service.stopping import StopFlag
from embq.worker.supervisor.slot import BLAMELESS, NEVER, Fleet, Slot

IDLE_DEATHS = 5
"""Deaths in a row without progress after which a device is given up. Other deaths are the fault of a unit, which is
isolated, or of the device."""
RESTART_PAUSE_S = 0.5
POLL_S = 0.1
PAUSE_S = 5.0
"""A supervisor that has not polled its workers for so long was itself suspended."""
FREE_S = 5.0
"""Time at the end for freeing the leases of processes that did not give them back."""
DRAIN_GRACE_S = 15.0
"""Time beyond its drain timeout for a process to give its leases back and end."""
DEVICE_NEXT = "look for it with nvidia-smi and in dmesg, mend it, and start the worker again"
NO_RESTART = {Exit.USAGE, Exit.BAD_INPUT, Exit.CONFIG}
"""Exit statuses of errors that a restart does not cure."""


class Supervisor:
    """Keeps a worker process running in every slot.

    Args:
        client: a patient client, for freeing the leases of processes that died.
        beat: called in each round, also while processes drain.
        idle_exit_s: seconds without a unit in hand after which it ends.

    Attributes:
        draining: no process is started any more; the running ones finish their begun units.
    """

    def __init__(
        self,
        client: redis.Redis,
        fleet: Fleet,
        beat: Callable[[], None] = lambda: None,
        *,
        idle_exit_s: float = float("inf"),
    ) -> None:
        self.fleet = fleet
        gpus = {f"cuda:{gpu.number}": gpu for gpu in fleet.gpus}
        self.slots = [Slot(device, gpus.get(device)) for device in fleet.devices]
        self.freer = LeaseFreer(client)
        self._beat = beat
        self.deaths: Counter[tuple[str, str]] = Counter()  # (device, status) -> processes that ended by themselves
        self.log = Events("supervisor")
        self.draining = False
        self._idle_exit_s = idle_exit_s
        self._busy_at = self._looked_at = self._watching_since = time.monotonic()

    def serve(self, stopped: StopFlag) -> None:
        """Run until stopped or idle for long, until the one run asked for is over, or until no slot can be kept alive.

        A device that cannot serve is given up alone. Raises EmbqError if none is left, with the exit status of the
        last process.
        """
        self.freer.start()
        try:
            while not stopped():
                self._beat()
                for slot in self.slots:
                    if slot.may_start:
                        slot.start(self.fleet)
                        self.log.info("worker_started", worker=slot.name, device=slot.device)
                self._wait(POLL_S)
                for slot in self.slots:
                    self._look_after(slot)
                if self.freer.error is not None:
                    raise self.freer.error
                if all(slot.over for slot in self.slots):
                    return
                if any(slot.at_work for slot in self.slots):
                    self._busy_at = time.monotonic()
                elif time.monotonic() - self._busy_at > self._idle_exit_s:
                    self.log.info("idle_exit", seconds=round(self._idle_exit_s))
                    return
        finally:
            self.draining = True
            self._stop_all(stopped)
            self.freer.close(FREE_S)

    def complaint(self) -> str:
        """The problem with the devices in one line; "" while one of them has a process."""
        if any(slot.process is not None for slot in self.slots):
            return ""
        devices = ", ".join(sorted({slot.device for slot in self.slots}))
        if all(slot.over for slot in self.slots):
            return f"no device is left: {devices}"
        return f"no worker process is alive; it is started again on {devices}"

    def _wait(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            for slot in self.slots:
                if slot.process is not None:
                    selector.register(slot.report, selectors.EVENT_READ)
            if not selector.get_map():
                time.sleep(seconds)
                return
            selector.select(seconds)

    def _look_after(self, slot: Slot) -> None:
        if slot.process is None:
            return
        slot.read_report()
        status = slot.process.poll()
        if status is None:
            limit_s = self.fleet.settings.stall_s
            if self._watched_for(limit_s) and (step := slot.replace_stuck(limit_s)):
                seconds = round(time.monotonic() - step.since)
                self.log.error("stuck", worker=slot.name, stage=step.stage, seconds=seconds, units=len(step.units))
            return
        slot.read_report()
        self._free_leases(slot, status)
        broken = slot.is_broken(status)
        slot.count_death(status)
        slot.paths.record_end(status)
        stuck = bool(slot.stuck_in)
        slot.clear()
        if status == Exit.DONE and self.fleet.options.run:
            slot.start_at = NEVER
            return
        self.deaths[slot.device, "stuck" if stuck else str(status)] += 1
        self.log.warning("worker_died", worker=slot.name, status=status)
        if status in NO_RESTART:
            self._give_up(slot, status, f"its process ended with status {status}, which starting it again cannot mend")
        elif broken:
            self._give_up(slot, Exit.UNAVAILABLE, "it failed with one unit after the other", DEVICE_NEXT)
        elif slot.idle_deaths >= IDLE_DEATHS:
            milestone = "a unit was finished" if slot.ready else "its model was ready"
            self._give_up(slot, status, f"its process has died {IDLE_DEATHS} times in a row before {milestone}")
        else:
            slot.start_at = time.monotonic() + RESTART_PAUSE_S * slot.idle_deaths

    def _give_up(self, slot: Slot, status: int, why: str, next_step: str = "its messages stand in the log") -> None:
        """Stop using a device; raises if no other is left."""
        slot.give_up(why, next_step)
        name = slot.gpu.name if slot.gpu is not None else ""
        self.log.error("device_given_up", device=slot.device, name=name, worker=slot.name, why=slot.why)
        if all(other.given_up for other in self.slots):
            raise _none_left(self.slots, status)

    def _watched_for(self, seconds: float) -> bool:
        """Whether this process ran without a pause for so long: on a suspended machine, no process advances."""
        now = time.monotonic()
        if now - self._looked_at > PAUSE_S:
            self._watching_since = now
        self._looked_at = now
        return now - self._watching_since > seconds

    def _free_leases(self, slot: Slot, status: int) -> None:
        how = f"ended with signal {-status}" if status < 0 else f"ended with status {status}"
        if slot.stuck_in:
            how = f"stood still in the stage {' and '.join(step.stage for step in slot.stuck_in)}"
        in_hand = [] if status in BLAMELESS else slot.in_hand()
        blame = {span.token: span.first if span.first == span.last >= 0 else None for span in in_hand}
        self.freer.submit(slot.name, f"the worker {slot.name} {how}", blame)

    def _stop_all(self, stopped: StopFlag) -> None:
        """Drain every process; a second request to stop is passed on and ends the draining."""
        signals_sent = 0
        deadline = time.monotonic() + self.fleet.options.drain_s + DRAIN_GRACE_S
        alive = [slot for slot in self.slots if slot.process is not None]
        late: set[str] = set()
        while running := [slot for slot in alive if slot.process is not None and slot.process.poll() is None]:
            self._beat()
            for slot in running:
                if slot.process is None:
                    continue
                if signals_sent < max(1, stopped.count):
                    slot.process.terminate()
                if time.monotonic() > deadline:
                    late.add(slot.name)
                    slot.process.kill()
            signals_sent = max(signals_sent, max(1, stopped.count))
            time.sleep(POLL_S)
        for slot in alive:
            if slot.process is not None and (status := slot.process.wait()):
                # A process that was killed because it drained too long charges no unit.
                self._free_leases(slot, Exit.DONE if slot.name in late else status)
            slot.clear()


def _none_left(slots: Sequence[Slot], status: int) -> EmbqError:
    causes = {slot.label: slot.why for slot in slots}
    listed = "; ".join(f"{label}: {why}" for label, why in causes.items())
    error = EmbqError(
        f"no device is left: {listed}" if len(causes) > 1 else f"the worker on {listed}",
        next_step="what the processes said stands above; `embq doctor` checks devices and models",
        code="worker",
    )
    error.exit_code = Exit(status) if status in set(Exit) else Exit.UNAVAILABLE
    return error


class LeaseFreer(threading.Thread):
    """Frees the leases of workers that died, one after the other.

    Args:
        client: a patient client that no other thread uses.

    Attributes:
        error: a refusal of the broker, which waiting does not cure.
    """

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(name="lease-freer", daemon=True)
        self.client = client
        self.log = Events("supervisor")
        self.error: Exception | None = None
        self._deaths: queue.SimpleQueue[tuple[str, str, Mapping[str, int | None]] | None] = queue.SimpleQueue()

    def submit(self, worker: str, message: str, blame: Mapping[str, int | None]) -> None:
        """Free the leases of a worker that ended, as soon as the broker answers.

        Args:
            message: how it ended, for the failure of a unit that is given up because of it.
            blame: token of each unit that it had in hand -> ordinal of the sample, if only one was in hand.
        """
        self._deaths.put((worker, message, blame))

    def run(self) -> None:
        """Work until `close`."""
        try:
            while (death := self._deaths.get()) is not None:
                worker, message, blame = death
                scripts = load_scripts(self.client)
                freed = sum(
                    Ledger(self.client, run, scripts=scripts).abandon(worker, message, blame=blame)
                    for run in (*active(self.client), *(run for run, _ in announced(self.client)))
                )
                WORKER_REPORTS.sign_off(self.client, worker)
                self.log.info("leases_freed", worker=worker, units=freed)
        except Exception as error:  # noqa: BLE001 - thread boundary: the supervisor ends with it
            self.error = error

    def close(self, timeout_s: float) -> None:
        """Finish the submitted deaths; leases that are not freed in time expire by themselves."""
        self._deaths.put(None)
        self.join(timeout_s)
