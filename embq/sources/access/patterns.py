"""Patterns of names: braces, and *, ?, [] and ** below a folder.

A pattern may come with a run from elsewhere, and names are anybody's: neither may take more time or memory than its
length allows.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator

from braceexpand import braceexpand

from embq.core.errors import InputError

MAX_NAMES = 1_000_000
"""Names that the braces of one input stand for; LAION-5B has 231,350 shards."""
MAX_DEPTH = 20
"""Braces within braces: the library goes down one call for each, and reads what is inside again."""

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d{1,18})?")


def expand_braces(text: str, example: str) -> Iterator[str]:
    """The names that a text with {a,b} or {00..99} stands for; InputError if it is malformed, or they are too many.

    Args:
        example: of such a text, for the next step.
    """
    try:
        if _count(text) <= MAX_NAMES:
            yield from braceexpand(text)
            return
    except ValueError as error:  # its UnbalancedBracesError, or a range such as {a..5}
        raise InputError(f"{text!r}: these braces cannot be expanded", next_step=f"for example {example}") from error
    raise InputError(
        f"{text[:200]!r}: these braces stand for more than {MAX_NAMES:,} names",
        next_step="name the files with *, or a folder",
    )


def _count(text: str) -> int:
    """How many names the braces stand for, or more than MAX_NAMES; ValueError if they are unbalanced."""
    # Of each open brace: names by the last comma, names since, position after the brace.
    levels, at = [(0, 1, 0)], 0
    while at < len(text):
        done, current, start = levels[-1]
        match text[at]:
            case "\\":
                at += 1
            case "{":
                levels.append((0, 1, at + 1))
            case "," if len(levels) > 1:
                levels[-1] = (done + current, 1, start)
            case "}":
                if len(levels) == 1:
                    raise ValueError("a brace is closed that was not opened")
                levels.pop()
                within = done + current if done else max(current, _range_of(text, start, at))
                levels[-1] = (levels[-1][0], levels[-1][1] * within, levels[-1][2])
        if max(levels[-1][:2]) > MAX_NAMES or len(levels) > MAX_DEPTH:
            return MAX_NAMES + 1
        at += 1
    if len(levels) > 1:
        raise ValueError("a brace is not closed")
    return levels[0][1]


def _range_of(text: str, start: int, end: int) -> int:
    """How many names a range such as 00..99 gives; 1 for any other text."""
    if numbers := _NUMBERS.fullmatch(text, start, end):
        if end - start > 60:
            return MAX_NAMES + 1
        first, last, step = (int(number or 0) for number in numbers.groups())
        return abs(last - first) // (step or 1) + 1
    return 52 if _LETTERS.fullmatch(text, start, end) else 1


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a relative path matches; ** stands for any number of folders.

    Folder by folder: one expression for the whole path tries all ways to share it out among the stars.
    """
    parts = [None if part == "**" else re.compile(fnmatch.translate(part)) for part in pattern.split("/")]

    def fits(path: str) -> bool:
        names, reached = path.split("/"), {0}
        for number, part in enumerate(parts, 1):
            if part is None:  # at the end it stands for files
                reached = set(range(min(reached) + (number == len(parts)), len(names) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(names) and part.match(names[at])}
            if not reached:
                return False
        return len(names) in reached

    return fits


def simplified(pattern: str) -> str:
    """A pattern with one star in each part and one ** at its end, that matches whatever `pattern` does.

    For libraries that make one expression of a pattern; `matcher` finds what is meant among their matches.
    """
    parts = []
    for part in pattern.split("/"):
        parts.append(part if part.count("*") < 2 or part == "**" else part[: part.index("*") + 1])
        if part == "**":
            break
    return "/".join(parts)
