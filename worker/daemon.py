"""The supervisor: one worker process per device, replaced when it dies, given up when it keeps dying at once."""

from __future__ import annotations

import os
import re
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from core.embedded import die_with_parent
from core.errors import ConfigError, EmbqError, Exit
from core.ledger import Ledger, load_scripts
from core.log import Events
from core.registry import registered
from core.settings import Settings, child_environment
from core.stopping import StopFlag
from worker.serving import READY, WORKED

EARLY_DEATHS = 5
"""Deaths in a row, without a published unit between them, after which restarting is not worth trying again."""
RESTART_PAUSE_S = 0.5
POLL_S = 0.1
NEVER = float("inf")
NO_RESTART = {Exit.USAGE, Exit.BAD_INPUT, Exit.CONFIG}
"""Exit statuses that a restart cannot mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What the supervisor runs.

    Attributes:
        devices: one process for each entry, "cpu" or "cuda:N"; a device may be named several times.
        run: serve only this run and end when it is over; "" serves every run until stopped.
    """

    devices: tuple[str, ...]
    run: str
    prefetch: int
    threads: int
    batch_size: int
    transport: str
    drain_s: float
    version: str
    settings: Settings


def find_devices(wanted: str, cuda_visible: str | None) -> tuple[str, ...]:
    """The devices that `--devices` names: "auto" is every CUDA device, or the CPU where there is none.

    Nothing is initialised on a device here: a CUDA context in the supervisor would outlive every worker.

    Args:
        wanted: "auto" or a list of devices.
        cuda_visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
    """
    if wanted != "auto":
        names = tuple(part.strip() for part in wanted.split(",") if part.strip())
        for name in names:
            if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
                raise ConfigError(
                    f"unknown device {name!r}", next_step="use cpu, cuda:0 or a list such as cuda:0,cuda:2"
                )
        return names
    if cuda_visible is not None:
        count = len([part for part in cuda_visible.split(",") if part.strip() not in ("", "-1")])
    else:
        count = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    return tuple(f"cuda:{i}" for i in range(count)) or ("cpu",)


class Slot:
    """One device and the process that serves it now."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.name = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.report: int = -1
        self.worked = False
        self.early_deaths = 0
        self.start_at = 0.0

    @property
    def over(self) -> bool:
        """Whether its last process ended because the one run asked for is over."""
        return self.process is None and self.start_at == NEVER

    def start(self, fleet: Fleet) -> None:
        """Start a fresh process under a fresh name; a name that is used twice could not be told from a zombie."""
        host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())
        self.name = f"{host}.{self.device.replace(':', '')}.{secrets.token_hex(3)}"
        self.worked = False
        self.report, report_for_child = os.pipe()
        os.set_blocking(self.report, False)
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "worker.process",
                    *("--name", self.name),
                    *("--device", self.device),
                    *("--run", fleet.run),
                    *("--prefetch", str(fleet.prefetch)),
                    *("--threads", str(fleet.threads)),
                    *("--batch-size", str(fleet.batch_size)),
                    *("--transport", fleet.transport),
                    *("--drain-s", str(fleet.drain_s)),
                    *("--report-fd", str(report_for_child)),
                    *("--version", fleet.version),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(report_for_child,),
                env=_child_env(fleet),
                process_group=0,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(report_for_child)

    def read_report(self) -> set[bytes]:
        """The words that the process has said since the last call."""
        try:
            said = os.read(self.report, 64)
        except BlockingIOError:
            return set()
        words = {word for word in (READY, WORKED) if word in said}
        if WORKED in words:
            self.worked = True
            self.early_deaths = 0
        return words

    def clear(self) -> None:
        """Forget a process that has ended."""
        os.close(self.report)
        self.process = None


def _child_env(fleet: Fleet) -> dict[str, str]:
    """Share the cores out between the processes of this machine; without it each starts a thread per core."""
    share = max(1, (os.cpu_count() or 1) // len(fleet.devices))
    return child_environment(
        # By environment, because a password does not belong on a command line.
        EMBQ_BROKER_URL=fleet.settings.broker_url,
        OMP_NUM_THREADS=fleet.settings.omp_threads or str(share),
    )


class Supervisor:
    """Keeps every slot alive.

    Args:
        client: a patient client, for freeing the leases of processes that died.
    """

    def __init__(self, client: redis.Redis, fleet: Fleet) -> None:
        self.client = client
        self.fleet = fleet
        self.slots = [Slot(device) for device in fleet.devices]
        self.log = Events("supervisor")

    def serve(self, stopped: StopFlag) -> None:
        """Run until stopped, until the one run asked for is over, or until a slot cannot be kept alive.

        Raises EmbqError with the exit status of the process that could not be mended by restarting it.
        """
        try:
            while not stopped():
                now = time.monotonic()
                for slot in self.slots:
                    if slot.process is None and slot.start_at <= now:
                        slot.start(self.fleet)
                        self.log.info("worker_started", worker=slot.name, device=slot.device)
                self._wait(POLL_S)
                for slot in self.slots:
                    self._look_after(slot)
                if all(slot.over for slot in self.slots):
                    return
        finally:
            self._stop_all(stopped)

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
        process = slot.process
        if process is None:
            return
        slot.read_report()
        status = process.poll()
        if status is None:
            return
        slot.read_report()
        slot.clear()
        freed = self._free_leases(slot.name, status)
        if status == Exit.DONE and self.fleet.run:
            slot.start_at = NEVER
            return
        self.log.warning("worker_died", worker=slot.name, status=status, leases_freed=freed)
        if status in NO_RESTART:
            raise _given_up(slot, status, "starting it again cannot mend that")
        if not slot.worked:
            slot.early_deaths += 1
        if slot.early_deaths >= EARLY_DEATHS:
            raise _given_up(slot, status, f"it has died {EARLY_DEATHS} times in a row before it got anything done")
        slot.start_at = time.monotonic() + (RESTART_PAUSE_S * slot.early_deaths)

    def _free_leases(self, name: str, status: int) -> int:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        scripts = load_scripts(self.client)
        return sum(
            Ledger(self.client, run, scripts=scripts).abandon(name, f"the worker {name} ended with {how}")
            for run in registered(self.client)
        )

    def _stop_all(self, stopped: StopFlag) -> None:
        """Let every process drain; a second request to stop is passed on, and ends the draining."""
        asked = 0
        deadline = time.monotonic() + self.fleet.drain_s + 15
        processes = [slot.process for slot in self.slots if slot.process is not None]
        while running := [process for process in processes if process.poll() is None]:
            if asked < max(1, stopped.count):
                asked += 1
                for process in running:
                    process.terminate()
            if time.monotonic() > deadline:
                for process in running:
                    process.kill()
            time.sleep(POLL_S)
        for slot in self.slots:
            if slot.process is not None:
                status = slot.process.wait()
                slot.clear()
                if status:
                    self._free_leases(slot.name, status)


def _given_up(slot: Slot, status: int, why: str) -> EmbqError:
    error = EmbqError(
        f"the worker on {slot.device} ended with status {status}: {why}",
        next_step="its own message stands above; `embq doctor` checks devices and models",
        code="worker",
    )
    known = {int(code): code for code in Exit}
    error.exit_code = known.get(status, Exit.UNAVAILABLE)
    return error


def devices_of(wanted: str, per_device: int, cuda_visible: str | None) -> Sequence[str]:
    """The devices, each `per_device` times."""
    return tuple(device for device in find_devices(wanted, cuda_visible) for _ in range(per_device))
