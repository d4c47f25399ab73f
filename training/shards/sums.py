"""Many names of shards as few brace expressions: the inverse of brace expansion."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from core.errors import InputError

_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*(?:\.tar(?:\.[0-9a-z]+)?)?)", re.DOTALL | re.ASCII)
"""A name as (before, number, after): the last number, not counting the one in a suffix such as .tar.bz2."""

SPECIAL = ("{", "}", ",", "::", "\\", "\n")
"""What brace expansion and lists of shards give a meaning of their own."""


class Run(NamedTuple):
    """Names that follow each other without a gap, and the expression that stands for them."""

    expression: str
    names: tuple[str, ...]


class _Numbered(NamedTuple):
    value: int
    digits: str
    name: str


def contract(names: Iterable[str]) -> list[Run]:
    """The names, each once, as runs in order of text and number; expanding the expressions gives the names back.

    Raises InputError for a name with characters that an expression cannot say.
    """
    plain: list[Run] = []
    groups: defaultdict[tuple[str, str], list[_Numbered]] = defaultdict(list)
    for name in dict.fromkeys(names):
        if found := next((text for text in SPECIAL if text in name), ""):
            raise InputError(
                f"{name!r}: brace expressions cannot say a name with {found!r} in it", next_step="rename the file"
            )
        match = _LAST_NUMBER.fullmatch(name)
        if match is None:
            plain.append(Run(name, (name,)))
        else:
            groups[match[1], match[3]].append(_Numbered(int(match[2]), match[2], name))
    runs = [_run(*ends, run) for ends, numbered in groups.items() for run in _runs(numbered)]
    return sorted(runs + plain, key=lambda run: (_text(run.names[0]), len(run.names[0]), run.names[0]))


def _text(name: str) -> tuple[str, int]:
    match = _LAST_NUMBER.fullmatch(name)
    return (name, -1) if match is None else (match[1] + match[3], int(match[2]))


def _run(before: str, after: str, run: list[_Numbered]) -> Run:
    names = tuple(one.name for one in run)
    if len(run) == 1:
        return Run(names[0], names)
    return Run(f"{before}{{{run[0].digits}..{run[-1].digits}}}{after}", names)


def _runs(numbered: list[_Numbered]) -> Iterator[list[_Numbered]]:
    """Runs without a gap and of one width, which is that of the first where it begins with a zero, else none."""
    run: list[_Numbered] = []
    for one in sorted(numbered, key=lambda one: (len(one.digits), one.value)):
        if run and one.value == run[-1].value + 1 and (len(one.digits) == len(run[-1].digits) or _widens(run, one)):
            run.append(one)
            continue
        if run:
            yield run
        run = [one]
    if run:
        yield run


def _widens(run: list[_Numbered], one: _Numbered) -> bool:
    """Whether a run without leading zeros goes on in a number of one digit more."""
    return str(run[0].value) == run[0].digits and str(one.value) == one.digits
