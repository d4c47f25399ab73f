"""Map of a run's units by state, at most 10,000 cells: of larger runs each cell stands for several units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from embq.core.run.commits import CommittedUnit

MOST_CELLS = 10_000

STATE_WORDS = {
    "queued": "queued",
    "some": "up to a third done",
    "many": "up to two thirds done",
    "most": "more than that",
    "done": "done",
    "received": "received",
    "flight": "in flight",
    "failures": "done with failures",
    "quarantined": "failed whole",
}
"""State of a cell -> words for it; a cell with units in several of the last four has the last of them."""
STATES = tuple(STATE_WORDS)
QUEUED, _, _, _, DONE, RECEIVED, FLIGHT, FAILURES, QUARANTINED = range(len(STATES))


@dataclass(slots=True)
class _Standing:
    """Failures of a unit that no retry has replaced."""

    failures: int
    quarantined: bool


class UnitMap:
    """Units of a run by state.

    Args:
        units: of the run.
    """

    def __init__(self, units: int) -> None:
        self.units = 0
        self.bin = 1
        """Units of a cell."""
        # Units of each cell: done, done with failures that stand, failed whole.
        self._done: np.ndarray = np.zeros(0, np.int64)
        self._failed: np.ndarray = np.zeros(0, np.int64)
        self._quarantined: np.ndarray = np.zeros(0, np.int64)
        self._standing: dict[int, _Standing] = {}
        self.grow(units)

    def grow(self, units: int) -> None:
        """Raise the number of units to `units`."""
        self.units = max(units, self.units)
        while -(-self.units // self.bin) > MOST_CELLS:
            self.bin *= 2
            self._done, self._failed, self._quarantined = (
                np.add.reduceat(counts, np.arange(0, len(counts), 2)) if len(counts) else counts
                for counts in (self._done, self._failed, self._quarantined)
            )
        added = -(-self.units // self.bin) - len(self._done)
        if added > 0:
            self._done, self._failed, self._quarantined = (
                np.concatenate([counts, np.zeros(added, counts.dtype)])
                for counts in (self._done, self._failed, self._quarantined)
            )

    def commit(self, units: Sequence[CommittedUnit], failed: Callable[[int], int | None]) -> None:
        """Take committed units into account.

        Args:
            failed: the unit whose failures a retry unit replaces; None if it is not known.
        """
        for unit in units:
            self._done[unit.u // self.bin] += 1
            if unit.failures:
                self._set(unit.u, _Standing(unit.failures, bool(unit.quarantined)))
            if unit.supersedes and (failed_u := failed(unit.u)) is not None and failed_u in self._standing:
                standing = self._standing[failed_u]
                remaining = standing.failures - unit.supersedes
                self._set(failed_u, _Standing(remaining, standing.quarantined and not unit.lifts))

    def _set(self, u: int, standing: _Standing) -> None:
        cell, previous = u // self.bin, self._standing.pop(u, None)
        if previous is not None:
            (self._quarantined if previous.quarantined else self._failed)[cell] -= 1
        if standing.failures > 0:
            self._standing[u] = standing
            (self._quarantined if standing.quarantined else self._failed)[cell] += 1

    def done_bits(self, bits: bytes) -> None:
        """Take over a bitmap of committed units, laid out as Redis does it; of runs whose log cannot be read here."""
        flags = np.unpackbits(np.frombuffer(bits, np.uint8))[: self.units]
        padded = np.zeros(len(self._done) * self.bin, np.int64)
        padded[: len(flags)] = flags
        self._done = padded.reshape(-1, self.bin).sum(axis=1)

    def cells(self, received: Iterable[int] = (), in_flight: Iterable[int] = ()) -> np.ndarray:
        """The state of each cell, an index of `STATES`.

        Args:
            received, in_flight: units that are published and not committed, and leased ones.
        """
        sizes = np.full(len(self._done), self.bin, np.int64)
        if self.units % self.bin:
            sizes[-1] = self.units % self.bin
        share = self._done / np.maximum(sizes, 1)
        states: np.ndarray = np.ceil(np.minimum(share, 0.999) * 3).astype(np.uint8)
        states[self._done >= sizes] = DONE
        for units, state in ((received, RECEIVED), (in_flight, FLIGHT)):
            at = np.fromiter((u // self.bin for u in units if 0 <= u < self.units), np.int64)
            states[at] = state
        states[self._failed > 0] = FAILURES
        states[self._quarantined > 0] = QUARANTINED
        return states


def paths(cells: np.ndarray, columns: int, *, apart: bool) -> dict[str, str]:
    """State -> SVG path of its cells, each one unit of length wide, for the states that there are but the first.

    Args:
        columns: cells of a line.
        apart: whether each cell is drawn alone; else neighbours of one state in a line are one rectangle.
    """
    segments: dict[str, list[str]] = {}
    for line, begin in enumerate(range(0, len(cells), columns)):
        states = cells[begin : begin + columns]
        borders = np.arange(1, len(states)) if apart else np.flatnonzero(np.diff(states)) + 1
        for at, end in zip([0, *borders.tolist()], [*borders.tolist(), len(states)], strict=True):
            if states[at] != QUEUED:
                width = end - at - (0.12 if apart else 0)
                segments.setdefault(STATES[states[at]], []).append(f"M{at} {line}h{width:g}v.88h-{width:g}z")
    return {state: "".join(parts) for state, parts in segments.items()}
