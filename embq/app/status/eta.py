"""Predicts the end of a run: the work that is left, divided by the present speed of its devices.

Work is counted in tokens, because texts differ in length; the writer estimates the tokens of uncommitted units from
their sizes. Without reports of tokens, samples are counted; without a known number of samples, units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SILENT_S = 10.0
"""Workers report every second; one that is silent for so long does not count."""
SETTLED_S, SETTLED_SHARE, SETTLED_LEAST_S = 20.0, 0.1, 3.0
"""An end is predicted after 20 seconds of work or a tenth of the run, whichever is less, but never in the first 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eta:
    """A prediction.

    Attributes:
        seconds: until the last commit; None if it is too early, or no worker is at work.
        basis: what is counted: "tokens", "samples" or "units"; "" for nothing.
        per_s: speed of all workers for this run, in `basis` per second.
    """

    seconds: float | None = None
    basis: str = ""
    per_s: float = 0.0


NO_ETA = Eta()


def embedded_in_flight(shares: Sequence[Mapping[str, Any]]) -> int:
    """Samples of units in hand that have become a row or a failure."""
    return sum(int(share.get("handled", 0)) for share in shares)


def in_hand_s(workers: Sequence[Mapping[str, Any]], run: str) -> float | None:
    """Seconds of the slowest worker for its units in hand at its present speed; None if one reports no speed."""
    longest = 0.0
    for worker in workers:
        share = worker.get("runs", {}).get(run, {})
        remaining = int(share.get("samples", 0)) - int(share.get("handled", 0))
        if remaining > 0:
            if not worker.get("rows_per_s"):
                return None
            longest = max(longest, remaining / float(worker["rows_per_s"]))
    return longest


def holders_wanted(shares: Sequence[Mapping[str, Any]]) -> list[int]:
    """The units in progress, whose lease holders `done_of` takes."""
    return [int(u) for share in shares for u, _, _ in share["begun"]]


def done_of(shares: Sequence[Mapping[str, Any]], holders: Sequence[bytes | None]) -> int:
    """Finished tokens of units in flight: those whose lease the reporting worker still holds, and of batches.

    Args:
        holders: token of the lease on each unit of `holders_wanted`; None if there is none.
    """
    begun = [(str(token).encode(), int(tokens)) for share in shares for _, token, tokens in share["begun"]]
    of_units = sum(tokens for (token, tokens), holder in zip(begun, holders, strict=True) if token == holder)
    return of_units + sum(int(share["in_batch"]) for share in shares)


def predict(
    shares: Sequence[Mapping[str, Any]],
    *,
    tokens_left: int | None,
    begun: int,
    samples_left: int | None,
    exact: bool,
    samples_per_s: float,
    queued: int,
    worked_s: float,
) -> Eta:
    """Predict the end of a running run.

    Args:
        shares: see `Reports.shares`.
        tokens_left: of units that are neither committed nor published.
        begun: finished tokens of units in flight.
        samples_left: of uncommitted units; `exact` tells whether it is counted or estimated from units.
        samples_per_s: of all workers.
        queued: units without a lease.
        worked_s: seconds since the first unit was started.
    """
    tokens_per_s = sum(_tokens_per_s(share, queued) for share in shares)
    if tokens_left is not None and tokens_per_s:
        basis, remaining, per_s = "tokens", max(0.0, float(tokens_left - begun)), tokens_per_s
    elif samples_left is not None and samples_per_s:
        basis, remaining, per_s = "samples" if exact else "units", float(samples_left), samples_per_s
    else:
        return NO_ETA
    seconds = remaining / per_s
    held = sum(share["size"] for share in shares)
    if basis == "tokens" and not queued and held:
        # At the end, idle workers cannot take over units that others hold.
        seconds = max(seconds, *(_in_hand_s(share, (tokens_left or 0) / held) for share in shares))
    settled = worked_s >= max(SETTLED_LEAST_S, min(SETTLED_S, SETTLED_SHARE * (worked_s + seconds)))
    return Eta(seconds=round(seconds, 1) if settled else None, basis=basis, per_s=per_s)


def _in_hand_s(share: Mapping[str, Any], tokens_of_size: float) -> float:
    """Seconds that a worker needs for the units that it holds, by their size."""
    done = share["in_batch"] + sum(int(tokens) for _, _, tokens in share["begun"])
    remaining = max(0.0, share["size"] * tokens_of_size - done)
    return remaining / share["tokens_per_s"] if share["tokens_per_s"] else 0.0


def _tokens_per_s(share: Mapping[str, Any], queued: int) -> float:
    """Speed of a worker; 0 if no unit is queued and it holds none."""
    return float(share["tokens_per_s"]) if queued or share["units"] else 0.0
