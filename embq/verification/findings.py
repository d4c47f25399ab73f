"""What checks find: violations of an output, bounded in memory, and the rows of `embq doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from core.errors import EmbqError

KEPT = 1000
"""Violations that are kept in words; a run of millions of units with its source gone has one for each."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant: its stable name, the record, file or unit where it is broken, and how."""

    invariant: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class Check:
    """A row of `embq doctor`: `state` is "ok", "warn" (works, but look at it) or "fail"; `fix` is "" where it is ok."""

    name: str
    state: str
    detail: str
    fix: str = ""


def guarded(name: str, look: Callable[[], list[Check]]) -> Iterator[Check]:
    """The rows of `look`, or one that says why there are none."""
    try:
        yield from look()
    except EmbqError as error:
        yield Check(name, "fail", error.message, error.next_step)
    except RedisError as error:
        yield Check(name, "fail", f"the broker refuses a command: {error}", "allow it to this user (ACL)")
    except OSError as error:
        yield Check(name, "fail", f"{error}", "check permissions and free space")


@dataclass(slots=True)
class Findings:
    """Collects violations and notes. `count` counts every violation, `violations` holds the first `KEPT`."""

    violations: list[Violation] = field(default_factory=list)
    count: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, invariant: str, where: str, message: str) -> None:
        """A violation."""
        self.count += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(invariant, where, message))

    def note(self, message: str) -> None:
        """Something a user should know that breaks nothing."""
        self.notes.append(message)
