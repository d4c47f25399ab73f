"""Judges a training as a result of the benchmark: figures, completeness, and comparability with the baseline."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from embq.core import wire
from embq.core.errors import Exit
from embq.training.mmoclip import required
from embq.training.mmoclip.folder import Training
from embq.training.openclip.log import Iteration, OpenClipLog

LOSS_TOLERANCE = 0.05
"""Between neighbours in bf16, at a loss of 9.7, lie 0.06; half as many processes are 0.69 less."""


def faults(training: Training) -> tuple[Sequence[str], Sequence[str]]:
    """Reasons why a log has no total, in sentences: its contradictions, and what it lacks."""
    log = training.log
    if not log.iterations:
        return (), (_unfinished(0, None) + _ending(training),)
    if log.restarts:
        where = ", ".join(map(str, log.restarts[:3]))
        return (f"{log.path} holds {len(log.restarts) + 1} trainings: another begins at line {where}",), ()
    contradictions = [*_other_arguments(training), *_other_figures(training)]
    return contradictions, () if contradictions else _missing(training)


def _other_arguments(training: Training) -> list[str]:
    """Arguments that differ between `params.txt` and the log."""
    params, logged = training.params, training.log.settings
    other = [name for name in params if name in logged and logged[name] != params[name]]
    return [
        f"params.txt is of another training: {name} is {params[name]} there and {logged[name]} in the log"
        for name in other[:3]
    ]


def _other_figures(training: Training) -> list[str]:
    """Arguments that contradict the lines of the iterations."""
    log, settings = training.log, training.settings
    reasons = []

    def compare(name: str, found_value: int | None, where: str) -> None:
        if found_value is not None and name in settings and settings[name] != str(found_value):
            reasons.append(f"the log is of another training: {name} is {settings[name]}, but {where} {found_value}")

    compare("world_size", log.world_size, "its rates are those of")
    compare("train_num_samples", log.samples, "its lines count to")
    world = log.world_size or 1
    if log.global_batch is not None and settings.get("log_every_n_steps") == "1" and settings.get("accum_freq") == "1":
        compare("batch_size", log.global_batch // world, "its lines are as far apart as with")
    return reasons or _other_loss(log, settings)


def _other_loss(log: OpenClipLog, settings: Mapping[str, str]) -> list[str]:
    """A loss that contradicts the global batch: with one pair repeated, it is ln(global batch)."""
    if broken := [line.at for line in log.iterations if line.loss is not None and not math.isfinite(line.loss)]:
        return [f"the loss is no number from line {broken[0]} on: the training broke"]
    if settings.get("dataset_type", "synthetic") != "synthetic" or settings.get("siglip") == "True":
        return []
    if settings.get("accum_freq", "1") != "1" or settings.get("log_every_n_steps", "1") != "1":
        return []
    if log.global_batch is None or not log.losses:
        return []
    expected = math.log(log.global_batch)
    far = max(log.losses, key=lambda loss: abs(loss - expected))
    if abs(far - expected) <= LOSS_TOLERANCE:
        return []
    return [
        f"the loss is {far:g}, and with made-up pairs it is ln(global batch): {expected:.4f} for {log.global_batch:,}, "
        f"so this loss is of {round(math.exp(min(far, 40.0))):,} pairs, or of other data"
    ]


def _missing(training: Training) -> tuple[str, ...]:
    """Iterations that are missing in the log."""
    log, settings = training.log, training.settings
    world, batch = log.world_size or 1, log.global_batch or 1
    epochs = wire.decimal(settings.get("epochs", "")) or 1
    expected = epochs * required.iterations(log.samples or 0, world, batch // world)
    done, every = len(log.iterations), settings.get("log_every_n_steps", "1")
    if every != "1":
        return (f"the log has a line for every {every} iterations, and the total needs one for each",)
    counts = [line.samples for line in log.iterations if line.epoch == log.iterations[0].epoch]
    if done < expected or log.iterations[-1].percent != 100:
        return (_unfinished(done, expected) + _ending(training),)
    if counts != [batch * (i + 1) for i in range(len(counts))] or done > expected:
        return (f"its lines do not count up in steps of {batch:,}: some are missing, or of another training",)
    return ()


def _unfinished(done: int, expected: int | None) -> str:
    return f"unfinished, {done} of {expected} iterations" if expected else "unfinished, no iteration is in the log"


def _ending(training: Training) -> str:
    """The end of an unfinished log, if it is known."""
    broken, launch = training.log.broken, training.launch
    cut = f"; line {broken[0]} is cut" if broken else ""
    words = f"; {launch['last_words']}" if launch.get("last_words") else ""
    status = f"; the training ended with status {launch['status']}" if launch.get("status") else ""
    return cut + status + words


PASS, FAIL, NOT_COMPARABLE, UNFINISHED, UNSOUND = "PASS", "FAIL", "not comparable", "unfinished", "unsound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a training; None if the log lacks them. Times in seconds, rates in samples per second."""

    nodes: int | None
    n_gpu: int | None
    """Processes of each node."""
    model: str | None
    batch_size: int | None
    """Samples of each process in one iteration."""
    done_percent_last: int | None
    throughput_avg: float | None
    """Mean of the rates of all iterations, the first included, as the benchmark defines it."""
    time_per_iteration_secs_avg: float | None
    """Mean over all iterations, the first included."""
    total_time_secs: float | None
    """The metric: the sum from the second iteration on. None unless every iteration is there."""
    world_size: int | None
    first_iteration_s: float | None
    iterations: int
    iterations_expected: int | None
    counted_iterations: int
    counted_secs: float | None
    """Sum from the second iteration on, of those that are there."""
    estimated_total_secs: float | None
    """Estimate of the total from their mean; None if the total is known, or nothing was counted."""
    samples_per_s: float | None
    """Rate of all GPUs from the second iteration on: samples over time, not a mean of rates."""
    samples_per_s_per_gpu: float | None
    loss: float | None
    """Loss of the last iteration."""
    loss_expected: float | None
    """ln(global batch): with one sample repeated nothing can be learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Figures of a training, and their verdict."""

    training: Training
    figures: Figures
    verdict: str
    """PASS, FAIL, not comparable, unfinished, or unsound: a log that contradicts itself or its `params.txt`."""
    faults: tuple[str, ...]
    """Reasons why there is no total."""
    reasons: tuple[str, ...]
    """Reasons why it is not comparable."""
    gpu: str
    """Name of its GPUs; "" if no log has it."""
    extrapolated_secs: float | None
    """Extrapolation, and no result: the time of 32 GPUs that are as fast as these."""

    @property
    def comparable(self) -> bool:
        """True if the total may be compared with the baseline."""
        return self.verdict in (PASS, FAIL)

    @property
    def exit(self) -> Exit:
        """BAD_INPUT if there is no total."""
        return Exit.BAD_INPUT if self.faults else Exit.DONE

    def describe(self) -> dict[str, Any]:
        """JSON-ready: the columns of the benchmark's table first."""
        settings, launch = self.training.settings, self.training.launch
        return {
            "schema": 1,
            **asdict(self.figures),
            "verdict": self.verdict,
            "comparable": self.comparable,
            "faults": list(self.faults),
            "reasons": list(self.reasons),
            "baseline_secs": required.BASELINE_S,
            "extrapolated_secs_on_32_gpus": self.extrapolated_secs,
            "gpu": self.gpu or None,
            "precision": settings.get("precision"),
            "grad_checkpointing": settings.get("grad_checkpointing"),
            "torchcompile": settings.get("torchcompile"),
            "workers": settings.get("workers"),
            "tf32": launch.get("tf32"),
            "versions": launch.get("versions", {}),
            "command": launch.get("command"),
            "log": str(self.training.log.path),
        }


def judge(training: Training, *, nodes: int | None = None, gpu: str = "") -> Judgement:
    """Judge a training by its log, its `params.txt` and the note of its launch.

    Args:
        nodes, gpu: from the user, if the training's folder lacks them.
    """
    contradictions, missing = faults(training)
    figures = _figures(training, nodes or training.launch.get("nodes"), contradictions, missing)
    gpu = gpu or str(training.launch.get("gpu") or "")
    reasons = [
        *required.differences(training.settings),
        *_other_machine(figures.world_size, gpu),
        *(["it was trained on the CPU"] if on_cpu(training.settings) else []),
    ]
    if contradictions:
        verdict = UNSOUND
    elif missing:
        verdict = UNFINISHED
    elif reasons:
        verdict = NOT_COMPARABLE
    else:
        total = figures.total_time_secs
        verdict = PASS if total is not None and total <= required.BASELINE_S else FAIL
    return Judgement(
        training=training,
        figures=figures,
        verdict=verdict,
        faults=(*contradictions, *missing),
        reasons=tuple(reasons),
        gpu=gpu,
        extrapolated_secs=None if contradictions else _extrapolated(training.settings, figures),
    )


def _other_machine(world_size: int | None, gpu: str) -> list[str]:
    """Reasons why a total on these GPUs cannot be compared with the baseline."""
    baseline = f"the baseline is that of {required.BASELINE_GPUS} {required.BASELINE_GPU}"
    if world_size != required.BASELINE_GPUS:
        special = {None: "it is not known on how many GPUs", 1: "1 process"}
        count = special.get(world_size, f"{world_size} processes")
        return [f"{count}{f' of {gpu}' if gpu else ''}: {baseline}"]
    if not gpu:
        return [f"it is not known on which GPUs: {baseline}; --gpu NAME says it"]
    # A word of it: an RTX A1000 is another one. Where a node has several kinds, all are named.
    alike = all(re.search(rf"\b{required.BASELINE_GPU}\b", name, re.IGNORECASE) for name in gpu.split(","))
    return [] if alike else [f"{world_size} processes on {gpu}: {baseline}"]


def on_cpu(settings: Mapping[str, str]) -> bool:
    """True if a training ran on the CPU. open_clip takes it by itself if it finds no GPU."""
    return settings.get("device", "").startswith("cpu")


def _figures(training: Training, nodes: int | None, contradictions: Sequence[str], missing: Sequence[str]) -> Figures:
    log, settings = training.log, training.settings
    lines = log.iterations
    world = _number(settings, "world_size") or log.world_size
    batch = _number(settings, "batch_size")
    if batch is None and world and log.global_batch:
        batch = log.global_batch // world
    samples = _number(settings, "train_num_samples") or log.samples
    counted = _sum(lines[1:])
    expected = required.iterations(samples, world, batch) if samples and world and batch else None
    rate = world * batch * len(lines[1:]) / counted if counted and world and batch else None
    return Figures(
        nodes=nodes,
        n_gpu=world // nodes if world and nodes and world % nodes == 0 else None,
        model=settings.get("model"),
        batch_size=batch,
        done_percent_last=lines[-1].percent if lines else None,
        throughput_avg=_mean([line.per_s for line in lines]),
        time_per_iteration_secs_avg=_mean([line.batch_s for line in lines]),
        total_time_secs=None if contradictions or missing else counted,
        world_size=world,
        first_iteration_s=lines[0].batch_s if lines else None,
        iterations=len(lines),
        iterations_expected=expected,
        counted_iterations=len(lines[1:]),
        counted_secs=counted,
        estimated_total_secs=round(counted / len(lines[1:]) * (expected - 1), 3)
        if counted and expected and missing
        else None,
        samples_per_s=rate,
        samples_per_s_per_gpu=rate / world if rate and world else None,
        loss=log.losses[-1] if log.losses else None,
        loss_expected=round(math.log(world * batch), 4) if world and batch else None,
    )


def _extrapolated(settings: Mapping[str, str], figures: Figures) -> float | None:
    """Time of the benchmark's counted iterations at this batch size on 32 GPUs of this speed."""
    rate, batch = figures.samples_per_s_per_gpu, figures.batch_size
    if rate is None or batch is None or settings.get("model", required.MODEL) != required.MODEL:
        return None
    counted = required.iterations(required.SAMPLES, required.BASELINE_GPUS, batch) - 1
    return round(counted * batch / rate, 2) if counted > 0 else None


def _number(settings: Mapping[str, str], name: str) -> int | None:
    text = settings.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _sum(lines: Sequence[Iteration]) -> float | None:
    """Sum to the third decimal, as in the log."""
    return round(math.fsum(line.batch_s for line in lines), 3) if lines else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
