"""Inputs as the user names them -> the units of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from braceexpand import braceexpand

from core.errors import InputError, SourceError, UsageError
from core.models import MODALITIES
from core.units import Unit
from sources.base import ReadOptions
from sources.kinds import SOURCES, SUPPORTED, check_source, detect, kind_of
from sources.remote import is_url, listings
from sources.storage import absolute, has_magic, match, stat_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will embed.

    Attributes:
        units: the units in the order of the inputs, to be taken once. Folders are listed and the lines of texts
            counted while it is taken, so taking it raises InputError where an input turns out to be unusable.
        modalities: what each row embeds: ("image",), ("text",) or ("image", "text").
        warnings: one line each, about inputs that are left out.
    """

    units: Iterator[Unit]
    modalities: tuple[str, ...]
    warnings: tuple[str, ...]


def plan(inputs: Sequence[str], options: ReadOptions, modalities: Sequence[str] = ()) -> Plan:
    """The plan for `inputs`: paths, brace expressions, patterns and folders on this machine.

    Args:
        inputs: what the user named. A path that exists is taken as it is, whatever characters it has.
        options: how inputs split into units and samples.
        modalities: what to embed; () takes images where all inputs can have them, and texts where none can.

    Raises InputError for missing inputs, a pattern without match, a command or URL, inputs that are all empty, and
    inputs that do not go together; UsageError for options out of range. A shard is looked at once, and not opened.
    """
    if options.unit_samples < 1:
        raise UsageError("a unit needs at least one sample", next_step="for example --unit-size 1000")
    if not inputs:
        raise UsageError("no input was named", next_step=f"name {SUPPORTED}")
    survey = _Survey(options)
    with listings():
        for path in _expand(inputs):
            survey.add(path)
    survey.check()
    return Plan(
        units=chain.from_iterable(survey.pieces),
        modalities=_choose_modalities(survey.kinds, modalities),
        warnings=survey.warnings(),
    )


def _expand(inputs: Sequence[str]) -> Iterator[str]:
    """The absolute paths and URLs that `inputs` name, in order; links stay as they are, for the user to recognise."""
    for text in inputs:
        check_source(text)
        special = "{" in text or has_magic(text)
        if not special or (not is_url(text) and os.path.lexists(text)):
            yield absolute(text)
            continue
        try:
            patterns = braceexpand(text) if "{" in text else iter([text])
            for pattern in patterns:
                yield from _matches(pattern)
        except ValueError as error:  # its UnbalancedBracesError, or a range such as {a..5}
            raise InputError(
                f"{text!r}: these braces cannot be expanded", next_step="for example 'shards/{00000..00099}.tar'"
            ) from error


def _matches(pattern: str) -> Iterator[str]:
    if not has_magic(pattern):
        yield absolute(pattern)
        return
    matches = match(pattern)
    if not matches:
        raise InputError(
            f"{pattern!r}: no file matches", next_step="check the pattern: list the folder with the storage's own tool"
        )
    yield from map(absolute, matches)


class _Survey:
    """Looks at each path once, and keeps what to say about the odd ones until all have been seen."""

    def __init__(self, options: ReadOptions) -> None:
        self.pieces: list[Iterable[Unit]] = []
        self.kinds: dict[str, str] = {}  # kind -> the first path of it
        self._options = options
        self._paths = 0
        self._seen: set[str] = set()
        self._missing: list[str] = []
        self._repeated: list[str] = []
        self._empty: list[str] = []

    def add(self, path: str) -> None:
        """Take one path: a file, or a folder for what it holds."""
        self._paths += 1
        try:
            for kind, found in [("tar", path)] if kind_of(path) == "tar" else detect(path):
                self._add_input(kind, found)
        except SourceError as error:
            if error.code != "source_missing":
                raise
            self._missing.append(path)

    def _add_input(self, kind: str, path: str) -> None:
        if path in self._seen:
            self._repeated.append(path)
            return
        self._seen.add(path)
        units = SOURCES[kind].split(path, self._options)
        if kind == "tar":
            # Split now: all it takes is one look at the file's status, which also tells whether it is there.
            self.pieces.append(list(units))
        elif kind == "files" or stat_file(path).size:
            self.pieces.append(units)
        else:
            self._empty.append(path)
            return
        self.kinds.setdefault(kind, path)

    def check(self) -> None:
        """Raise InputError where an input is missing, or nothing is left to plan."""
        if self._missing:
            raise InputError(
                f"{_some(self._missing)} not found ({len(self._missing):,} of {self._paths:,} inputs)",
                code="source_missing",
                next_step="check the names, and that the disk is mounted on this machine",
            )
        if not self.pieces:
            raise InputError(
                f"{_some(self._empty)} empty: nothing is left to embed",
                code="empty_input",
                next_step="check how the files were made",
            )

    def warnings(self) -> tuple[str, ...]:
        """What the user should know about inputs that are left out."""
        lines = []
        if self._repeated:
            lines.append(f"{_some(self._repeated)} named more than once, planned once")
        if self._empty:
            lines.append(f"{_some(self._empty)} empty, left out")
        return tuple(lines)


def _some(paths: Sequence[str]) -> str:
    """Up to three of `paths`, and how many more there are."""
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more + (" is" if len(paths) == 1 else " are")


def _choose_modalities(kinds: Mapping[str, str], wanted: Sequence[str]) -> tuple[str, ...]:
    """`wanted` if every kind can have it, else what the kinds have in common; `kinds` maps each to an example."""
    if unknown := set(wanted) - set(MODALITIES):
        raise UsageError(f"unknown modality {', '.join(sorted(unknown))}", next_step=f"known: {', '.join(MODALITIES)}")
    with_images = [path for kind, path in kinds.items() if "image" in SOURCES[kind].modalities]
    texts_only = [path for kind, path in kinds.items() if "image" not in SOURCES[kind].modalities]
    if "image" in wanted and texts_only:
        raise InputError(
            f"{texts_only[0]} holds texts only, and images are to be embedded",
            next_step="leave it out, or choose --modality text",
        )
    if not wanted and with_images and texts_only:
        raise InputError(
            f"{with_images[0]} holds images and {texts_only[0]} texts only",
            next_step="choose --modality text to embed captions and texts, or run them separately",
        )
    if not wanted:
        return ("image",) if with_images else ("text",)
    return tuple(modality for modality in MODALITIES if modality in wanted)
