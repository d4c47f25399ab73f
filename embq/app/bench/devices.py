"""Experiment `devices`: speed of several unequal devices together, compared with the sum of their rates alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from embq.app.bench.outcomes import (
    Condition,
    ExperimentResult,
    Fleet,
    Outcome,
    condition_figures,
    days_cell,
    days_header,
    days_sentences,
)
from embq.app.bench.services import WorkerSet
from embq.app.bench.statistics import Measured, number, significant
from embq.core.errors import UsageError

SIMULATED = ("sim:10", "sim:1", "sim:1")
"""More unequal than a GTX 1070 beside the two halves of a K80."""
STUB = "stub:384?ms_per_sample=10"
FLEET = "all together"


def conditions(devices: Sequence[str], unit_size: int) -> list[Condition]:
    """Each device alone, those of one name once, and all together; UsageError for a single device."""
    if len(devices) < 2:
        raise UsageError(
            f"this experiment needs two devices or more, and there is only {' '.join(devices)}",
            next_step=f"simulate some: --devices {','.join(SIMULATED)} --model '{STUB}'",
        )
    alone = [
        Condition(name=f"{device} alone", worker_set=WorkerSet(devices=(device,)), unit_size=unit_size)
        for device in dict.fromkeys(devices)
    ]
    return [*alone, Condition(name=FLEET, worker_set=WorkerSet(devices=tuple(devices)), unit_size=unit_size)]


def result(outcomes: Sequence[Outcome], corpus: int | None) -> ExperimentResult:
    """The result of the outcomes."""
    fleet = Fleet.of(outcomes)
    lines = [(one.condition.name, one.rate, f"{one.busy.mean:.0%}") for one in outcomes]
    lines[-1:-1] = [("sum of all", fleet.ideal, "-"), ("equal split, computed", fleet.equal, "-")]
    return ExperimentResult(
        name="devices",
        header=("devices", "records/s", "of the sum", "device busy", *days_header(corpus)),
        rows=tuple(
            (name, str(rate), _part(rate, fleet.ideal), busy, *days_cell(corpus, rate)) for name, rate, busy in lines
        ),
        figures={
            "conditions": [condition_figures(one, corpus) for one in outcomes],
            "sum_records_per_s": fleet.ideal.describe(),
            "of_the_sum": fleet.rate.over(fleet.ideal).describe(),
            "equal_split_records_per_s": fleet.equal.describe(),
            "shares": [
                {"device": device, "share": share.describe(), "rate_share": significant(rate_share)}
                for device, share, rate_share in zip(fleet.devices, fleet.shares, fleet.rate_shares, strict=True)
            ],
        },
        findings=findings(outcomes, corpus),
        draw=partial(_draw, outcomes),
    )


def _part(rate: Measured, ideal: Measured) -> str:
    return "1" if rate == ideal else str(rate.over(ideal))


def findings(outcomes: Sequence[Outcome], corpus: int | None) -> tuple[str, ...]:
    """Conclusions from the figures."""
    fleet = Fleet.of(outcomes)
    note = "" if fleet.rate.differs(fleet.ideal) else ", which is no difference beyond the deviations"
    off = max(abs(share.mean - wanted) for share, wanted in zip(fleet.shares, fleet.rate_shares, strict=True))
    return (
        f"{len(fleet.devices)} devices together embed {fleet.rate} records/s, {fleet.rate.over(fleet.ideal)} times the "
        f"sum of what each does alone{note}.",
        f"An equal split would wait for the slowest device: the queue is {fleet.rate.over(fleet.equal)} times as fast "
        "as that (computed from the rates).",
        f"The share of the work that a device does is within {number(100 * off)} percentage points of its share of the "
        "rates.",
        *days_sentences(outcomes[-1], corpus),
    )


def _draw(outcomes: Sequence[Outcome], path: Path) -> None:
    from embq.app.bench.plots import draw_devices

    fleet = Fleet.of(outcomes)
    note = "" if fleet.rate.differs(fleet.ideal) else ": no difference"
    title = f"{len(fleet.devices)} devices together: {fleet.rate.over(fleet.ideal)} times the sum of their rates{note}"
    draw_devices(fleet, outcomes, path, title=title)
