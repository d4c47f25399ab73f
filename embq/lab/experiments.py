"""The experiments `workers`, `devices` and `unit-size`: their conditions, tables and conclusions."""

from __future__ import annotations

from collections.abc import Sequence

from embq.core.errors import UsageError
from embq.lab.outcomes import (
    NO_DIFFERENCE,
    Condition,
    ConditionOutcome,
    ExperimentResult,
    Fleet,
    WorkerSet,
    best_of,
    cost_of,
    days_column,
    days_sentences,
    plural,
)
from embq.lab.statistics import UnitCost, number, significant

SIMULATED = ("sim:10", "sim:1", "sim:1")
"""More unequal than a GTX 1070 beside the two halves of a K80."""
STUB = "stub:384?ms_per_sample=10"
EFFICIENCY = 0.9


# --- workers: speed and memory against the number of worker processes on one device ---


def worker_conditions(devices: Sequence[str], counts: Sequence[int], unit_size: int) -> list[Condition]:
    """A condition for each number of workers; UsageError if there is more than one device."""
    if len(devices) > 1:
        raise UsageError(
            f"this experiment puts all workers on one device, and there are {len(devices)}: {', '.join(devices)}",
            next_step=f"give --devices {devices[0]}; `embq bench devices` compares devices",
        )
    return [
        Condition(
            name=plural(count, "worker"),
            worker_set=WorkerSet(devices=tuple(devices), per_device=count),
            unit_size=unit_size,
            grain=2 * unit_size * max(counts),
        )
        for count in counts
    ]


def worker_result(outcomes: Sequence[ConditionOutcome], corpus: int | None) -> ExperimentResult:
    """The result of the outcomes; the first condition is the baseline."""
    first, *compared = outcomes
    fastest = best_of(outcomes)
    best = fastest if fastest.rate.differs(first.rate) else first
    findings = [f"{_gain(outcome, first)}." for outcome in compared]
    if compared:
        enough = min(
            outcome.condition.worker_set.size for outcome in outcomes if not fastest.rate.differs(outcome.rate)
        )
        findings.append(f"The fewest workers that are not told apart from the best: {enough}.")
    shown = best if best is not first else outcomes[-1]
    title = f"{first.condition.name} on {first.condition.worker_set.devices[0]}: {first.rate} records/s"
    return ExperimentResult(
        name="workers",
        outcomes=outcomes,
        columns={
            "workers": [str(outcome.condition.worker_set.size) for outcome in outcomes],
            "records/s": [str(outcome.rate) for outcome in outcomes],
            "of the first": ["1", *(str(outcome.rate.over(first.rate)) for outcome in compared)],
            "device busy": [f"{outcome.busy.mean:.0%}" for outcome in outcomes],
            "memory, MB": [f"{used.mean:,.0f}" if (used := outcome.memory_mb) else "-" for outcome in outcomes],
            "loading, s": [number(outcome.load_s) for outcome in outcomes],
            **days_column(corpus, [outcome.rate for outcome in outcomes]),
        },
        figures={},
        findings=(*findings, *days_sentences(best, corpus)),
        title=_gain(shown, first) if compared else title,
    )


def _gain(outcome: ConditionOutcome, first: ConditionOutcome) -> str:
    """The speed and memory of some workers, compared with the baseline."""
    device = outcome.condition.worker_set.devices[0]
    note = "" if outcome.rate.differs(first.rate) else NO_DIFFERENCE
    memory = ""
    if outcome.memory_mb and first.memory_mb:
        memory = f"; they take {number(outcome.memory_mb.over(first.memory_mb).mean)} times the memory"
    ratio = outcome.rate.over(first.rate)
    return f"{outcome.condition.name} on {device} give {ratio} times the speed of {first.condition.name}{note}{memory}"


# --- devices: unequal devices together, compared with the sum of their rates alone ---


def device_conditions(devices: Sequence[str], unit_size: int) -> list[Condition]:
    """Each device alone, those of one name once, and all together; UsageError for a single device."""
    if len(devices) < 2:
        raise UsageError(
            f"this experiment needs two devices or more, and there is only {' '.join(devices)}",
            next_step=f"simulate some: --devices {','.join(SIMULATED)} --model '{STUB}'",
        )
    named = {f"{device} alone": (device,) for device in devices} | {"all together": tuple(devices)}
    return [
        Condition(name=name, worker_set=WorkerSet(devices=members), unit_size=unit_size)
        for name, members in named.items()
    ]


def device_result(outcomes: Sequence[ConditionOutcome], corpus: int | None) -> ExperimentResult:
    """The result of the outcomes."""
    fleet = Fleet.of(outcomes)
    lines = [(outcome.condition.name, outcome.rate, f"{outcome.busy.mean:.0%}") for outcome in outcomes]
    lines[-1:-1] = [("sum of all", fleet.ideal, "-"), ("equal split, computed", fleet.equal, "-")]
    part = fleet.rate.over(fleet.ideal)
    note = "" if fleet.rate.differs(fleet.ideal) else NO_DIFFERENCE
    off = max(abs(share.mean - ideal) for share, ideal in zip(fleet.shares, fleet.rate_shares, strict=True))
    together = (
        f"{len(fleet.devices)} devices together embed {fleet.rate} records/s, {part} times the sum of what each does "
        f"alone{note}."
    )
    return ExperimentResult(
        name="devices",
        outcomes=outcomes,
        columns={
            "devices": [name for name, *_ in lines],
            "records/s": [str(rate) for _, rate, _ in lines],
            "of the sum": ["1" if rate == fleet.ideal else str(rate.over(fleet.ideal)) for _, rate, _ in lines],
            "device busy": [busy for *_, busy in lines],
            **days_column(corpus, [rate for _, rate, _ in lines]),
        },
        figures={
            "sum_records_per_s": fleet.ideal.describe(),
            "of_the_sum": part.describe(),
            "equal_split_records_per_s": fleet.equal.describe(),
            "shares": [
                {"device": device, "share": share.describe(), "rate_share": significant(rate_share)}
                for device, share, rate_share in zip(fleet.devices, fleet.shares, fleet.rate_shares, strict=True)
            ],
        },
        findings=(
            together,
            "An equal split would wait for the slowest device: the queue is "
            f"{fleet.rate.over(fleet.equal)} times as fast as that (computed from the rates).",
            f"The share of the work that a device does is within {number(100 * off)} percentage points of its share "
            "of the rates.",
            *days_sentences(outcomes[-1], corpus),
        ),
        title=together,
    )


# --- unit-size: speed against the number of records per unit ---


def unit_size_conditions(devices: Sequence[str], sizes: Sequence[int]) -> list[Condition]:
    """A condition for each size, all with the same workers and number of records."""
    worker_set = WorkerSet(devices=tuple(devices))
    return [
        Condition(
            name=f"{plural(size, 'record')} per unit",
            worker_set=worker_set,
            unit_size=size,
            grain=max(sizes) * worker_set.size,
        )
        for size in sizes
    ]


def unit_size_result(outcomes: Sequence[ConditionOutcome], corpus: int | None) -> ExperimentResult:
    """The result of the outcomes."""
    best, smallest = best_of(outcomes), min(outcomes, key=lambda outcome: outcome.condition.unit_size)
    cost = cost_of(outcomes)
    if smallest is best:
        title = f"Units of {smallest.condition.unit_size} are the fastest that were measured."
    else:
        note = "" if smallest.rate.differs(best.rate) else NO_DIFFERENCE
        title = (
            f"Units of {smallest.condition.unit_size} reach {smallest.rate.over(best.rate).scaled(100)} % of the best "
            f"speed, that of units of {best.condition.unit_size:,}{note}."
        )
    findings = [title] if len(outcomes) > 1 else []
    sizes = [f"{outcome.condition.unit_size:,}" for outcome in outcomes]
    alike = [size for size, o in zip(sizes, outcomes, strict=True) if o is best or not o.rate.differs(best.rate)]
    if len(alike) > 1:
        findings.append(f"Units of {', '.join(alike[:-1])} and {alike[-1]} are not told apart.")
    if cost is not None:
        findings.append(_cost_sentence(cost))
    return ExperimentResult(
        name="unit-size",
        outcomes=outcomes,
        columns={
            "records per unit": sizes,
            "records/s": [str(outcome.rate) for outcome in outcomes],
            "of the best": ["1" if o is best else str(o.rate.over(best.rate)) for o in outcomes],
            "units/s": [str(outcome.rate.scaled(1 / outcome.condition.unit_size)) for outcome in outcomes],
            "device busy": [f"{outcome.busy.mean:.0%}" for outcome in outcomes],
            **days_column(corpus, [outcome.rate for outcome in outcomes]),
        },
        figures={"fit": cost and cost.describe()},
        findings=(*findings, *days_sentences(best, corpus)),
        title=title,
    )


def _cost_sentence(cost: UnitCost) -> str:
    record = f"{number(1000 * cost.t1_s)} ms"
    if not cost.is_seen:
        return f"A cost of the units themselves is not seen: {cost.t0_ms} ms, beside {record} for each record."
    return (
        f"A unit costs {cost.t0_ms} ms, and each record {record} more, so {EFFICIENCY:.0%} of the best speed comes "
        f"with {plural(cost.size_for(EFFICIENCY), 'record')} per unit."
    )
