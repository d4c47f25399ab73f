"""The shards of an expression with their numbers of samples, and their sums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embq.core.errors import InputError, UsageError
from embq.core.service.progress_line import size_text
from embq.sources.access.files import stat_file
from embq.training.shards.names import contract, expand, folder_of, name_of, parts
from embq.training.shards.sizes import CLASSES, SIZES, sizes_beside

RECORD = "conversion.json"
"""End of the file name of a conversion's record, after the name of its shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRun:
    """Consecutive shards.

    Attributes:
        expression: their names; expanding it gives them.
        shards: how many.
        samples: of all of them; None if that is not known.
        bytes: of all of them.
    """

    expression: str
    shards: int
    samples: int | None
    bytes: int


def summarized(expressions: Iterable[str]) -> list[ShardRun]:
    """The runs of shards named as for `open_shards`; those of a folder are compared with its `sizes.json`.

    Raises InputError as `open_shards` does, SourceError if a shard cannot be asked for its size.
    """
    counted: dict[str, int | None] = {}
    for expression in expressions:
        shards = open_shards(expression)
        counts: Sequence[int | None] = shards.counts or [None] * len(shards.urls)
        counted |= zip(shards.urls, counts, strict=True)
    return [
        ShardRun(
            expression=run.expression,
            shards=len(run.names),
            samples=_sum(counted[name] for name in run.names),
            bytes=sum(stat_file(name).size for name in run.names),
        )
        for run in contract(counted)
    ]


def total_of(runs: Sequence[ShardRun]) -> ShardRun:
    """The sums of runs."""
    return ShardRun(
        expression="in all",
        shards=sum(run.shards for run in runs),
        samples=_sum(run.samples for run in runs),
        bytes=sum(run.bytes for run in runs),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum; None if a number is not known."""
    numbers = list(counts)
    return None if None in numbers else sum(count or 0 for count in numbers)


def named_on(lines: Iterable[str]) -> list[str]:
    """Expressions of names that stand one on a line, as `ls` prints them.

    What `embq shards convert` writes beside shards is none of them.
    """
    names = (line.rstrip("\r\n") for line in lines)
    return [run.expression for run in contract(name for name in names if name and not _stands_beside(name))]


def _stands_beside(name: str) -> bool:
    base = os.path.basename(name)
    return base in (SIZES, CLASSES) or base == RECORD or base.endswith(f"-{RECORD}")


def printed(runs: Sequence[ShardRun]) -> list[str]:
    """A line in columns for each run, and the sums of several."""
    rows = [*runs, total_of(runs)] if len(runs) > 1 else runs
    cells = [
        (
            run.expression,
            f"{run.shards:,} shards",
            "? samples" if run.samples is None else f"{run.samples:,} samples",
            size_text(run.bytes),
        )
        for run in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in cells
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shards in the order in which they were named.

    Attributes:
        urls: local paths, or http:// and https:// URLs; each once.
        counts: samples of each, from the `sizes.json` beside it; None if a folder of theirs has no such file.
        digest: of names and counts, hex: the same shards with the same samples, wherever they lie.
    """

    urls: tuple[str, ...]
    counts: tuple[int, ...] | None
    digest: str

    @property
    def samples(self) -> int | None:
        """Samples of all, if that is known."""
        return None if self.counts is None else sum(self.counts)

    def epoch_samples(self, given: int | None, exact: str) -> int:
        """Samples of an epoch: the given number, or else all.

        Args:
            given: --epoch-samples.
            exact: the option by which an epoch has each sample once; "" without it.

        Raises InputError if the number is not known or 0, UsageError if an exact epoch is to have another number.
        """
        if self.samples is None and given is None:
            raise InputError(
                f"how many samples the shards hold is not known, for there is no {SIZES} beside them",
                next_step="let `embq shards verify FOLDER --write-sizes` count them, or give --epoch-samples N",
            )
        if self.samples == 0:
            raise InputError(f"{SIZES} says that the shards are empty", next_step="name other shards")
        if exact and None not in (self.samples, given) and self.samples != given:
            raise UsageError(
                f"--epoch-samples {given}, and the shards hold {self.samples} by {SIZES}; an exact epoch has all once",
                next_step=f"leave out --epoch-samples, or leave out {exact}",
            )
        return given or self.samples or 0


def open_shards(expression: str) -> Shards:
    """The shards of an expression.

    Args:
        expression: a shard, braces (`shards/train-{000000..001281}.tar`), a pattern (`shards/train-*.tar`), a folder,
            each local or below http(s)://, or several of these joined by `::`. A folder behind http is what its
            `sizes.json` says, since a server lists none; a pattern is for local files only.

    Raises InputError if nothing is named, a local shard is not there, one is named twice, a URL is of another
    kind, or `sizes.json` does not know a shard that stands beside it, or knows one that a folder does not hold.
    """
    urls = expand(expression)
    for folder in filter(os.path.isdir, parts(expression)):
        _require_all(folder, urls)
    counts = _counts(urls)
    return Shards(urls=urls, counts=counts, digest=_digest(urls, counts))


def missing_shards(folder: str, urls: Sequence[str]) -> list[str]:
    """Shards that the `sizes.json` of a folder names and that are not among `urls`."""
    return sorted((sizes_beside(folder) or {}).keys() - set(map(name_of, urls)))


def _require_all(folder: str, urls: Sequence[str]) -> None:
    if missing := missing_shards(folder, urls):
        raise InputError(
            f"{folder}: {len(missing):,} shards that its {SIZES} names are not there, the first is {missing[0]}",
            code="sizes_differ",
            next_step="copy them there, or take them out of the file: `embq shards verify FOLDER --write-sizes`",
        )


def _counts(urls: Sequence[str]) -> tuple[int, ...] | None:
    """Samples of each shard; None if they are not known of all."""
    sizes_of = {folder: sizes_beside(folder) for folder in dict.fromkeys(map(folder_of, urls))}
    counts = []
    for url in urls:
        sizes = sizes_of[folder_of(url)]
        if sizes is None:
            return None
        if name_of(url) not in sizes:
            raise InputError(
                f"{url}: the {SIZES} beside it does not name it",
                code="sizes_differ",
                next_step="let `embq shards verify FOLDER --write-sizes` count the shards again",
            )
        counts.append(sizes[name_of(url)])
    return tuple(counts)


def _digest(urls: Sequence[str], counts: Sequence[int] | None) -> str:
    numbers: Sequence[int | None] = counts or [None] * len(urls)
    pairs = [[name_of(url), count] for url, count in zip(urls, numbers, strict=True)]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
