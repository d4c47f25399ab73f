"""Runs one training of the benchmark in a folder of its own, with its judgement beside the log."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from embq.core.benchmark_record import make_folder, unwritable, versions, write
from embq.core.errors import ConfigError, InputError, OutputError
from embq.core.service.progress_line import ProgressLine, duration, size_text
from embq.core.settings import Settings
from embq.training.launch.child_process import run_with_outcomes
from embq.training.launch.outcomes import Outcome, by_signal, cause
from embq.training.mmoclip import folder, required
from embq.training.mmoclip.judgement import Judgement, judge
from embq.training.mmoclip.launch_plan import FIRST_HOST, BenchmarkRequest, Plan, plan, processes_here
from embq.training.openclip import log
from embq.training.run.scratch import scratch

LOOK_S = 0.5


class LogProgress:
    """Shows progress on stderr from the log that a training writes.

    One line that is written over on a terminal, a line every 30 s elsewhere.

    Args:
        path: the log; it need not be there yet.
        iterations: that the training will have.
    """

    def __init__(self, path: Path, iterations: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._iterations = iterations
        self._clock = clock
        self._began = clock()
        self._times: list[float] = []
        self._rate = 0.0
        self._read = 0
        self._rest = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="following", daemon=True)

    def __enter__(self) -> LogProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def line(self) -> str:
        """The progress line."""
        done, took = len(self._times), self._clock() - self._began
        if not done:
            return f"starting: {duration(took)}; the first iteration takes longest, and is not counted"
        left = "the rest cannot be told before the second iteration"
        if counted := self._times[1:]:
            mean = sum(counted) / len(counted)
            left = f"{mean:.3g} s each, about {duration(mean * (self._iterations - done))} left"
        return f"iteration {done:,} of {self._iterations:,}, {self._rate:,.4g} samples/s, {left}"

    def look(self) -> None:
        """Read what was appended to the log."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        self._read += len(data)
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if (found := log.iteration(line, 0)) is not None:
                self._times.append(found.batch_s)
                self._rate = found.per_s

    def _watch(self) -> None:
        with ProgressLine() as shown:
            while not self._over.wait(LOOK_S):
                self.look()
                shown.show(self.line())


CONSOLE = "console.log"
"""Output of all processes."""
RESULT, PICTURE = "result.json", "throughput.png"
CHECKPOINT_BYTES = 5_200_000_000
"""open_clip writes one at the end: ViT-L-14's 428 million weights and two moments of each, in fp32."""
SCONTROL_S = 30.0


def processes(asked: BenchmarkRequest) -> int:
    """Processes of each node; raises what `processes_here` does."""
    return processes_here(asked, os.environ, shutil.which("srun"))


def planned(asked: BenchmarkRequest, count: int, out: Path) -> Plan:
    """The training by `count` processes per node, in a new folder below `out`, which is not created yet.

    Raises what `plan` does.
    """
    first_host = FIRST_HOST
    if asked.launcher == "srun" and (nodes := os.environ.get("SLURM_JOB_NODELIST")) and shutil.which("scontrol"):
        first_host = _first_host(nodes)
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    place = next(out / one for one in names if not (out / one).exists())
    return plan(asked, count, place.absolute(), os.environ, first_host=first_host)


def run(made: Plan) -> Judgement | None:
    """Train, and write the judgement to the training's folder, with a plot where there is an iteration.

    None where the training ended well and another node has the log: that of the first process of all.

    Raises:
        OutputError: the folder cannot be written, or has no room for the checkpoint.
        InputError: the training ended before its log began.
        KeyboardInterrupt: it was stopped and has ended; the judgement of what it did is in the folder.
    """
    make_folder(made.place)
    _room(made)
    log = made.place / "logs" / required.NAME / folder.LOG
    note = _note(made)
    write(made.place / folder.LAUNCH, note)
    status, words = None, "it was stopped"
    try:
        # Beside the log, which all nodes of a Slurm job see.
        with _console(made.place) as console, scratch(made.place, ".outcomes-") as outcomes:
            with LogProgress(log, made.iterations):
                ended, status = run_with_outcomes(made.command, outcomes, made.environment, console)
            words = _last_words(ended, status)
    finally:
        write(made.place / folder.LAUNCH, {**note, "status": status, "last_words": words})
        _drop_weights(log.parent)
        found = keep(judge(folder.find(log)), made.place) if log.exists() else None
    if found is not None or (made.asked.nodes > 1 and not status):
        return found
    raise InputError(
        f"the training ended with status {status} before its log began: {words}",
        next_step=f"its output is in {made.place / CONSOLE}",
    )


def keep(one: Judgement, place: Path) -> Judgement:
    """Write a judgement to a folder, with a plot where there is an iteration."""
    write(place / RESULT, one.describe())
    if one.training.log.iterations:
        from embq.training.mmoclip.picture import draw

        draw(one, place / PICTURE)
    return one


def _note(made: Plan) -> dict[str, Any]:
    """Facts of a training that its log lacks."""
    asked = made.asked
    return {
        "schema": 1,
        "launcher": made.launcher,
        "command": list(made.command),
        "environment": dict(made.environment),
        "nodes": asked.nodes,
        "processes": made.processes,
        "device": asked.device,
        "gpu": _gpus(made.processes) if asked.device == "cuda" else "",
        "tf32": asked.device == "cuda",
        "versions": versions(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _gpus(processes: int) -> str:
    """Names of the GPUs of this node that are trained on; "" where they are not known."""
    from embq.worker.supervisor.devices import find_gpus

    gpus = find_gpus(Settings.from_environment().cuda_visible)[:processes]
    return ", ".join(dict.fromkeys(gpu.name for gpu in gpus if gpu.name))


def _first_host(nodes: str) -> str:
    """The first node of a list in Slurm's notation."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"scontrol cannot name the nodes of this allocation, {nodes}: {error}",
            next_step="see that `scontrol show hostnames` works in this job",
        ) from error
    return (done.stdout.split() or [FIRST_HOST])[0]


def _room(made: Plan) -> None:
    free = shutil.disk_usage(made.place).free
    if made.asked.model == required.MODEL and free < CHECKPOINT_BYTES:
        raise OutputError(
            f"{made.place} has {size_text(free)} of room, and open_clip ends a training with a checkpoint, "
            f"{size_text(CHECKPOINT_BYTES)} with this model, which cannot be turned off",
            next_step="make room, or give --output on a larger disk",
        )


def _console(place: Path) -> Any:
    try:
        return (place / CONSOLE).open("w", encoding="utf-8")
    except OSError as error:
        raise unwritable(error, place / CONSOLE) from error


def _last_words(outcomes: Sequence[Outcome], status: int) -> str:
    """The reason for the end of a training; "" for a status of 0."""
    if not status:
        return ""
    failed = cause(outcomes)
    if by_signal(status) and (failed is None or failed.follows):
        return f"signal {status - 128} ended it; 9 is also what the kernel sends without memory"
    return (failed.message if failed is not None and failed.message else f"see {CONSOLE}")[:240]


def _drop_weights(log_folder: Path) -> None:
    """Remove the checkpoint of 5 GB: at a learning rate of 0 nothing was learned."""
    shutil.rmtree(log_folder / "checkpoints", ignore_errors=True)
