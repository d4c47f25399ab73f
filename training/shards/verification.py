"""Whether shards are what they have to be: each whole, all of the same kind, and as many samples as was said."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from core.errors import InputError, UsageError
from core.storage.durable import overwrite
from sources.urls import is_url
from training.shards.counts import gone
from training.shards.inspection import EXPECTED, Inspected, Violation, inspect
from training.shards.names import expand, folder_of, name_of, parts
from training.shards.processes import each
from training.shards.sizes import SIZES, classes_beside, rendered, sizes_beside

KEPT = 1000
"""Violations that a report lists; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found.

    Attributes:
        shards: that were read.
        samples: in those that are whole.
        bytes: of all of them.
        members: extension -> samples that have it.
        counted: whether `sizes.json` beside the shards told their samples.
        written: whether `sizes.json` was written.
        violations: the first of them.
        violations_total: all of them.
    """

    shards: int
    samples: int
    bytes: int
    members: dict[str, int]
    counted: bool
    violations: tuple[Violation, ...]
    violations_total: int
    written: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations_total


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be checked.

    Attributes:
        decode: whether each image is decoded.
        allow_missing: whether some samples may lack the class or the caption that others have.
        processes: that read at once.
    """

    decode: bool
    allow_missing: bool
    processes: int


def verify(expressions: Sequence[str], wish: Wish, read: Callable[[Inspected, int], None]) -> Report:
    """Read shards, named as for `open_shards`, and compare them with each other and with what stands beside them.

    Args:
        read: called for each shard that was read, with the number of all.

    Raises InputError where no shards are named; what is wrong with them is in the report.
    """
    urls = _named(expressions)
    report, _ = _verified(expressions, urls, {folder: sizes_beside(folder) for folder in _folders(urls)}, wish, read)
    return report


def write_sizes(expressions: Sequence[str], wish: Wish, read: Callable[[Inspected, int], None]) -> Report:
    """As `verify`, but what `sizes.json` says is no matter: it is written anew where every shard is whole.

    Raises UsageError for shards behind URLs as well.
    """
    urls = _named(expressions)
    if remote := [url for url in urls if is_url(url)]:
        raise UsageError(f"{remote[0]}: {SIZES} cannot be written there", next_step="count them where they are stored")
    report, found = _verified((), urls, {}, wish, read)
    counts = {one.url: one.samples for one in found if one.samples is not None}
    if len(counts) < len(found):
        return report
    for folder in _folders(urls):
        _rewrite(Path(folder), {name_of(url): count for url, count in counts.items() if folder_of(url) == folder})
    return replace(report, written=True)


def _rewrite(folder: Path, counted: Mapping[str, int]) -> None:
    """Put counts into the file of a folder; those of shards that are gone are dropped, of others stay."""
    try:
        before = sizes_beside(str(folder)) or {}
    except InputError:  # something else stands there
        before = {}
    kept = {name: count for name, count in before.items() if (folder / name).exists()}
    path = folder / SIZES
    temporary = path.with_name(f".{SIZES}.{secrets.token_hex(4)}")
    overwrite(path, rendered(dict(sorted((kept | dict(counted)).items()))), temporary=temporary)


def _named(expressions: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(url for expression in expressions for url in expand(expression)))


def _folders(urls: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(folder_of, urls)))


def _verified(
    expressions: Sequence[str],
    urls: Sequence[str],
    sizes: Mapping[str, Mapping[str, int] | None],
    wish: Wish,
    read: Callable[[Inspected, int], None],
) -> tuple[Report, list[Inspected]]:
    classes = {folder: known for folder in _folders(urls) if (known := classes_beside(folder)) is not None}
    look = partial(_look, {folder: len(known) for folder, known in classes.items()}, wish.decode)
    by_url: dict[str, Inspected] = {}
    for one in each(look, urls, min(wish.processes, len(urls)), connects=any(map(is_url, urls))):
        by_url[one.url] = one
        read(one, len(urls))
    found = [by_url[url] for url in urls]
    more = [*_gone(expressions, urls), *_miscounted(found, sizes), *_repeated(found)]
    if not wish.allow_missing:
        more += _unlike(found)
    violations = [violation for one in found for violation in one.violations] + more
    report = Report(
        shards=len(found),
        samples=sum(one.samples or 0 for one in found),
        bytes=sum(one.bytes for one in found),
        members=dict(sorted(sum((one.members for one in found), Counter()).items())),
        counted=bool(sizes) and all(known is not None for known in sizes.values()),
        violations=tuple(violations[:KEPT]),
        violations_total=sum(one.total for one in found) + len(more),
    )
    return report, found


def _look(classes: Mapping[str, int], decode: bool, url: str) -> Inspected:
    return inspect(url, classes=classes.get(folder_of(url)), decode=decode)


def _gone(expressions: Sequence[str], urls: Sequence[str]) -> list[Violation]:
    folders = [part for expression in expressions for part in parts(expression) if os.path.isdir(part)]
    return [
        Violation(code="sizes_differ", where=os.path.join(folder, name), message=f"is in {SIZES}, and not there")
        for folder in folders
        for name in gone(folder, urls)
    ]


def _miscounted(found: Sequence[Inspected], sizes: Mapping[str, Mapping[str, int] | None]) -> list[Violation]:
    wrong = []
    for one in found:
        known = sizes.get(folder_of(one.url))
        if known is None or one.samples is None:
            continue
        said = known.get(name_of(one.url))
        if said != one.samples:
            claim = f"does not name it; it has {one.samples:,} samples" if said is None else f"says {said:,} samples"
            message = f"{SIZES} {claim}" + ("" if said is None else f", it has {one.samples:,}")
            wrong.append(Violation(code="sizes_differ", where=one.url, message=message))
    return wrong


def _repeated(found: Sequence[Inspected]) -> list[Violation]:
    """Keys that occur in several shards of one name, such as train-000000.tar and train-000001.tar."""
    seen: dict[str, dict[str, str]] = {}
    wrong = []
    for one in found:
        alike = seen.setdefault(re.sub(r"[0-9]+(?=[^0-9]*$)", "", one.url), {})
        again = [key for key in one.keys if key in alike]
        if again:
            message = f"{len(again):,} keys are in other shards too, the first is {again[0]!r} of {alike[again[0]]}"
            wrong.append(Violation(code="duplicate_key", where=one.url, message=message))
        alike.update((key, name_of(one.url)) for key in one.keys)
    return wrong


def _unlike(found: Sequence[Inspected]) -> list[Violation]:
    """Samples without the class or the caption that others have."""
    wrong = []
    for name in EXPECTED:
        if not any(one.members[name] for one in found):
            continue
        for one in found:
            if keys := one.without.get(name):
                lacking = (one.samples or 0) - one.members[name]
                message = f"{lacking:,} samples have no {name}, as others have; the first is {keys[0]!r}"
                wrong.append(Violation(code="missing_member", where=one.url, message=message))
    return wrong
