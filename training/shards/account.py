"""What is in shards: their expressions with the number of shards, samples and bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sources.storage import stat_file
from training.shards.counts import open_shards
from training.shards.sizes import CLASSES, SIZES
from training.shards.sums import contract

RECORD = "conversion.json"
"""How the record of a conversion is called, behind the name of its shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Shards that follow each other.

    Attributes:
        expression: their names; expanding it gives them.
        shards: how many.
        samples: of all of them; None where that is not known.
        bytes: of all of them.
    """

    expression: str
    shards: int
    samples: int | None
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is in shards, and their sums."""

    lines: tuple[Line, ...]

    @property
    def shards(self) -> int:
        """All shards."""
        return sum(line.shards for line in self.lines)

    @property
    def samples(self) -> int | None:
        """All samples; None where those of some are not known."""
        known = [line.samples for line in self.lines if line.samples is not None]
        return sum(known) if len(known) == len(self.lines) else None

    @property
    def bytes(self) -> int:
        """All bytes."""
        return sum(line.bytes for line in self.lines)


def account(expressions: Iterable[str]) -> Account:
    """The account of shards, named as for `open_shards`; those of a folder are compared with its `sizes.json`.

    Raises InputError as `open_shards` does, SourceError where a shard cannot be asked for its size.
    """
    counted: dict[str, int | None] = {}
    for expression in expressions:
        shards = open_shards(expression)
        known: Sequence[int | None] = shards.counts or [None] * len(shards.urls)
        counted |= zip(shards.urls, known, strict=True)
    lines = []
    for run in contract(counted):
        samples = [count for name in run.names if (count := counted[name]) is not None]
        lines.append(
            Line(
                expression=run.expression,
                shards=len(run.names),
                samples=sum(samples) if len(samples) == len(run.names) else None,
                bytes=sum(stat_file(name).size for name in run.names),
            )
        )
    return Account(lines=tuple(lines))


def named_on(lines: Iterable[str]) -> list[str]:
    """The expressions of names that stand one on a line, as `ls` prints them.

    What `embq shards convert` writes beside shards is none of them.
    """
    names = (line.rstrip("\r\n") for line in lines)
    return [run.expression for run in contract(name for name in names if name and not _stands_beside(name))]


def _stands_beside(name: str) -> bool:
    base = os.path.basename(name)
    return base in (SIZES, CLASSES) or base == RECORD or base.endswith(f"-{RECORD}")


def printed(account: Account) -> list[str]:
    """One line for each expression, in columns, and the sums where there are several."""
    rows = [(line.expression, line.shards, line.samples, line.bytes) for line in account.lines]
    if len(rows) > 1:
        rows.append(("in all", account.shards, account.samples, account.bytes))
    cells = [
        (name, f"{shards:,} shards", "? samples" if samples is None else f"{samples:,} samples", size_of(size))
        for name, shards, samples, size in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in (1, 2, 3))])
        for row in cells
    ]


def size_of(count: float) -> str:
    """Bytes as people say them: 410 B, 1.3 kB, 5.6 GB."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.1f} TB"
