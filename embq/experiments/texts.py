"""The texts that the experiments embed: the user's own, or docstrings of the standard library."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from core.errors import InputError
from embq.experiments.docstrings import docstrings
from producer.plan import plan
from sources.options import ReadOptions
from sources.unit_reader import read

BUILT_IN = 2_000
"""Docstrings that are taken; 60 tokens on average, some of them long, as documents are."""
MOST = 100_000
"""Texts of a user's file that are taken, and held in memory."""


def texts_for(file: str, *, seed: int) -> list[str]:
    """The texts of a file, or the built-in ones where `file` is "", in an order that `seed` gives.

    Raises InputError where the file cannot be read or holds no text.
    """
    texts = list(islice(_read(file), MOST) if file else _built_in())
    if not texts:
        raise InputError(f"{file} holds no text", next_step="name a file of texts with --texts", code="empty_input")
    random.Random(seed).shuffle(texts)
    return texts


@cache
def _built_in() -> tuple[str, ...]:
    return tuple(text for _, text in docstrings(BUILT_IN))


def _read(file: str) -> Iterator[str]:
    for unit in plan((file,), ReadOptions(), ("text",)).units:
        for sample in read(unit, ()):
            if sample.text and sample.error is None:
                yield sample.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """A file that embq can embed.

    Attributes:
        path: .jsonl, one record a line.
        count: its records.
    """

    path: Path
    count: int


def write_records(folder: Path, texts: Sequence[str], count: int) -> Records:
    """A file of `count` texts, each with a key of its own; the texts are repeated as often as that takes."""
    path = folder / f"{count}.jsonl"
    if not path.exists():
        with path.open("w", encoding="utf-8") as file:
            for number, text in enumerate(islice(cycle(texts), count)):
                file.write(json.dumps({"id": f"k{number:08d}", "text": text}) + "\n")
    return Records(path=path, count=count)
