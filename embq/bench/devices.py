"""The experiment with devices: whether a fleet of unequal ones is as fast as all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.errors import UsageError
from embq.bench.services import Crew
from embq.bench.statistics import Measured, days_for, number, significant, together
from embq.bench.trials import Account, Condition, Outcome, days_sentence, of_condition

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Devices alone and together.

    Attributes:
        alone: each device, once -> its rate by itself, in records per second.
        devices: all of them, in the order of `shares`.
        rate: of all of them together.
        shares: the part of the work that each did, where they worked together.
    """

    alone: dict[str, Measured]
    devices: tuple[str, ...]
    rate: Measured
    shares: tuple[Measured, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Fleet:
        """The fleet whose outcomes were measured: those of single devices, then all together."""
        *single, last = outcomes
        rows = [[share.rows for share in one.shares] for one in last.replicates]
        return cls(
            alone={one.condition.crew.devices[0]: one.rate for one in single},
            devices=tuple(share.device for share in last.replicates[0].shares),
            rate=last.rate,
            shares=tuple(
                Measured.of([mine / sum(run) for mine, run in zip(of_device, rows, strict=True)])
                for of_device in zip(*rows, strict=True)
            ),
        )

    @property
    def ideal(self) -> Measured:
        """The sum of the rates. Devices of one name were measured once, so the errors of these add up as they are."""
        return together([rate.scaled(self.devices.count(device)) for device, rate in self.alone.items()])

    @property
    def equal(self) -> Measured:
        """The rate where each device gets as many records, and all wait for the slowest one."""
        return min(self.alone.values(), key=lambda rate: rate.mean).scaled(len(self.devices))

    @property
    def rate_shares(self) -> list[float]:
        """The part of `ideal` that is each device's own rate."""
        return [self.alone[device].mean / self.ideal.mean for device in self.devices]


def account(outcomes: Sequence[Outcome], chunks: int) -> Account:
    """What came of it."""
    fleet = Fleet.of(outcomes)
    lines = [(one.condition.name, one.rate, f"{one.busy.mean:.0%}") for one in outcomes]
    lines[-1:-1] = [("sum of all", fleet.ideal, "-"), ("equal split, computed", fleet.equal, "-")]
    return Account(
        name="devices",
        header=("devices", "records/s", "of the sum", "device busy", f"days for {chunks:,}"),
        rows=tuple(
            (name, str(rate), _part(rate, fleet.ideal), busy, str(days_for(chunks, rate))) for name, rate, busy in lines
        ),
        figures={
            "conditions": [of_condition(one, chunks) for one in outcomes],
            "sum_records_per_s": fleet.ideal.describe(),
            "of_the_sum": fleet.rate.over(fleet.ideal).describe(),
            "equal_split_records_per_s": fleet.equal.describe(),
            "shares": [
                {"device": device, "share": share.describe(), "rate_share": significant(rate_share)}
                for device, share, rate_share in zip(fleet.devices, fleet.shares, fleet.rate_shares, strict=True)
            ],
        },
        findings=findings(outcomes, chunks),
        draw=partial(_draw, outcomes),
    )


def _part(rate: Measured, ideal: Measured) -> str:
    return "1" if rate == ideal else str(rate.over(ideal))


def findings(outcomes: Sequence[Outcome], chunks: int) -> tuple[str, ...]:
    """Sentences that the figures bear out."""
    fleet = Fleet.of(outcomes)
    told = "" if fleet.rate.differs(fleet.ideal) else ", which is no difference beyond the deviations"
    off = max(abs(share.mean - wanted) for share, wanted in zip(fleet.shares, fleet.rate_shares, strict=True))
    return (
        f"{len(fleet.devices)} devices together embed {fleet.rate} records/s, {fleet.rate.over(fleet.ideal)} times the "
        f"sum of what each does alone{told}.",
        f"An equal split would wait for the slowest device: the queue is {fleet.rate.over(fleet.equal)} times as fast "
        "as that (computed from the rates).",
        f"The share of the work that a device does is within {number(100 * off)} percentage points of its share of the "
        "rates.",
        days_sentence(outcomes[-1], chunks),
    )


def _draw(outcomes: Sequence[Outcome], path: Path) -> None:
    from embq.bench.plots import draw_devices

    fleet = Fleet.of(outcomes)
    told = "" if fleet.rate.differs(fleet.ideal) else ": no difference"
    title = f"{len(fleet.devices)} devices together: {fleet.rate.over(fleet.ideal)} times the sum of their rates{told}"
    draw_devices(fleet, outcomes, path, title=title)
