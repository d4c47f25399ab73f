"""Expressions for shards: expanded to names, and names contracted to few expressions."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from embq.core.errors import InputError
from embq.core.storage.paths import is_url
from embq.sources.access.files import base_name, has_magic, match
from embq.sources.access.patterns import expand_braces
from embq.sources.access.urls import check_url, is_http, path_of
from embq.training.shards.sizes import SIZES, sizes_beside

_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*(?:\.tar(?:\.[0-9a-z]+)?)?)", re.DOTALL | re.ASCII)
"""A name as (before, number, after): the last number, not counting the one in a suffix such as .tar.bz2."""

SPECIAL = ("{", "}", ",", "::", "\\", "\n")
"""Characters with a meaning in brace expansion and lists of shards."""


class Run(NamedTuple):
    """Consecutive names, and the expression that expands to them."""

    expression: str
    names: tuple[str, ...]


def contract(names: Iterable[str]) -> list[Run]:
    """Contract names to runs, ordered by text and number; expanding their expressions gives the names back.

    Raises InputError for a name with characters that an expression cannot say.
    """
    runs: list[Run] = []
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        if special := next((text for text in SPECIAL if text in name), ""):
            raise InputError(
                f"{name!r}: brace expressions cannot say a name with {special!r} in it", next_step="rename the file"
            )
        parts = _LAST_NUMBER.fullmatch(name)
        if parts is None:
            runs.append(Run(name, (name,)))
        else:
            groups[parts[1], parts[3]].append(parts[2])
    for (prefix, after), numbers in groups.items():
        for run in _consecutive(numbers):
            expression = run[0] if len(run) == 1 else f"{{{run[0]}..{run[-1]}}}"
            runs.append(Run(f"{prefix}{expression}{after}", tuple(f"{prefix}{number}{after}" for number in run)))
    return sorted(runs, key=lambda run: (_text(run.names[0]), len(run.names[0]), run.names[0]))


def _text(name: str) -> tuple[str, int]:
    parts = _LAST_NUMBER.fullmatch(name)
    return (name, -1) if parts is None else (parts[1] + parts[3], int(parts[2]))


def _consecutive(numbers: Iterable[str]) -> list[list[str]]:
    """Numbers in runs of one width, which is that of the first if it has leading zeros."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda number: (len(number), number)):
        run = runs[-1] if runs else [number]
        follows = int(number) == int(run[-1]) + 1
        grows = str(int(run[0])) == run[0] and str(int(number)) == number
        if follows and (len(number) == len(run[-1]) or grows):
            run.append(number)
        else:
            runs.append([number])
    return runs


EXAMPLE = "for example 'shards/train-{000000..000099}.tar', 'shards/*.tar' or a folder"

_JOINT = re.compile(r"::(?![0-9A-Fa-f:.]{0,45}\])")
"""Separator of expressions; not the :: of an IPv6 address, as in http://[::1]:8080/."""


def parts(expression: str) -> list[str]:
    """The expressions joined by `::`; InputError if there is none."""
    if not expression.strip():
        raise InputError("no shards were named", next_step=EXAMPLE)
    return _JOINT.split(expression)


def expand(expression: str) -> tuple[str, ...]:
    """The shards of an expression, each once, in order; see `open_shards`."""
    urls = [url for part in parts(expression) for url in _part(part)]
    listed: set[str] = set()
    for url in urls:
        if url in listed:
            raise InputError(
                f"{url}: is named twice, so that its samples would count twice", next_step="name each shard once"
            )
        listed.add(url)
    return tuple(urls)


def name_of(url: str) -> str:
    """The name of a shard in its folder, as in `sizes.json`."""
    return base_name(url)


def folder_of(url: str) -> str:
    """The folder of a shard, local or remote."""
    return path_of(url).rpartition("/")[0] if is_url(url) else os.path.dirname(url) or "."


def _part(text: str) -> Iterator[str]:
    if not text:
        raise InputError("nothing stands before or after a '::' of the shards", next_step=EXAMPLE)
    _check_kind(text)
    if "{" not in text or os.path.lexists(text):
        yield from _matches(text)
        return
    for pattern in expand_braces(text, EXAMPLE.removeprefix("for example ")):
        yield from _matches(pattern)


def _check_kind(text: str) -> None:
    """InputError for anything but local paths and http(s), commands (`pipe:`) above all."""
    if text.startswith("pipe:") or (is_url(text) and not is_http(text)):
        kind = text.partition(":")[0]
        raise InputError(
            f"{text!r}: shards are read from folders and over http(s), not from {kind}:",
            next_step="copy them, or mount the storage, or let `embq shards serve` or another server give them by http",
        )


def _matches(pattern: str) -> Iterator[str]:
    """The shards of one pattern without braces."""
    if is_url(pattern):
        yield from _remote_folder(pattern) if path_of(pattern).endswith("/") else [_checked_url(pattern)]
    elif os.path.isdir(pattern):
        yield from _local_folder(pattern)
    elif os.path.exists(pattern):
        yield pattern
    elif has_magic(pattern):
        paths = [path for path in match(pattern) if not os.path.isdir(path)]
        if not paths:
            raise InputError(f"{pattern!r}: no file matches", next_step="check the pattern: list the folder")
        yield from paths
    else:
        raise InputError(
            f"{pattern}: does not exist",
            code="source_missing",
            next_step="check the path; `embq shards sum FOLDER` says what is there",
        )


def _checked_url(url: str) -> str:
    check_url(url)
    if has_magic(url):
        raise InputError(f"{url}: a server lists nothing, so a pattern cannot be matched", next_step=EXAMPLE)
    return url


def _local_folder(folder: str) -> Iterator[str]:
    names = sorted(name for name in os.listdir(folder) if name.endswith(".tar") and not name.startswith("."))
    if not names:
        raise InputError(f"{folder}: holds no .tar file", next_step="name the folder of the shards, or the shards")
    yield from (os.path.join(folder, name) for name in names)


def _remote_folder(url: str) -> Iterator[str]:
    sizes = sizes_beside(url)
    if not sizes:
        raise InputError(
            f"{url}: has no {SIZES}, and a server lists nothing",
            next_step="name the shards with braces, or put a sizes.json beside them",
        )
    yield from (url + name for name in sorted(sizes))
