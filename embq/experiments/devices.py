"""The experiment with devices: whether a fleet of unequal ones is as fast as all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from core.errors import UsageError
from embq.experiments.account import Account, days_sentence, of_condition
from embq.experiments.services import Crew
from embq.experiments.statistics import Measured, days_for, number, together
from embq.experiments.trials import Condition, Outcome

SIMULATED = ("sim:10", "sim:1", "sim:1")
"""Like a GTX 1070 beside the two halves of a K80, and more unequal."""
STUB = "stub:384?ms_per_sample=10"
FLEET = "all together"


def conditions(devices: Sequence[str], unit_size: int) -> list[Condition]:
    """Each device by itself, those of one name once, and all of them together; UsageError for a single device."""
    if len(devices) < 2:
        raise UsageError(
            f"this experiment needs two devices or more, and there is only {' '.join(devices)}",
            next_step=f"simulate some: --devices {','.join(SIMULATED)} --model '{STUB}'",
        )
    alone = [
        Condition(name=f"{device} alone", crew=Crew(devices=(device,)), unit_size=unit_size)
        for device in dict.fromkeys(devices)
    ]
    return [*alone, Condition(name=FLEET, crew=Crew(devices=tuple(devices)), unit_size=unit_size)]


def account(outcomes: Sequence[Outcome], chunks: int) -> Account:
    """What came of it."""
    *_, fleet = outcomes
    alone, ideal = _alone(outcomes), _ideal(outcomes)
    rows = [
        (one.condition.name, str(one.rate), "", f"{one.busy.mean:.0%}", str(days_for(chunks, one.rate)))
        for one in outcomes[:-1]
    ]
    rows.append(("sum of the devices", str(ideal), "1", "", str(days_for(chunks, ideal))))
    equal = _equal_split(outcomes)
    rows.append(
        ("equal split, computed", str(equal), str(equal.over(ideal)), "", str(days_for(chunks, equal))),
    )
    rows.append(
        (
            fleet.condition.name,
            str(fleet.rate),
            str(fleet.rate.over(ideal)),
            f"{fleet.busy.mean:.0%}",
            str(days_for(chunks, fleet.rate)),
        )
    )
    shares = [
        {"device": device, "share": share.describe(), "rate_share": round(rate.mean / ideal.mean, 5)}
        for (device, rate), share in zip(alone, work_shares(fleet), strict=True)
    ]
    return Account(
        name="devices",
        header=("devices", "records/s", "of the sum", "device busy", f"days for {chunks:,}"),
        rows=tuple(rows),
        figures={
            "conditions": [of_condition(one, chunks) for one in outcomes],
            "sum_records_per_s": ideal.describe(),
            "of_the_sum": fleet.rate.over(ideal).describe(),
            "equal_split_records_per_s": equal.describe(),
            "shares": shares,
        },
        findings=findings(outcomes, chunks),
        draw=partial(_draw, outcomes),
    )


def work_shares(fleet: Outcome) -> list[Measured]:
    """The part of the work that each device of the fleet did."""
    return [
        Measured.of([one.shares[i].rows / sum(share.rows for share in one.shares) for one in fleet.replicates])
        for i in range(fleet.condition.crew.size)
    ]


def findings(outcomes: Sequence[Outcome], chunks: int) -> tuple[str, ...]:
    """Sentences that the figures bear out."""
    *_, fleet = outcomes
    alone, ideal, equal = _alone(outcomes), _ideal(outcomes), _equal_split(outcomes)
    told = "" if fleet.rate.differs(ideal) else ", which is no difference beyond the deviations"
    off = [abs(share.mean - rate.mean / ideal.mean) for (_, rate), share in zip(alone, work_shares(fleet), strict=True)]
    return (
        f"{len(alone)} devices together embed {fleet.rate} records/s, {fleet.rate.over(ideal)} times the sum of what "
        f"each does alone{told}.",
        f"An equal split would wait for the slowest device: the queue is {fleet.rate.over(equal)} times as fast as "
        "that (computed from the rates).",
        f"The share of the work that a device does is within {number(100 * max(off))} percentage points of its share "
        "of the rates.",
        days_sentence(fleet, chunks),
    )


def _alone(outcomes: Sequence[Outcome]) -> list[tuple[str, Measured]]:
    """(device, its rate by itself) of each device of the fleet."""
    *single, fleet = outcomes
    rates = {one.condition.crew.devices[0]: one.rate for one in single}
    # In the order in which the workers of the fleet are told.
    return [(share.device, rates[share.device]) for share in fleet.replicates[0].shares]


def _ideal(outcomes: Sequence[Outcome]) -> Measured:
    """Devices of one name were measured once, so their errors add up as they are."""
    *single, fleet = outcomes
    return together(
        [one.rate.scaled(fleet.condition.crew.devices.count(one.condition.crew.devices[0])) for one in single]
    )


def _equal_split(outcomes: Sequence[Outcome]) -> Measured:
    """Each device gets as many records, and all wait for the slowest one."""
    *single, fleet = outcomes
    return min((one.rate for one in single), key=lambda rate: rate.mean).scaled(fleet.condition.crew.size)


def _draw(outcomes: Sequence[Outcome], path: Path) -> None:
    from embq.experiments.plots import draw_devices

    *_, fleet = outcomes
    ideal = _ideal(outcomes)
    draw_devices(
        _alone(outcomes),
        ideal,
        _equal_split(outcomes),
        fleet.rate,
        work_shares(fleet),
        path,
        outcomes=outcomes,
        title=f"{fleet.condition.crew.size} devices together: {fleet.rate.over(ideal)} times the sum of their rates",
    )
