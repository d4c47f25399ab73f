"""Runs one training of the benchmark in a folder of its own, with its judgement beside the log."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from embq.core.benchmark_record import make_folder, unwritable, versions, write
from embq.core.errors import InputError, OutputError
from embq.core.service.progress_line import ProgressLine, duration, size_text
from embq.core.settings import Settings
from embq.training.launch.child_process import run_with_outcomes
from embq.training.launch.outcomes import ProcessOutcome, by_signal, cause
from embq.training.mmoclip import folder, required
from embq.training.mmoclip.judgement import Judgement, judge
from embq.training.mmoclip.launch_plan import LaunchPlan
from embq.training.openclip import log
from embq.training.run.scratch import scratch


class LogProgress:
    """Progress of a training, from the log that it writes.

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

    def line(self) -> str:
        """The progress line."""
        done, took = len(self._times), self._clock() - self._began
        if not done:
            return f"starting: {duration(took)}; the first iteration takes longest, and is not counted"
        remaining = "the rest is not known before the second iteration"
        if counted := self._times[1:]:
            mean = sum(counted) / len(counted)
            remaining = f"{mean:.3g} s each, about {duration(mean * (self._iterations - done))} left"
        return f"iteration {done:,} of {self._iterations:,}, {self._rate:,.4g} samples/s, {remaining}"

    def poll(self) -> None:
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
            if (iteration := log.iteration(line, 0)) is not None:
                self._times.append(iteration.batch_s)
                self._rate = iteration.per_s

    def show(self, shown: ProgressLine) -> None:
        """Look, and show the progress line."""
        self.poll()
        shown.show(self.line())


CONSOLE = "console.log"
"""Output of all processes."""
RESULT, PICTURE = "result.json", "throughput.png"
CHECKPOINT_BYTES = 5_200_000_000
"""open_clip writes one at the end: ViT-L-14's 428 million weights and two moments of each, in fp32."""


def run(plan: LaunchPlan) -> Judgement | None:
    """Train, and write the judgement to the training's folder, with a plot if there is an iteration.

    None if the training ended well and another node has the log: that of the first process of all.

    Raises:
        OutputError: the folder cannot be written, or has no room for the checkpoint.
        InputError: the training ended before its log began.
        KeyboardInterrupt: it was stopped and has ended; the judgement of what it did is in the folder.
    """
    make_folder(plan.place)
    _room(plan)
    log = plan.place / "logs" / required.NAME / folder.LOG
    note = _note(plan)
    write(plan.place / folder.LAUNCH, note)
    status, words = None, "it was stopped"
    try:
        # Beside the log, which all nodes of a Slurm job see.
        with _console(plan.place) as console, scratch(plan.place, ".outcomes-") as outcomes, ProgressLine() as shown:
            show = partial(LogProgress(log, plan.iterations).show, shown)
            ended, status = run_with_outcomes(plan.command, outcomes, plan.environment, console, show)
        words = _last_words(ended, status)
    finally:
        write(plan.place / folder.LAUNCH, {**note, "status": status, "last_words": words})
        # A checkpoint of 5 GB: at a learning rate of 0 nothing was learned.
        shutil.rmtree(log.parent / "checkpoints", ignore_errors=True)
        judgement = keep(judge(folder.find(log)), plan.place) if log.exists() else None
    if judgement is not None or (plan.request.nodes > 1 and not status):
        return judgement
    raise InputError(
        f"the training ended with status {status} before its log began: {words}",
        next_step=f"its output is in {plan.place / CONSOLE}",
    )


def keep(judgement: Judgement, place: Path) -> Judgement:
    """Write a judgement to a folder, with a plot if there is an iteration."""
    write(place / RESULT, judgement.describe())
    if judgement.training.log.iterations:
        from embq.training.mmoclip.picture import draw

        draw(judgement, place / PICTURE)
    return judgement


def _note(plan: LaunchPlan) -> dict[str, Any]:
    """Facts of a training that its log lacks."""
    request = plan.request
    return {
        "schema": 1,
        "launcher": plan.launcher,
        "command": list(plan.command),
        "environment": dict(plan.environment),
        "nodes": request.nodes,
        "processes": plan.processes,
        "device": request.device,
        "gpu": _gpus(plan.processes) if request.device == "cuda" else "",
        "tf32": request.device == "cuda",
        "versions": versions(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _gpus(processes: int) -> str:
    """Names of the GPUs of this node that are trained on; "" if they are not known."""
    from embq.worker.supervisor.devices import find_gpus

    gpus = find_gpus(Settings.from_environment().cuda_visible)[:processes]
    return ", ".join(dict.fromkeys(gpu.name for gpu in gpus if gpu.name))


def _room(plan: LaunchPlan) -> None:
    free = shutil.disk_usage(plan.place).free
    if plan.request.model == required.MODEL and free < CHECKPOINT_BYTES:
        raise OutputError(
            f"{plan.place} has {size_text(free)} of room, and open_clip ends a training with a checkpoint, "
            f"{size_text(CHECKPOINT_BYTES)} with this model, which cannot be turned off",
            next_step="make room, or give --output on a larger disk",
        )


def _console(place: Path) -> Any:
    try:
        return (place / CONSOLE).open("w", encoding="utf-8")
    except OSError as error:
        raise unwritable(error, place / CONSOLE) from error


def _last_words(outcomes: Sequence[ProcessOutcome], status: int) -> str:
    """The reason for the end of a training; "" for a status of 0."""
    if not status:
        return ""
    failed = cause(outcomes)
    if by_signal(status) and (failed is None or failed.follows):
        return f"signal {status - 128} ended it; 9 is also what the kernel sends without memory"
    return (failed.message if failed is not None and failed.message else f"see {CONSOLE}")[:240]
