"""What a training is worth as a result of the benchmark: its figures, whether they are whole, whether comparable."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from core.errors import Exit
from training.mmoclip import required
from training.mmoclip.faults import Faults, faults
from training.mmoclip.folder import Training
from training.openclip.log import Iteration

PASS, FAIL, NOT_COMPARABLE, UNFINISHED, UNSOUND = "PASS", "FAIL", "not comparable", "unfinished", "unsound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a user says of a training whose folder does not tell."""

    nodes: int | None = None
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers of one training; None where the log does not tell. Times in seconds, rates in samples a second."""

    nodes: int | None
    n_gpu: int | None
    """Processes of each node."""
    model: str | None
    batch_size: int | None
    """Of each process."""
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
    """What the total would be at the mean of those; None where the total is known, or nothing was counted."""
    samples_per_s: float | None
    """Of all GPUs, from the second iteration on: samples over time, not a mean of rates."""
    samples_per_s_per_gpu: float | None
    loss: float | None
    """The last one."""
    loss_expected: float | None
    """ln(global batch): with one sample repeated nothing can be learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The figures of a training, and what may be said of them."""

    training: Training
    figures: Figures
    verdict: str
    """PASS, FAIL, not comparable, unfinished, or unsound: a log that contradicts itself or its `params.txt`."""
    faults: tuple[str, ...]
    """Why there is no total; empty where there is one."""
    reasons: tuple[str, ...]
    """Why it is not comparable; empty where it is."""
    gpu: str
    """Name of its GPUs; "" where nobody said it."""
    extrapolated_secs: float | None
    """What 32 GPUs of this speed would take if each were as fast as here: an extrapolation and no result."""

    @property
    def comparable(self) -> bool:
        """Whether the total may stand beside the baseline."""
        return self.verdict in (PASS, FAIL)

    @property
    def exit(self) -> Exit:
        """BAD_INPUT where there is no total."""
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


NOTHING_GIVEN = Given()


def judge(training: Training, given: Given = NOTHING_GIVEN) -> Judgement:
    """Judge a training by its log, its `params.txt` and what was noted when it was started."""
    found = faults(training)
    figures = _figures(training, given, found)
    gpu = given.gpu or str(training.launch.get("gpu") or "")
    reasons = [
        *required.differences(training.settings),
        *_other_machine(figures.world_size, gpu),
        *_no_gpu(training.settings),
    ]
    if found.contradictions:
        verdict = UNSOUND
    elif found.missing:
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
        faults=(*found.contradictions, *found.missing),
        reasons=tuple(reasons),
        gpu=gpu,
        extrapolated_secs=None if found.contradictions else _extrapolated(training.settings, figures),
    )


def _other_machine(world_size: int | None, gpu: str) -> list[str]:
    """Why a total of these GPUs says nothing beside the baseline's."""
    baseline = f"the baseline is that of {required.BASELINE_GPUS} {required.BASELINE_GPU}"
    if world_size != required.BASELINE_GPUS:
        count = "it is not known on how many GPUs" if world_size is None else f"{_count(world_size)}"
        return [f"{count}{f' of {gpu}' if gpu else ''}: {baseline}"]
    if not gpu:
        return [f"it is not known on which GPUs: {baseline}; --gpu NAME says it"]
    # A word of it: an RTX A1000 is another one. Where a node has several kinds, all are named.
    alike = all(re.search(rf"\b{required.BASELINE_GPU}\b", name, re.IGNORECASE) for name in gpu.split(","))
    return [] if alike else [f"{world_size} processes on {gpu}: {baseline}"]


def _no_gpu(settings: Mapping[str, str]) -> list[str]:
    return ["it was trained on the CPU"] if on_cpu(settings) else []


def on_cpu(settings: Mapping[str, str]) -> bool:
    """Whether the arguments of a training say so. open_clip takes the CPU by itself where it finds no GPU."""
    return settings.get("device", "").startswith("cpu")


def _count(world_size: int) -> str:
    return f"{world_size} process{'es' if world_size > 1 else ''}"


def _figures(training: Training, given: Given, found: Faults) -> Figures:
    log, settings = training.log, training.settings
    lines = log.iterations
    world = _number(settings, "world_size") or log.world_size
    batch = _number(settings, "batch_size")
    if batch is None and world and log.global_batch:
        batch = log.global_batch // world
    samples = _number(settings, "train_num_samples") or log.samples
    nodes = given.nodes or training.launch.get("nodes")
    counted = _sum(lines[1:])
    expected = required.iterations(samples, world, batch) if samples and world and batch else None
    rate = world * batch * len(lines[1:]) / counted if counted and world and batch else None
    return Figures(
        nodes=nodes,
        n_gpu=world // nodes if world and nodes and world % nodes == 0 else None,
        model=settings.get("model"),
        batch_size=batch,
        done_percent_last=lines[-1].percent if lines else None,
        throughput_avg=_mean([one.per_s for one in lines]),
        time_per_iteration_secs_avg=_mean([one.batch_s for one in lines]),
        total_time_secs=None if found.any else counted,
        world_size=world,
        first_iteration_s=lines[0].batch_s if lines else None,
        iterations=len(lines),
        iterations_expected=expected,
        counted_iterations=len(lines[1:]),
        counted_secs=counted,
        estimated_total_secs=round(counted / len(lines[1:]) * (expected - 1), 3)
        if counted and expected and found.missing
        else None,
        samples_per_s=rate,
        samples_per_s_per_gpu=rate / world if rate and world else None,
        loss=log.losses[-1] if log.losses else None,
        loss_expected=round(math.log(world * batch), 4) if world and batch else None,
    )


def _extrapolated(settings: Mapping[str, str], figures: Figures) -> float | None:
    """The counted iterations of the benchmark at this batch size on 32 GPUs, at the rate that each has here."""
    rate, batch = figures.samples_per_s_per_gpu, figures.batch_size
    if rate is None or batch is None or settings.get("model", required.MODEL) != required.MODEL:
        return None
    counted = required.iterations(required.SAMPLES, required.BASELINE_GPUS, batch) - 1
    return round(counted * batch / rate, 2) if counted > 0 else None


def _number(settings: Mapping[str, str], name: str) -> int | None:
    text = settings.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _sum(lines: Sequence[Iteration]) -> float | None:
    """To the third decimal, which is the log's own."""
    return round(math.fsum(one.batch_s for one in lines), 3) if lines else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
