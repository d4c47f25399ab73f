"""What an index is asked, and what it answers: the same of an index here and of one behind a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import InputError, SampleError, UsageError

IDENTITY = ("id", "key", "caption", "source", "unit_id")
"""Columns of a row that are no metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row that an index found.

    Attributes:
        rank: 1 for the best.
        id: of the row.
        key: of its sample.
        score: its cosine with the query; for vectors that have other lengths than 1 the inner product, and with
            metric l2 the squared distance, of which the smallest is the best.
        caption: its text; None without one.
        source: the input that it came from; None where that is not known.
        metadata: its other columns.
    """

    rank: int
    id: int
    key: str
    score: float
    caption: str | None
    source: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values; metadata only where the index has such columns."""
        said = {name: getattr(self, name) for name in ("rank", "id", "key", "score", "caption", "source")}
        return {**said, "metadata": dict(self.metadata)} if self.metadata else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: exactly one of the first four, and how.

    Attributes:
        text: words.
        image: an encoded image, or the path of its file.
        vector: numbers of shape (d,), or (n, d), of which the first row counts; or the path of a file of them.
        id: of a row, which is itself no answer.
        k: most results.
        nprobe: lists of the index that are looked at; None for what its tuning chose.
        refine: False leaves out the second look at the best rows by their full vectors.
        prompt: name of the model's prompt before the text.
        prompt_text: the prompt itself.
        model: spec of the model where it is not where the run had it.
    """

    text: str | None = None
    image: bytes | Path | None = None
    vector: Any = None
    id: int | None = None
    k: int = 10
    nprobe: int | None = None
    refine: bool | None = None
    prompt: str | None = None
    prompt_text: str | None = None
    model: str | None = None

    def check(self) -> None:
        """Raise UsageError where not exactly one thing is asked, or options do not belong to it."""
        asked = [name for name in ("text", "image", "vector", "id") if getattr(self, name) is not None]
        if len(asked) != 1:
            raise UsageError(
                f"asked by {' and by '.join(asked)}" if asked else "nothing is asked",
                next_step="give one of a text, an image, a vector and the id of a row",
            )
        if self.k < 1:
            raise UsageError(f"k is {self.k}", next_step="ask for one result or more")
        prompted = self.prompt is not None or self.prompt_text is not None
        if prompted and self.text is None:
            raise UsageError("a prompt stands before a text, and none is asked", next_step="leave the prompt out")
        if self.prompt is not None and self.prompt_text is not None:
            raise UsageError("a prompt is named, and another one given", next_step="leave out one of the two")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an index found, and how long that took.

    Attributes:
        results: best first.
        timing: load_s: opening the index and the model; embed_ms: the query; search_ms: its neighbours; rows_ms: their
            keys and captions.
    """

    results: list[Result]
    timing: dict[str, float]


def read_image(path: Path) -> bytes:
    """The bytes of an image's file; InputError `bad_query` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", next_step="give the file of an image", code="bad_query"
        ) from error


def not_embedded(error: SampleError) -> InputError:
    """The error of a question that has no vector."""
    return InputError(
        f"the query cannot be embedded: {error.message}", next_step="ask with other words, or image", code="bad_query"
    )


def path_of(value: Any) -> Path | None:
    """A path that is text or path-like; None for anything else."""
    return Path(value) if isinstance(value, (str, os.PathLike)) else None
