"""Experiment `workers`: speed and memory against the number of worker processes on one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from embq.app.bench.outcomes import (
    Condition,
    ExperimentResult,
    Outcome,
    best_of,
    condition_figures,
    days_cell,
    days_header,
    days_sentences,
)
from embq.app.bench.services import WorkerSet
from embq.app.bench.statistics import Measured, number
from embq.core.errors import UsageError


def conditions(devices: Sequence[str], counts: Sequence[int], unit_size: int) -> list[Condition]:
    """A condition for each count; UsageError where there is more than one device."""
    if len(devices) > 1:
        raise UsageError(
            f"this experiment puts all workers on one device, and there are {len(devices)}: {', '.join(devices)}",
            next_step=f"give --devices {devices[0]}; `embq bench devices` compares devices",
        )
    grain = 2 * unit_size * max(counts)
    return [
        Condition(
            name=f"{count} worker{'s' if count > 1 else ''}",
            worker_set=WorkerSet(devices=tuple(devices), per_device=count),
            unit_size=unit_size,
            grain=grain,
        )
        for count in counts
    ]


def result(outcomes: Sequence[Outcome], corpus: int | None) -> ExperimentResult:
    """The result of the outcomes; the first condition is the baseline."""
    first = outcomes[0]
    rows = tuple(
        (
            str(one.condition.worker_set.size),
            str(one.rate),
            str(one.rate.over(first.rate)) if one is not first else "1",
            f"{one.busy.mean:.0%}",
            f"{memory.mean:,.0f}" if (memory := one.memory_mb) is not None else "-",
            number(one.load_s),
            *days_cell(corpus, one.rate),
        )
        for one in outcomes
    )
    return ExperimentResult(
        name="workers",
        header=(
            "workers",
            "records/s",
            "of the first",
            "device busy",
            "memory, MB",
            "loading, s",
            *days_header(corpus),
        ),
        rows=rows,
        figures={"conditions": [condition_figures(one, corpus) for one in outcomes]},
        findings=findings(outcomes, corpus),
        draw=partial(_draw, outcomes),
    )


def findings(outcomes: Sequence[Outcome], corpus: int | None) -> tuple[str, ...]:
    """Conclusions from the figures."""
    first, *others = outcomes
    fastest = best_of(outcomes)
    sentences = [f"{_more(one, first)}." for one in others]
    best = fastest if fastest.rate.differs(first.rate) else first
    if others:
        enough = min(one.condition.worker_set.size for one in outcomes if not fastest.rate.differs(one.rate))
        sentences.append(f"The fewest workers that are not told apart from the best: {enough}.")
    return (*sentences, *days_sentences(best, corpus))


def _more(one: Outcome, first: Outcome) -> str:
    device = one.condition.worker_set.devices[0]
    ratio = one.rate.over(first.rate)
    note = "" if one.rate.differs(first.rate) else ", which is no difference beyond the deviations"
    memory = _memory_ratio(one, first)
    taking = f"; they take {number(memory.mean)} times the memory" if memory is not None else ""
    return f"{one.condition.name} on {device} give {ratio} times the speed of {first.condition.name}{note}{taking}"


def _memory_ratio(one: Outcome, first: Outcome) -> Measured | None:
    mine, theirs = one.memory_mb, first.memory_mb
    return mine.over(theirs) if mine is not None and theirs is not None else None


def _draw(outcomes: Sequence[Outcome], path: Path) -> None:
    from embq.app.bench.plots import draw_workers

    draw_workers(outcomes, path, title=title(outcomes))


def title(outcomes: Sequence[Outcome]) -> str:
    """Title of the plot: the gain or loss by more workers."""
    first, last = outcomes[0], outcomes[-1]
    device = first.condition.worker_set.devices[0]
    if len(outcomes) == 1:
        return f"{first.condition.name} on {device}: {first.rate} records/s"
    best = best_of(outcomes)
    if not best.rate.differs(first.rate):
        worst = min(outcomes, key=lambda one: one.rate.mean)
        summary = "no gain beyond the deviations"
        if worst.rate.differs(first.rate):
            summary = f"no gain, and {worst.condition.name} give {worst.rate.over(first.rate)} times its speed"
        return f"More than {first.condition.name} on {device}: {summary}"
    shown = best if best is not first else last
    return f"{shown.condition.name} on {device}: {shown.rate.over(first.rate)} times {first.condition.name}"
