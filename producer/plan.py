"""Inputs as the user names them -> the units of a run."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braceexpand import braceexpand

from core.errors import InputError, SourceError, UsageError
from core.model_spec import MODALITIES
from core.units import Unit, canonical_json
from producer.selection import Selection
from sources.base import ReadOptions
from sources.columns import ALL
from sources.kinds import SOURCES, SUPPORTED, check_source, detect, kind_of, modalities_of
from sources.listings import listed_once
from sources.rows import UNUSABLE_CODES
from sources.storage import absolute, has_magic, match, stat_file
from sources.urls import is_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will embed.

    Attributes:
        units: the units in the order of the inputs, to be taken once. Folders are listed and the lines of texts
            counted while it is taken, so taking it raises InputError where an input turns out to be unusable, or
            nothing is left of the inputs.
        modalities: what each row embeds: ("image",), ("text",) or ("image", "text"); () where every input has vanished.
        warnings: one line each, about inputs that are left out.
        vanished: inputs that are not there and were known before.
    """

    units: Iterator[Unit]
    modalities: tuple[str, ...]
    warnings: tuple[str, ...]
    vanished: tuple[str, ...] = ()


def plan(
    inputs: Sequence[str],
    options: ReadOptions,
    modalities: Sequence[str] = (),
    *,
    selection: Selection | None = None,
    known: Callable[[str], bool] | None = None,
) -> Plan:
    """The plan for `inputs`: paths, brace expressions, patterns and folders on this machine.

    Args:
        inputs: what the user named. A path that exists is taken as it is, whatever characters it has.
        options: how inputs split into units and samples.
        modalities: what to embed; () takes images where all inputs can have them, and texts where none can.
        selection: what to take of the inputs; None takes all.
        known: whether an input was planned before; one that was and is not there any more is no error.

    Raises InputError for missing inputs, a pattern without match, a command or URL, inputs that are all empty, and
    inputs that do not go together; UsageError for options out of range. A shard is looked at once, and not opened.
    """
    if options.unit_samples < 1:
        raise UsageError("a unit needs at least one sample", next_step="for example --unit-size 1000")
    if not inputs:
        raise UsageError("no input was named", next_step=f"name {SUPPORTED}")
    chosen = selection or Selection()
    survey = _Survey(options, chosen)
    with listed_once():
        for path in _expand(inputs):
            survey.add(path)
    vanished = survey.check(known or (lambda _: False))
    units = survey.units()
    return Plan(
        units=units if chosen.all else _some_left(chosen.narrow(units, options.unit_samples), chosen),
        modalities=_choose_modalities(survey.kinds, survey.held, modalities) if survey.kinds else (),
        warnings=survey.warnings(),
        vanished=tuple(vanished),
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


def _some_left(units: Iterator[Unit], selection: Selection) -> Iterator[Unit]:
    first = next(units, None)
    if first is None:
        asked = ", ".join(f"--{name} {value}" for name, value in selection.recorded())
        raise InputError(
            f"nothing is left of the inputs after {asked}",
            code="empty_input",
            next_step="take more of them; `--dry-run` shows what is left",
        )
    yield first
    yield from units


_ROWS = ("parquet", "arrow", "csv", "jsonl")

_OPTIONS = {
    "--text-column": ("text_column", (*_ROWS, "hdf5")),
    "--id-column": ("id_column", (*_ROWS, "hdf5")),
    "--image-column": ("image_column", ("parquet", "arrow", "csv")),
    "--metadata-columns": ("metadata_columns", _ROWS),
    "--image-key": ("image_keys", ("tar", "files")),
    "--caption-key": ("caption_keys", ("tar", "files")),
}
"""Option -> the field of `ReadOptions` that it fills, and the kinds of input that look at it."""


class _Survey:
    """Looks at each path once, and keeps what to say about the odd ones until all have been seen.

    What is kept of hundreds of thousands of paths is packed, so that memory stays flat: about 100 bytes each.
    """

    def __init__(self, options: ReadOptions, selection: Selection) -> None:
        self.kinds: dict[str, str] = {}  # kind -> the first path of it, if it can be one that is not damaged
        self.held: dict[str, tuple[str, ...]] = {}  # kind -> what samples of that path can have
        self._unclear: dict[str, SourceError] = {}  # kind -> what is wrong with the first path of it
        self._options = options
        self._selection = selection
        self._pieces = _Pieces()
        self._paths = self._left_out = 0
        self._seen: set[bytes] = set()
        self._missing: list[str] = []
        self._repeated: list[str] = []
        self._empty: list[str] = []

    def add(self, path: str) -> None:
        """Take one path: a file, or a folder for what it holds."""
        self._paths += 1
        try:
            for kind, found in self._detect(path):
                self._add_input(kind, found)
        except SourceError as error:
            if error.code != "source_missing":
                raise
            self._missing.append(path)

    def _add_input(self, kind: str, path: str) -> None:
        if kind != "files" and not self._selection.takes(path):
            self._left_out += 1
            return
        digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:16]
        if digest in self._seen:
            self._repeated.append(path)
            return
        self._seen.add(digest)
        if kind == "tar" or (kind == "files" and is_url(path)):
            # Split now: a shard takes one look at its status, which also tells whether it is there, and a remote folder
            # was just listed.
            for unit in SOURCES[kind].split(path, self._options):
                self._pieces.add(unit.describe())
        elif kind == "files" or stat_file(path).size:
            self._pieces.add([kind, path])
        else:
            self._empty.append(path)
            return
        self._inspect(kind, path)

    def _detect(self, path: str) -> list[tuple[str, str]]:
        wanted = self._options.kind
        return (
            [("tar", path)] if not wanted and kind_of(path) == "tar" else detect(path, wanted, self._options.image_keys)
        )

    def _inspect(self, kind: str, path: str) -> None:
        """Find out what inputs of a kind hold, from the first one that can tell; its units fail where one cannot."""
        if kind in self.kinds:
            return
        try:
            self.held[kind] = modalities_of(kind, path, self._options)
        except SourceError as error:
            if error.code not in (*UNUSABLE_CODES, "missing_member"):
                raise
            self._unclear.setdefault(kind, error)
        else:
            self.kinds[kind] = path

    def units(self) -> Iterator[Unit]:
        """The units of all inputs, in order."""
        for piece in self._pieces:
            if isinstance(piece, dict):
                yield Unit.from_description(piece)
            else:
                kind, path = piece
                yield from SOURCES[kind].split(path, self._options)

    def check(self, known: Callable[[str], bool]) -> list[str]:
        """The missing inputs that were known before.

        Raises InputError where an unknown input is missing, or nothing is left to plan.
        """
        missing = [path for path in self._missing if not known(path)]
        if missing:
            raise InputError(
                f"{_some(missing)} not found ({len(missing):,} of {self._paths:,} inputs)",
                code="source_missing",
                next_step="check the names, and that the disk is mounted on this machine",
            )
        if not self._pieces.count and not self._missing:
            if self._left_out:
                raise InputError(
                    f"--include and --exclude leave none of {self._left_out:,} inputs",
                    code="empty_input",
                    next_step="a pattern is matched against the whole path, or against its end behind a slash",
                )
            raise InputError(
                f"{_some(self._empty)} empty: nothing is left to embed",
                code="empty_input",
                next_step="check how the files were made",
            )
        for kind, error in self._unclear.items():
            if kind not in self.kinds:
                raise error
        self._refuse_useless_options()
        return self._missing

    def _refuse_useless_options(self) -> None:
        """UsageError where the user named columns or extensions, and no input has such."""
        there = {*self.kinds, *self._unclear}
        for option, (field, kinds) in _OPTIONS.items():
            named = getattr(self._options, field)
            if there and named and named != (ALL,) and not there & set(kinds):
                raise UsageError(
                    f"{option} is for inputs of kind {', '.join(kinds)}; these are of kind {', '.join(sorted(there))}",
                    next_step=f"leave {option} out",
                )

    def warnings(self) -> tuple[str, ...]:
        """What the user should know about inputs that are left out."""
        lines = []
        if self._repeated:
            lines.append(f"{_some(self._repeated)} named more than once, planned once")
        if self._empty:
            lines.append(f"{_some(self._empty)} empty, left out")
        return tuple(lines)


class _Pieces:
    """A list of JSON values, packed: shards' names and versions resemble each other, and shrink to a tenth."""

    BLOCK = 1_000

    def __init__(self) -> None:
        self.count = 0
        self._blocks: list[bytes] = []
        self._open: list[str] = []

    def add(self, value: Any) -> None:
        self.count += 1
        self._open.append(canonical_json(value))
        if len(self._open) == self.BLOCK:
            text = "\n".join(self._open).encode("utf-8", "surrogateescape")
            self._blocks.append(zlib.compress(text, 1))
            self._open = []

    def __iter__(self) -> Iterator[Any]:
        for block in self._blocks:
            yield from map(json.loads, zlib.decompress(block).decode("utf-8", "surrogateescape").split("\n"))
        yield from map(json.loads, self._open)


def _some(paths: Sequence[str]) -> str:
    """Up to three of `paths`, and how many more there are."""
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more + (" is" if len(paths) == 1 else " are")


def _choose_modalities(
    kinds: Mapping[str, str], held: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> tuple[str, ...]:
    """`wanted` if every kind can have it, else what the kinds have in common.

    Args:
        kinds: kind -> an example of it.
        held: kind -> what that example can have.
    """
    if unknown := set(wanted) - set(MODALITIES):
        raise UsageError(f"unknown modality {', '.join(sorted(unknown))}", next_step=f"known: {', '.join(MODALITIES)}")
    with_images = [path for kind, path in kinds.items() if "image" in held[kind]]
    texts_only = [path for kind, path in kinds.items() if "image" not in held[kind]]
    images_only = [path for kind, path in kinds.items() if "text" not in held[kind]]
    if "image" in wanted and texts_only:
        raise InputError(
            f"{texts_only[0]} holds texts only, and images are to be embedded",
            next_step="leave it out, or choose --modality text",
        )
    if "text" in wanted and images_only:
        raise InputError(
            f"{images_only[0]} holds images and no column that is known to hold texts",
            next_step="name the column with --text-column, or choose --modality image",
        )
    if not wanted and with_images and texts_only:
        raise InputError(
            f"{with_images[0]} holds images and {texts_only[0]} texts only",
            next_step="choose --modality text to embed captions and texts, or run them separately",
        )
    if not wanted:
        return ("image",) if with_images else ("text",)
    return tuple(modality for modality in MODALITIES if modality in wanted)
