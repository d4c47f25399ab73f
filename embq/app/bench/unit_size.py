"""Experiment `unit-size`: speed against the number of records per unit."""

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
    names,
)
from embq.app.bench.services import WorkerSet
from embq.app.bench.statistics import UnitCost, number, significant, unit_cost

EFFICIENCY = 0.9


def conditions(devices: Sequence[str], sizes: Sequence[int]) -> list[Condition]:
    """A condition for each size, all with the same workers and number of records."""
    worker_set = WorkerSet(devices=tuple(devices))
    return [
        Condition(
            name=f"{size:,} record{'s' if size > 1 else ''} per unit",
            worker_set=worker_set,
            unit_size=size,
            grain=max(sizes) * worker_set.size,
        )
        for size in sizes
    ]


def result(outcomes: Sequence[Outcome], corpus: int | None) -> ExperimentResult:
    """The result of the outcomes."""
    best = best_of(outcomes)
    cost = _cost(outcomes)
    rows = tuple(
        (
            f"{one.condition.unit_size:,}",
            str(one.rate),
            str(one.rate.over(best.rate)) if one is not best else "1",
            str(one.rate.scaled(1 / one.condition.unit_size)),
            f"{one.busy.mean:.0%}",
            *days_cell(corpus, one.rate),
        )
        for one in outcomes
    )
    return ExperimentResult(
        name="unit-size",
        header=("records per unit", "records/s", "of the best", "units/s", "device busy", *days_header(corpus)),
        rows=rows,
        figures={
            "conditions": [condition_figures(one, corpus) for one in outcomes],
            "fit": None
            if cost is None
            else {
                "t0_ms": significant(1000 * cost.t0_s),
                "t0_error_ms": significant(1000 * cost.t0_error_s),
                "t1_ms": significant(1000 * cost.t1_s),
                "t0_is_seen": cost.is_seen,
            },
        },
        findings=findings(outcomes, corpus),
        draw=partial(_draw, outcomes),
    )


def findings(outcomes: Sequence[Outcome], corpus: int | None) -> tuple[str, ...]:
    """Conclusions from the figures."""
    best, smallest = best_of(outcomes), min(outcomes, key=lambda one: one.condition.unit_size)
    sentences = []
    if smallest is not best:
        ratio = smallest.rate.over(best.rate).scaled(100)
        note = "" if smallest.rate.differs(best.rate) else ", which is no difference beyond the deviations"
        sentences.append(
            f"Units of {smallest.condition.unit_size} reach {ratio} % of the best speed, that of units of "
            f"{best.condition.unit_size:,}{note}."
        )
    elif len(outcomes) > 1:
        sentences.append(f"Units of {smallest.condition.unit_size} are the fastest that were measured.")
    alike = [f"{one.condition.unit_size:,}" for one in outcomes if one is best or not one.rate.differs(best.rate)]
    if len(alike) > 1:
        sentences.append(f"Units of {names(alike)} are not told apart.")
    if (cost := _cost(outcomes)) is not None:
        sentences.append(_cost_sentence(cost))
    return (*sentences, *days_sentences(best, corpus))


def _cost_sentence(cost: UnitCost) -> str:
    record = f"{number(1000 * cost.t1_s)} ms"
    if not cost.is_seen:
        return f"A cost of the units themselves is not seen: {cost.t0_ms} ms, beside {record} for each record."
    return (
        f"A unit costs {cost.t0_ms} ms, and each record {record} more, so {EFFICIENCY:.0%} of the best speed comes "
        f"with {cost.size_for(EFFICIENCY):,} record{'s' if cost.size_for(EFFICIENCY) > 1 else ''} per unit."
    )


def _cost(outcomes: Sequence[Outcome]) -> UnitCost | None:
    return unit_cost([(one.condition.unit_size, run.rate) for one in outcomes for run in one.replicates])


def _draw(outcomes: Sequence[Outcome], path: Path) -> None:
    from embq.app.bench.plots import draw_unit_size

    draw_unit_size(outcomes, _cost(outcomes), path, title=_title(outcomes))


def _title(outcomes: Sequence[Outcome]) -> str:
    best, smallest = best_of(outcomes), min(outcomes, key=lambda one: one.condition.unit_size)
    if smallest is best:
        return f"Units of {smallest.condition.unit_size} are the fastest"
    note = "" if smallest.rate.differs(best.rate) else ": no difference"
    part = smallest.rate.over(best.rate).scaled(100)
    return f"Units of {smallest.condition.unit_size}: {part} % of the best speed{note}"
