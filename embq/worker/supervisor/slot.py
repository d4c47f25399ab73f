"""A slot: one device of a machine and the worker process that serves it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from embq.core.errors import Exit
from embq.core.process.children import python
from embq.core.process.children import start as start_process
from embq.core.process.limits import cores
from embq.core.settings import Settings, child_environment, machine_name
from embq.worker.embedders.device.hardware import simulated_speed
from embq.worker.meter.progress_board import InHand, ProgressBoard, Span
from embq.worker.supervisor.devices import Gpu, shown
from embq.worker.supervisor.protocol import WorkerOptions

DEVICE_FAULTS, DEVICE_FAULTS_S = 3, 600.0
"""Device faults, each with another unit, within a time after which the device is at fault, and not a unit."""
NEVER = float("inf")
DUMP_S = 0.5
"""Time for a stuck process to dump its stacks."""
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
"""For a process that computes on the CPU: glibc keeps what a pass frees for the next one. By itself it hands layers of
some MB back to the kernel again and again, which then clears each page anew: with all-MiniLM-L6-v2 in fp32 this cost
13 % and 26 % of the CPU time over 417 texts, depending on memory layout. Variables that the user sets take precedence.
"""
BLAMELESS = {Exit.DONE, Exit.USAGE, Exit.BAD_INPUT, Exit.UNAVAILABLE, Exit.OUTPUT, Exit.TRY_LATER, Exit.CONFIG}
"""Exit statuses with which a process leaves of its own accord; no unit had a part in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The processes that a supervisor runs.

    Attributes:
        devices: one process for each entry, "cpu", "cuda:N" or "sim:SPEED"; a device may be named several times.
        options: what they have in common.
        gpus: those of this machine; each "cuda:N" is one of them.
    """

    devices: tuple[str, ...]
    options: WorkerOptions
    settings: Settings
    gpus: tuple[Gpu, ...] = ()

    @property
    def real_devices(self) -> list[str]:
        """The devices that compute, and so share the machine's cores and memory."""
        return [device for device in self.devices if not simulated_speed(device)]


class Slot:
    """One device and the process that serves it.

    Args:
        gpu: what the device is; None for one that is no GPU.

    Attributes:
        refused: model that its process cannot load -> why.
        ended: (reason, next step) that its last process reported; empty if it could not report.
        why: reason for which the device was given up, in one line; "" if it was not.
    """

    def __init__(self, device: str, gpu: Gpu | None = None) -> None:
        self.device = device
        self.gpu = gpu
        self.ended = ("", "")
        self.why = ""
        self.refused: dict[str, str] = {}
        self.paths = PathMemory()
        self._state = "starting"
        self.name = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.report: int = -1
        self.board_fd: int = -1
        self.board: ProgressBoard | None = None
        self.ready = self.finished = False
        self.idle_deaths = 0
        self.stuck_in: list[InHand] = []
        self._faults: list[tuple[float, set[int]]] = []
        self.start_at = 0.0

    @property
    def label(self) -> str:
        """The device, for people."""
        return f"{self.device} ({self.gpu.name})" if self.gpu is not None and self.gpu.name else self.device

    @property
    def given_up(self) -> bool:
        """Whether the device is not used any more."""
        return bool(self.why)

    def give_up(self, why: str, next_step: str) -> None:
        """Start no process any more. `why` and `next_step` are used where the last process reported none."""
        reported, helps = self.ended
        self.why = f"{reported or why}; {helps or next_step}"
        self.start_at = NEVER

    @property
    def doing(self) -> str:
        """State of the process: one of `embq.core.queue.heartbeats.STATES`."""
        if self.process is not None:
            return self._state
        return "given_up" if self.given_up else "over" if self.over else "starting"

    @property
    def over(self) -> bool:
        """Whether no process will be started any more: the one run asked for is over, or the device was given up."""
        return self.process is None and self.start_at == NEVER

    @property
    def at_work(self) -> bool:
        """Whether its process starts, loads a model or has a unit in hand."""
        return self.doing in ("starting", "loading") or any(step.units for step in self._steps())

    def _steps(self) -> list[InHand]:
        return self.board.in_hand() if self.board is not None else []

    @property
    def may_start(self) -> bool:
        """Whether it is time for a process."""
        return self.process is None and self.start_at <= time.monotonic()

    def start(self, fleet: Fleet) -> None:
        """Start a process under a new name; with a name used twice, leases of a zombie would look like its own."""
        host = re.sub(r"[^A-Za-z0-9]+", "-", machine_name())
        self.name = f"{host}.{self.device.replace(':', '')}.{secrets.token_hex(3)}"
        self.ready = self.finished = False
        self._state = "starting"
        self.refused = {}
        self.ended = ("", "")
        self.stuck_in = []
        self.report, report_for_child = os.pipe()
        os.set_blocking(self.report, False)
        self.board_fd = ProgressBoard.allocate()
        self.board = ProgressBoard(self.board_fd)
        options = replace(
            fleet.options,
            name=self.name,
            device=self.device,
            report_fd=report_for_child,
            progress_fd=self.board_fd,
            siblings=len(fleet.real_devices),
            without=sorted(self.paths.without),
        )
        try:
            self.process = start_process(
                python("-m", "embq.worker.process", json.dumps(asdict(options))),
                pass_fds=(report_for_child, self.board_fd),
                environment=self.paths.begin(self.device, _child_env(fleet, self.device, self.gpu)),
            )
        finally:
            os.close(report_for_child)

    def read_report(self) -> None:
        """Read what the process has reported since the last call."""
        try:
            reported = os.read(self.report, 65536)
        except BlockingIOError:
            return
        for line in map(json.loads, reported.splitlines()):
            match line:
                case {"state": state}:
                    self._state = state
                    self.ready = self.ready or state == "serving"
                case {"finished": _}:
                    self.finished = True
                case {"ends": why, "next": next_step}:
                    self.ended = (why, next_step)
                case {"paths": names}:
                    self.paths.record_paths(names)
                case {"model": model, "why": why}:
                    self.refused[model] = why if self.gpu is None else f"{self.label}: {why}"

    def replace_stuck(self, limit_s: float) -> InHand | None:
        """Kill a process of which one step has not advanced for that long; returns the step.

        It may hold the interpreter's lock in a call that never returns, so it is only asked to dump its stacks.
        """
        if self.stuck_in or self.board is None:
            return None  # it was killed already, and the kernel takes its time
        steps = self.board.stuck(limit_s)
        if steps and self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_S)
            self.process.kill()
            self.stuck_in = steps
            return next((step for step in steps if step.units), steps[0])
        return None

    def in_hand(self) -> list[Span]:
        """Units that its process had in hand when it ended; of a stuck one, only those of stuck steps."""
        return [span for step in self.stuck_in or self._steps() for span in step.units]

    def is_broken(self, status: int) -> bool:
        """Whether a death with `status` is one device fault too many: each came with other units."""
        if status != Exit.DEVICE:
            return False
        now = time.monotonic()
        self._faults = [(at, units) for at, units in self._faults if now - at < DEVICE_FAULTS_S]
        self._faults.append((now, {span.u for span in self.in_hand()}))
        earlier: set[int] = set()
        different = 0
        for _, units in self._faults:
            different += not units & earlier
            earlier |= units
        return different >= DEVICE_FAULTS

    def count_death(self, status: int) -> None:
        """Count a death without progress: of a process that had finished no unit, and that no unit can have ended.

        A unit in hand is charged with the death, and is tried three times at most. A process that leaves of its own
        accord after its model was ready waits for something else, such as room on the disk of the output.
        """
        if self.finished or self.in_hand():
            self.idle_deaths = 0
        elif not self.ready or status not in BLAMELESS:
            self.idle_deaths += 1

    def clear(self) -> None:
        """Close the pipe and the board of a process that has ended."""
        os.close(self.report)
        os.close(self.board_fd)
        if self.board is not None:
            self.board.close()
        self.process = self.board = None


def _child_env(fleet: Fleet, device: str, gpu: Gpu | None = None) -> dict[str, str]:
    """Show the process its GPU and no other, and share the cores out between the processes of this machine; without
    that each starts a thread per core."""
    share = max(1, cores() // max(1, len(fleet.real_devices)))
    memory = KEPT_MEMORY if device == "cpu" else {}
    gpu_env = shown(gpu) if gpu is not None else {}
    return memory | child_environment(
        # By environment, because a password does not belong on a command line.
        EMBQ_BROKER_URL=fleet.settings.broker_url,
        OMP_NUM_THREADS=fleet.settings.omp_threads or str(share),
        # The threads that prepare tokenise side by side; each with a pool of its own would be too many.
        TOKENIZERS_PARALLELISM="false",
        **gpu_env,
    )


EXPANDABLE = "expandable_segments"


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""torch from 2.6 to 2.15 reads this name, and if it is set not the new one, PYTORCH_ALLOC_CONF, which 2.9 ignores
for expandable segments. 2.9 to 2.11 warn once that it is deprecated; later ones do not."""


ALLOCATORS = {ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Variables that configure the allocator; where the user sets one, embq sets none."""


NOT_EXPANDABLE = (Path("/dev/dxg"), Path("/dev/kfd"))
"""WSL2, where drivers before R615 fail at the first allocation, and AMD GPUs, for which torch has none."""


FAULTS = {Exit.DEVICE, -signal.SIGABRT}
"""Exit statuses with which a process ends whose device is broken: torch may abort where it frees what was on it."""


class PathMemory:
    """Optional compute paths of one device that the next process disables, because earlier processes died with them.

    `embq.worker.embedders.device.tuning` has the paths of a process. Its allocator counts as one of them:
    expandable segments fail at the first allocation where the driver has no virtual memory (some vGPUs, Jetson).

    Attributes:
        without: names of the disabled paths.
    """

    def __init__(self) -> None:
        self.without: frozenset[str] = frozenset()
        self._allocator: frozenset[str] = frozenset()
        self._used: frozenset[str] = frozenset()

    def begin(self, device: str, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process that starts now.

        With expandable segments, memory that passes of one size have freed serves those of another; each flat batch has
        another size.
        """
        is_chosen = bool(ALLOCATORS & environment.keys())
        has_them = device.startswith("cuda") and not any(path.exists() for path in NOT_EXPANDABLE)
        self._used = self._allocator = frozenset()
        if is_chosen or not has_them or EXPANDABLE in self.without:
            return dict(environment)
        self._used = self._allocator = frozenset({EXPANDABLE})
        return {**environment, ALLOCATOR: f"{EXPANDABLE}:True"}

    def record_paths(self, names: Collection[str]) -> None:
        """Record the paths that the process tries or uses."""
        self._used = self._allocator | frozenset(names)

    def record_end(self, status: int) -> None:
        """Record the exit status of the process.

        A process that dies with every path disabled shows that the disabled ones are not the cause.
        """
        if status in FAULTS:
            self.without = self.without | self._used if self._used else frozenset()
