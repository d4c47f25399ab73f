"""The list of runs on the fleet page: their names, and which of them a viewer sees, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self
from urllib.parse import urlencode

from embq.core.redaction import masked
from embq.retrieval.ui.fleet.sources import RunView

MOST_RUNS = 50
"""Shown at once."""
MOST_TEXT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Which runs a viewer sees. Its fields are those of the page's address.

    Attributes:
        text: a part of the output, model or id of a run.
        state: one of `STATES`, which are in the order of their sort; "" for all.
        sort: one of `SORTS`.
        start: number of runs before the first one.
    """

    text: str = ""
    state: str = ""
    sort: str = ""
    start: int = 0

    STATES: ClassVar = (
        *("running", "finishing", "loading", "starting", "waiting"),
        *("stopped", "paused", "interrupted", "cancelled", "done"),
    )
    SORTS: ClassVar = {"": "at work first", "age": "newest first", "name": "by name", "state": "by state"}

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """The query in the parameters of an address; values that do not exist are left out."""
        start, sort, state = given.get("start", ""), given.get("sort", ""), given.get("state", "")
        return cls(
            text=given.get("text", "").strip()[:MOST_TEXT],
            state=state if state in cls.STATES else "",
            sort=sort if sort in cls.SORTS else "",
            start=int(start) if start.isascii() and start.isdigit() and len(start) < 9 else 0,
        )

    def address(self, **changes: Any) -> str:
        """The end of an address, with changes; other runs than now are seen from the first one on."""
        changed = replace(self, **{"start": 0, **changes})
        given = {name: value for name, value in asdict(changed).items() if value}
        return f"?{urlencode(given)}" if given else ""

    def of_runs(self, runs: Sequence[RunView], titles: Mapping[str, str]) -> list[RunView]:
        """The runs that it names, in its order."""
        first: Callable[[RunView], Any] = {
            "name": lambda view: titles[view.progress.output].casefold(),
            "state": lambda view: self.STATES.index(view.state),
            "age": lambda _: 0,
        }.get(self.sort, lambda view: not view.active)
        matching = [view for view in runs if self._names(view)]
        return sorted(matching, key=lambda view: (first(view), -(view.progress.created_s or 0.0)))

    def _names(self, view: RunView) -> bool:
        progress = view.progress
        words = f"{masked(progress.output)}\n{masked(progress.model)}\n{progress.run}".casefold()
        return self.state in ("", view.state) and self.text.casefold() in words


ALL_RUNS = RunQuery()


def titles_of(runs: Iterable[RunView]) -> dict[str, str]:
    """Output of each run -> the shortest ending of its path that no other output of theirs has."""
    parts = {view.progress.output: masked(view.progress.output).rstrip("/").split("/") for view in runs}
    titles: dict[str, str] = {}
    length = 0
    while unresolved := parts.keys() - titles.keys():
        length += 1
        ends = {output: "/".join(parts[output][-length:]) for output in unresolved}
        times = Counter(ends.values())
        titles |= {output: end for output, end in ends.items() if times[end] == 1 or length >= len(parts[output])}
    return titles
