"""The shards that an expression names, and how many samples each of them holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import InputError
from training.shards.names import expand, folder_of, name_of, parts
from training.shards.sizes import SIZES, sizes_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shards in the order in which they were named.

    Attributes:
        urls: local paths, or http:// and https:// URLs; each once.
        counts: samples of each, from the `sizes.json` beside it; None where a folder of theirs has no such file.
        digest: of names and counts, hex: the same shards with the same samples, wherever they lie.
    """

    urls: tuple[str, ...]
    counts: tuple[int, ...] | None
    digest: str

    @property
    def samples(self) -> int | None:
        """Samples of all, where that is known."""
        return None if self.counts is None else sum(self.counts)


def open_shards(expression: str) -> Shards:
    """The shards that an expression names.

    Args:
        expression: a shard, braces (`shards/train-{000000..001281}.tar`), a pattern (`shards/train-*.tar`), a folder,
            each local or below http(s)://, or several of these joined by `::`. A folder behind http is what its
            `sizes.json` says, since a server lists none; a pattern is for local files only.

    Raises InputError where nothing is named, a local shard is not there, one is named twice, a URL is of another
    kind, or `sizes.json` does not know a shard that stands beside it, or knows one that a folder does not hold.
    """
    urls = expand(expression)
    for folder in filter(os.path.isdir, parts(expression)):
        _require_all(folder, urls)
    counts = _counts(urls)
    return Shards(urls=urls, counts=counts, digest=_digest(urls, counts))


def gone(folder: str, urls: Sequence[str]) -> list[str]:
    """The shards of a folder that its `sizes.json` names and that are not among `urls`."""
    return sorted((sizes_beside(folder) or {}).keys() - set(map(name_of, urls)))


def _require_all(folder: str, urls: Sequence[str]) -> None:
    if missing := gone(folder, urls):
        raise InputError(
            f"{folder}: {len(missing):,} shards that its {SIZES} names are not there, the first is {missing[0]}",
            code="sizes_differ",
            next_step="copy them there, or take them out of the file: `embq shards verify FOLDER --write-sizes`",
        )


def _counts(urls: Sequence[str]) -> tuple[int, ...] | None:
    """Samples of each shard; None where they are not known of all."""
    known = {folder: sizes_beside(folder) for folder in dict.fromkeys(map(folder_of, urls))}
    counts = []
    for url in urls:
        sizes = known[folder_of(url)]
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
    known: Sequence[int | None] = counts or [None] * len(urls)
    pairs = [[name_of(url), count] for url, count in zip(urls, known, strict=True)]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
