"""When a run will be done: what is left of it, divided by what its devices do now.

What is left is counted in tokens, because texts differ in length; the writer estimates those of the units that are not
committed from their sizes (`writer.token_estimate`). Where the workers report no tokens, samples stand in for them,
and where only reading tells how many samples there are, units do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.queue.ledger import Ledger

SILENT_S = 10.0
"""A worker reports every second; what was not heard of for so long does not count."""
SETTLED_S, SETTLED_SHARE, SETTLED_LEAST_S = 20.0, 0.1, 3.0
"""An end is predicted after 20 seconds of work, or a tenth of what the run seems to take, and never in the first 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eta:
    """A prediction.

    Attributes:
        seconds: until the last commit; None where it cannot be believed yet, or nobody works.
        basis: what is counted: "tokens", "samples" or "units"; "" where nothing can be.
        per_s: of that, what the workers do now for this run.
    """

    seconds: float | None = None
    basis: str = ""
    per_s: float = 0.0


NO_ETA = Eta()


def share_of(workers: Sequence[Mapping[str, Any]], run: str) -> list[Mapping[str, Any]]:
    """What each worker that is heard of said of its work for one run."""
    heard = [worker for worker in workers if worker["silent_s"] <= SILENT_S]
    return [worker["runs"][run] for worker in heard if run in worker.get("runs", ())]


def done_in_flight(ledger: Ledger, shares: Sequence[Mapping[str, Any]]) -> int:
    """As `done_of`, with the holders that the broker knows."""
    return done_of(shares, ledger.holders(holders_wanted(shares)))


def holders_wanted(shares: Sequence[Mapping[str, Any]]) -> list[int]:
    """The units that are begun, whose holders `done_of` wants to know."""
    return [int(u) for share in shares for u, _, _ in share["begun"]]


def done_of(shares: Sequence[Mapping[str, Any]], holders: Sequence[str]) -> int:
    """Tokens that are done of units which are still held under the lease of who reported them, and of batches.

    Args:
        holders: token of the lease on each unit of `holders_wanted`; "" where there is none.
    """
    begun = [(str(token), int(tokens)) for share in shares for _, token, tokens in share["begun"]]
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
    """The end of a run that is at work.

    Args:
        shares: see `share_of`.
        tokens_left: of units that are neither committed nor published.
        begun: tokens that are done of units in flight.
        samples_left: of units that are not committed, and whether that is counted (`exact`) or follows from the units.
        samples_per_s: of all workers.
        queued: units that nobody holds.
        worked_s: seconds since the first unit was begun.
    """
    tokens_per_s = sum(_tokens_per_s(share, queued) for share in shares)
    if tokens_left is not None and tokens_per_s:
        basis, left, per_s = "tokens", max(0.0, float(tokens_left - begun)), tokens_per_s
    elif samples_left is not None and samples_per_s:
        basis, left, per_s = "samples" if exact else "units", float(samples_left), samples_per_s
    else:
        return NO_ETA
    seconds = left / per_s
    held = sum(share["size"] for share in shares)
    if basis == "tokens" and not queued and held:
        # Whoever is done cannot help with what others have in hand.
        seconds = max(seconds, *(_in_hand_s(share, (tokens_left or 0) / held) for share in shares))
    settled = worked_s >= max(SETTLED_LEAST_S, min(SETTLED_S, SETTLED_SHARE * (worked_s + seconds)))
    return Eta(seconds=round(seconds, 1) if settled else None, basis=basis, per_s=per_s)


def _in_hand_s(share: Mapping[str, Any], tokens_of_size: float) -> float:
    """How long a worker is busy with the units that it holds, where their size says how many tokens they have."""
    done = share["in_batch"] + sum(int(tokens) for _, _, tokens in share["begun"])
    left = max(0.0, share["size"] * tokens_of_size - done)
    return left / share["tokens_per_s"] if share["tokens_per_s"] else 0.0


def _tokens_per_s(share: Mapping[str, Any], queued: int) -> float:
    """At the end of a run, who holds nothing of it adds nothing to its speed."""
    return float(share["tokens_per_s"]) if queued or share["units"] else 0.0
