"""The report of every fault test, and the table that is printed at the end."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

SENTENCE_WIDTH, RECOVERY_WIDTH = 58, 44


@dataclass(slots=True)
class Note:
    """One measured time: what it is of, seconds, and the bar that it must not exceed (None where there is none)."""

    what: str
    seconds: float
    bar: float | None


@dataclass(slots=True)
class Recovery:
    """Faults that one test injected, and the times that it measured.

    Attributes:
        slack: how many times a bar a measured time may be. `make test-all` runs them beside other tests and on busy
            machines; the bars are held where the whole matrix is run.
    """

    faults: int = 0
    notes: list[Note] = field(default_factory=list)
    slack: float = 1.0

    def injected(self, count: int = 1) -> None:
        """Count faults."""
        self.faults += count

    def note(self, what: str, seconds: float, *, bar: float | None = None) -> None:
        """Record a measured time; fails the test where it is above its bar."""
        self.notes.append(Note(what, seconds, bar))
        assert bar is None or seconds <= bar * self.slack, f"{what} took {seconds:.1f} s, the bar is {bar:g} s"


@dataclass(slots=True)
class Outcome:
    """Outcome of one test."""

    fault: str
    sentence: str
    test: str
    result: str = "pass"
    reason: str = ""
    seconds: float = 0.0
    recovery: Recovery = field(default_factory=Recovery)


@dataclass(slots=True)
class Row:
    """All tests of one fault with one sentence."""

    fault: str
    sentence: str
    outcomes: list[Outcome]

    def count(self, result: str) -> int:
        """Tests that ended this way."""
        return sum(outcome.result == result for outcome in self.outcomes)

    @property
    def result(self) -> str:
        """One word or two for all of its tests."""
        total, failed, skipped = len(self.outcomes), self.count("FAIL"), self.count("skip")
        if failed:
            return f"FAIL {failed} of {total}" if total > 1 else "FAIL"
        if skipped:
            return f"skip {skipped} of {total}" if total > 1 else "skip"
        return f"pass {total}/{total}" if total > 1 else "pass"

    @property
    def injected(self) -> int:
        """Faults injected by all of its tests."""
        return sum(outcome.recovery.faults for outcome in self.outcomes)

    def recoveries(self) -> Iterator[str]:
        """One line for each thing measured: the longest time, of how many, and the bar."""
        notes: dict[str, list[Note]] = {}
        for outcome in self.outcomes:
            for note in outcome.recovery.notes:
                notes.setdefault(note.what, []).append(note)
        for what, measured in notes.items():
            worst = max(measured, key=lambda note: note.seconds)
            many = f", worst of {len(measured)}" if len(measured) > 1 else ""
            bar = f" (bar {worst.bar:g} s{many})" if worst.bar is not None else f" ({many[2:]})" if many else ""
            yield f"{what}: {worst.seconds:.1f} s{bar}"


class Table:
    """Collects outcomes in the order in which the tests ran."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def rows(self) -> list[Row]:
        """One for each fault and sentence, in order of the ids."""
        rows: dict[tuple[str, str], Row] = {}
        for outcome in self.outcomes.values():
            row = rows.setdefault((outcome.fault, outcome.sentence), Row(outcome.fault, outcome.sentence, outcomes=[]))
            row.outcomes.append(outcome)
        return sorted(rows.values(), key=lambda row: _natural(row.fault))

    def render(self, footer: str) -> str:
        """The table as text."""
        rows = self.rows()
        widths = (
            max(len("id"), *(len(row.fault) for row in rows)),
            SENTENCE_WIDTH,
            max(len("result"), *(len(row.result) for row in rows)),
            len("injected"),
            RECOVERY_WIDTH,
        )
        rule = "─┼─".join("─" * width for width in widths)
        lines = [_line(("id", "fault", "result", "injected", "recovery"), widths), rule]
        for row in rows:
            cells = [
                [row.fault],
                textwrap.wrap(row.sentence, SENTENCE_WIDTH),
                [row.result],
                [f"{row.injected or '':>8}"],
                [part for text in row.recoveries() for part in textwrap.wrap(text, RECOVERY_WIDTH)],
            ]
            lines += [_line(line, widths) for line in zip_longest(*cells, fillvalue="")]
        lines.append(rule)
        reasons = {(o.fault, o.reason) for row in rows for o in row.outcomes if o.result == "skip"}
        lines += [f"skipped {fault}: {reason}" for fault, reason in sorted(reasons)]
        lines += [f"FAILED  {o.fault}: {o.test}" for row in rows for o in row.outcomes if o.result == "FAIL"]
        outcomes = [outcome for row in rows for outcome in row.outcomes]
        counts = {result: sum(o.result == result for o in outcomes) for result in ("pass", "FAIL", "skip")}
        lines.append(
            f"{len({row.fault for row in rows})} faults in {len(outcomes)} tests: {counts['pass']} passed, "
            f"{counts['FAIL']} failed, {counts['skip']} skipped; {sum(row.injected for row in rows):,} times injected"
        )
        return "\n".join([*lines, footer])

    def write(self, path: Path, **about: Any) -> None:
        """The same as JSON."""
        rows = [
            {
                "id": row.fault,
                "fault": row.sentence,
                "result": row.result,
                "injected": row.injected,
                "tests": [
                    {
                        "test": outcome.test,
                        "result": outcome.result,
                        "reason": outcome.reason,
                        "seconds": round(outcome.seconds, 2),
                        "injected": outcome.recovery.faults,
                        "recovery": [
                            {"what": note.what, "seconds": round(note.seconds, 3), "bar": note.bar}
                            for note in outcome.recovery.notes
                        ],
                    }
                    for outcome in row.outcomes
                ],
            }
            for row in self.rows()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**about, "faults": rows}, indent=1) + "\n")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " │ ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _natural(fault: str) -> tuple[str, int, str]:
    letters, number, rest = re.fullmatch(r"([A-Za-z]*)(\d*)(.*)", fault).groups()  # type: ignore[union-attr]
    return letters, int(number or 0), rest
