"""The hint for a unit of an index build: data that names it, as `embq.core.queue.hints.Hint` names a unit of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from embq.core import wire
from embq.core.queue.hints import HintJob, body, read
from embq.core.queue.keys import INDEX_HINT_FUNCTION


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHint:
    """A hint for a unit of an index build.

    Attributes:
        run, gen, u: as in other hints; the run is a stage of the build.
        unit: the unit, for the process that does it.
    """

    function: ClassVar[str] = INDEX_HINT_FUNCTION

    run: str
    gen: str
    u: int
    unit: Mapping[str, str | int]

    def to_json(self) -> dict[str, Any]:
        """The hint as the one argument of its job."""
        return body(self, dict(self.unit))

    @classmethod
    def from_job(cls, job: HintJob) -> IndexHint:
        """The hint in a job; MalformedError if it is no such hint of this version."""
        run, gen, u, unit = read(job, cls.function, _words_and_numbers)
        return cls(run=run, gen=gen, u=u, unit=unit)


def _words_and_numbers(unit: Mapping[str, Any]) -> dict[str, str | int]:
    return wire.convert(dict[str, str | int], unit, what="step of an index")
