"""Repeated measurements: mean, standard deviation, derived quantities, and comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A figure that was measured several times, or derived from such figures.

    Attributes:
        mean: of the replicates.
        sd: their standard deviation (n - 1); 0 for a single replicate.
        n: replicates.
    """

    mean: float
    sd: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """The mean and deviation of at least one value."""
        sd = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(mean=statistics.fmean(values), sd=sd, n=len(values))

    def scaled(self, factor: float) -> Measured:
        """This, times a number without error."""
        return Measured(mean=self.mean * factor, sd=self.sd * abs(factor), n=self.n)

    def over(self, other: Measured) -> Measured:
        """The quotient of two independent figures; relative deviations add as squares."""
        mean = self.mean / other.mean
        relative = math.hypot(self.sd / self.mean if self.mean else 0.0, other.sd / other.mean)
        return Measured(mean=mean, sd=abs(mean) * relative, n=min(self.n, other.n))

    def differs(self, other: Measured) -> bool:
        """True if the difference is larger than both deviations together; otherwise the order is unknown."""
        return abs(self.mean - other.mean) > self.sd + other.sd

    def describe(self) -> dict[str, float]:
        """JSON-ready, with six digits."""
        return {"mean": significant(self.mean), "sd": significant(self.sd), "n": self.n}

    def __str__(self) -> str:
        return f"{number(self.mean, self.sd)} ± {number(self.sd, self.sd)}" if self.n > 1 else number(self.mean)


def together(parts: Sequence[Measured]) -> Measured:
    """The sum of independent figures."""
    return Measured(
        mean=sum(part.mean for part in parts),
        sd=math.hypot(*(part.sd for part in parts)),
        n=min(part.n for part in parts),
    )


def days_for(records: int, rate: Measured) -> Measured:
    """Days for this many records at a rate per second."""
    return Measured(mean=records / DAY_S, sd=0.0, n=rate.n).over(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """The fit `seconds of a unit = t0 + records * t1`.

    Attributes:
        t0_s: fixed cost of a unit.
        t0_error_s: standard error of `t0_s`.
        t1_s: cost of a record.
    """

    t0_s: float
    t0_error_s: float
    t1_s: float

    @property
    def is_seen(self) -> bool:
        """True if the fixed cost is significant: above twice its standard error."""
        return self.t0_s > 2 * self.t0_error_s

    @property
    def t0_ms(self) -> str:
        """`t0_s` in milliseconds, with its error, for people."""
        return str(Measured(mean=1000 * self.t0_s, sd=1000 * self.t0_error_s, n=2))

    def describe(self) -> dict[str, Any]:
        """JSON-ready, with six digits."""
        return {
            "t0_ms": significant(1000 * self.t0_s),
            "t0_error_ms": significant(1000 * self.t0_error_s),
            "t1_ms": significant(1000 * self.t1_s),
            "t0_is_seen": self.is_seen,
        }

    def size_for(self, efficiency: float) -> int:
        """The smallest number of records per unit with this fraction of the best speed."""
        return max(1, math.ceil(self.t0_s / self.t1_s * efficiency / (1 - efficiency) - 1e-9))

    def rate(self, size: float) -> float:
        """Records per second with units of `size` records."""
        return size / (self.t0_s + size * self.t1_s)


def unit_cost(measured: Sequence[tuple[int, float]]) -> UnitCost | None:
    """The cost of a unit from (records per unit, records per second) of each replicate; None if it cannot be fitted.

    Least squares of seconds per record, `t1 + t0 / size`, with relative errors: weights are 1 / seconds.
    """
    if len(measured) < 3 or len({size for size, _ in measured}) < 2:
        return None
    sizes, rates = np.array(measured).T
    (t0_s, t1_s), covariance = np.polyfit(1 / sizes, 1 / rates, 1, w=rates, cov=True)
    if t1_s <= 0:
        return None
    return UnitCost(t0_s=float(t0_s), t0_error_s=math.sqrt(covariance[0, 0]), t1_s=float(t1_s))


def significant(value: float) -> float:
    """A figure with six digits, for files."""
    return float(f"{value:.6g}")


def number(value: float, deviation: float | None = None) -> str:
    """A figure for people: as many decimals as `deviation` makes sense of, two digits of it; three digits without."""
    scale = value if deviation is None else deviation or value
    digits = 2 if deviation else 3
    decimals = digits - 1 - math.floor(math.log10(abs(scale))) if scale else 0
    return f"{value:,.{min(6, max(0, decimals))}f}"
