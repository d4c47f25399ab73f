"""Scans the inputs of a plan: kind and modalities of each, and the ones that are missing, empty or unreadable."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from embq.core.errors import InputError, SourceError
from embq.core.service.log import Events
from embq.core.storage.paths import is_url, mistyped_url
from embq.core.units import Unit, canonical_json
from embq.producer.file_names import distinct_names
from embq.producer.selection import Selection
from embq.sources.access.files import NOT_STREAMED, base_name, stat_file
from embq.sources.access.urls import SCHEMES
from embq.sources.formats.delimited import DelimitedSource
from embq.sources.interface import Fields
from embq.sources.kinds import NAMED, Listing, carrying, detect, source_for, split
from embq.sources.partitions import without_partition
from embq.sources.reader_options import ROWS, ReadOptions
from embq.sources.unusable import COLUMN_CODES, UNUSABLE_CODES

log = Events("producer")

UNREADABLE_CODES = ("source_denied", "source_unreadable", "not_a_file")
"""Codes of a file that is planned unseen, as one unit that will fail; all other inputs are planned as usual."""

_DIGITS = re.compile(r"\d+")

_BARE = ("jsonl", "lines")
"""Kinds of which a file of zero bytes is empty; of all others it is damaged."""

_NAMES = re.compile(r"[\w.-]+([,;|])[\w.-]+(?:\1[\w.-]+)*")
"""Names of columns with a delimiter between them."""

_NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]*)?")

_OPTION_CODES = (*COLUMN_CODES, "missing_member")
"""Codes that one option may cause for all inputs of a kind."""


MAX_SHAPES = 32
"""Files of one kind whose columns are compared: the first of each shape of name, such as `part-00000.parquet`."""


class InputScan:
    """Scans each path once, and reports on all of them when the last one has been added.

    Paths are kept compressed, at about 100 bytes each: there may be hundreds of thousands.

    Attributes:
        kinds: kind -> the first path of it that can be read.
        held: kind -> the modalities of that path's samples.
        listing: what was taken of folders, and what was left out.
    """

    def __init__(self, options: ReadOptions, selection: Selection, modalities: Sequence[str] = ()) -> None:
        self.kinds: dict[str, str] = {}
        self.held: dict[str, tuple[str, ...]] = {}
        self.listing = Listing()
        self._unclear: dict[str, SourceError] = {}  # kind -> the error of the first path of it
        self._options, self._required = options, options.required_for(modalities)
        self._selection = selection
        self._pieces = _Pieces()
        self._paths = 0
        self._above, self._has_several = "", False  # the folder of the last input, and whether others had another one
        self._digests: set[bytes] = set()
        self._missing: list[str] = []
        self._doubtful: tuple[str, ...] = ()
        self._repeated: list[str] = []
        self._empty: list[str] = []
        self._refused: InputError | None = None  # of the first input without a sample
        self._other_columns: list[str] = []
        self._shapes: dict[str, dict[str, str]] = {}  # kind -> name without its digits -> first path of that name

    def add(self, path: str, folder: str = "") -> None:
        """Scan one path: a file, or the inputs in a folder.

        Args:
            folder: the part of a pattern that named it; the path below that is the name of a file in its keys, as is
                the path below a folder that is named itself.
        """
        self._paths += 1
        above = f"{(folder or path).rstrip('/')}/"
        self._has_several = self._has_several or self._above not in ("", above)
        self._above = above
        try:
            for kind, input_path in detect(path, self._options.kind, self._options.image_keys, self.listing):
                below = input_path.removeprefix(above) if input_path.startswith(above) else ""
                if below and kind in ROWS:
                    shapes = self._shapes.setdefault(kind, {})
                    if len(shapes) < MAX_SHAPES and self._selection.takes(input_path):
                        shapes.setdefault(_DIGITS.sub("0", base_name(input_path)), input_path)
                self._add_input(kind, input_path, below if "/" in below else "")
        except SourceError as error:
            if error.code != "source_missing":
                raise
            self._missing.append(path)

    def _add_input(self, kind: str, path: str, name: str) -> None:
        if kind != "files" and not self._selection.takes(path):
            self.listing.left_out["--include and --exclude"] += 1
            return
        digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:16]
        if digest in self._digests:
            self._repeated.append(path)
            return
        self._digests.add(digest)
        self.listing.taken.update([kind] if kind != "files" else ())
        has_pieces = False
        try:
            for piece in self._pieces_of(kind, path, name):
                self._pieces.add(piece)
                has_pieces = True
        except SourceError as error:
            if kind == "files" or error.code not in UNREADABLE_CODES:
                raise
            self._pieces.add([kind, path, name])  # splitting it will fail its unit
            has_pieces = True
        if has_pieces:
            self._inspect(kind, path)
        else:
            self._empty.append(path)

    def _pieces_of(self, kind: str, path: str, name: str) -> Iterator[Any]:
        """An input as it is kept until it is planned: its units, or what `split` takes; nothing if it is empty."""
        if kind == "tar" or (kind == "files" and is_url(path)):
            # Split now: a shard needs nothing but the status that finds it, and a remote folder was just listed.
            for unit in split(kind, path, self._options):
                yield unit.describe()
        elif kind == "files" or stat_file(path).size or kind not in _BARE:
            yield [kind, path, name]

    def _inspect(self, kind: str, path: str) -> None:
        """Find the modalities of a kind from the first input of it that can be read."""
        if kind in self.kinds:
            return
        try:
            self.held[kind] = source_for(kind).holds(path, without_partition(self._required, path))
        except SourceError as error:
            if error.code not in (*UNUSABLE_CODES, *UNREADABLE_CODES, "missing_member"):
                raise
            self._unclear.setdefault(kind, error)
        else:
            self.kinds[kind] = path
            if kind == "csv":
                self._tell_header(path)

    def _tell_header(self, path: str) -> None:
        names = DelimitedSource().header(path, self._required)
        shown = [repr(name if len(name) <= 60 else f"{name[:57]}...") for name in names[:20]]
        if shown:
            unlisted = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
            self.listing.header = f"header of {base_name(path)}: {', '.join(shown)}{unlisted}"
        if len(names) == 1 and (several := _NAMES.fullmatch(names[0])):
            why = f"its header has one column, {shown[0]}; --delimiter '{several[1]}' splits it"
            self._doubtful = (f"{path}: {why}",)
        elif len(names) == 1 and (" " in names[0].strip() or _NUMBER.fullmatch(names[0].strip())):
            why = f"its first line, {shown[0]}, is taken for a header; --no-header makes it a row"
            self._doubtful = (f"{path}: {why}",)

    def units(self) -> Iterator[Unit]:
        """The units of all inputs, in order.

        Raises InputError if no input has a unit that can be read.
        """
        held: list[Unit] = []
        any_readable = False
        has_names = self._has_several and not self.listing.taken.keys().isdisjoint(NAMED)
        longer = distinct_names(self._named_files) if has_names else {}
        for piece in self._pieces:
            for unit, readable in self._units_of(piece, longer):
                held.append(unit)
                any_readable = any_readable or readable
                if any_readable:
                    yield from held
                    held.clear()
        if not any_readable and self._refused is not None:
            raise self._refused

    def _named_files(self) -> Iterator[tuple[str, str]]:
        """(path, name in its keys) of each file whose name is in its keys."""
        for piece in self._pieces:
            if isinstance(piece, list) and piece[0] in NAMED:
                yield piece[1], piece[2] or base_name(piece[1])

    def _units_of(self, piece: Any, longer: Mapping[str, str]) -> Iterator[tuple[Unit, bool]]:
        """The units of one input, and of each whether its file could be planned; `longer` are names in keys by path."""
        if isinstance(piece, dict):
            yield Unit.from_description(piece), True
            return
        kind, path, name = piece
        name = longer.get(path, name)
        units = split(kind, path, self._options, name)
        try:
            first = next(units, None)
        except InputError as error:
            if kind == "files" or error.code not in (*UNREADABLE_CODES, "empty_input"):
                raise
            self._refused = self._refused or error
            empty = error.code == "empty_input"
            log.warning("input_empty" if empty else "table_unusable", path=path, code=error.code, why=error.message)
            if not empty:
                unit = Unit(kind=kind, source=path, etag=_version(path), options=self._options.columns)
                yield carrying(unit, self._options, name), False
            return
        if first is not None:
            yield first, True
        for unit in units:
            yield unit, True

    def check(self, was_planned: Callable[[str], bool]) -> list[str]:
        """The missing inputs that were planned before.

        Raises InputError if an unknown input is missing, or nothing is left to plan.
        """
        missing = [path for path in self._missing if not was_planned(path)]
        if missing:
            raise InputError(
                f"{_listed(missing)} not found ({len(missing):,} of {self._paths:,} inputs)",
                code="source_missing",
                next_step=_way_to(missing),
            )
        if not self._pieces.count and not self._missing:
            if excluded := self.listing.left_out["--include and --exclude"]:
                raise InputError(
                    f"--include and --exclude leave none of {excluded:,} inputs",
                    code="empty_input",
                    next_step="a pattern is matched against the whole path, or against its end behind a slash",
                )
            raise InputError(
                f"{_listed(self._empty)} empty: nothing is left to embed",
                code="empty_input",
                next_step="check how the files were made",
            )
        for kind, error in self._unclear.items():
            if kind not in self.kinds and (not self.kinds or error.code in _OPTION_CODES):
                raise error
        self._options.refuse_useless({*self.kinds, *self._unclear})
        for kind in self.kinds:
            self._compare_columns(kind)
        return self._missing

    def _compare_columns(self, kind: str) -> None:
        """Note files of folders and patterns that have other columns than the first one.

        Raises InputError if the text of one of them would be a guess, and that of another is of another column.
        """
        if len(paths := list(self._shapes.get(kind, {}).values())) < 2:
            return
        compared: list[tuple[str, Fields]] = []
        for path in paths:
            with suppress(SourceError):  # its units fail by it
                if (fields := source_for(kind).fields(path, without_partition(self._options, path))) is not None:
                    compared.append((path, fields))
        compared.sort(key=lambda pair: pair[1].is_guess)
        for path, fields in compared[1:]:
            first_path, first = compared[0]
            if fields.is_guess and fields.text != first.text:
                raise InputError(
                    f"{path}: its texts would be those of {fields.text!r}, its only column of strings; "
                    f"{first_path} has them in {first.text!r}",
                    code="ambiguous_column",
                    next_step=f"leave it out with --exclude {shlex.quote(base_name(path))}, or name the column of all "
                    "files with --text-column",
                )
        unlike = [(path, fields) for path, fields in compared[1:] if fields.names != compared[0][1].names]
        if unlike:
            path, fields = unlike[0]
            verb = f"and {len(unlike) - 1:,} more have" if len(unlike) > 1 else "has"
            self._other_columns.append(
                f"{path} {verb} other columns than {compared[0][0]}: {_named(fields)}, not {_named(compared[0][1])}"
            )

    def warnings(self) -> tuple[str, ...]:
        """One line each on inputs that are left out."""
        lines = [*self._doubtful]
        if self._repeated:
            lines.append(f"{_listed(self._repeated)} named more than once, planned once")
        if self._empty:
            lines.append(f"{_listed(self._empty)} empty, left out")
        return (*lines, *self._other_columns, *self.listing.warnings)


def _named(fields: Fields) -> str:
    """The first columns, for a message."""
    names = sorted(fields.names)
    return f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"


def _version(path: str) -> str:
    """Version of a file that cannot be read; "unread", which no file has, where the storage does not tell."""
    try:
        return stat_file(path).version
    except SourceError:
        return "unread"


class _Pieces:
    """A compressed list of JSON values: names and versions of shards resemble each other, and shrink to a tenth."""

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


def _way_to(missing: Sequence[str]) -> str:
    """The next step where paths are missing."""
    typed = [path.removeprefix(f"{os.getcwd()}/") for path in missing]
    for path, text in zip(missing, typed, strict=True):
        if url := mistyped_url(text, SCHEMES):
            return f"a URL has two slashes: {url}"
        if text == "-":
            return f"{NOT_STREAMED}, and name that"
        if text.startswith("~/"):
            return f"write $HOME{text[1:]}: the shell leaves ~ as it is in quotes and behind ="
        if os.path.islink(path):
            return f"{path} is a link to {os.readlink(path)}: put back what it leads to"
    return "check the names, and that the disk is mounted on this machine"


def _listed(paths: Sequence[str]) -> str:
    """Up to three of `paths`, and how many more there are."""
    rest = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + rest + (" is" if len(paths) == 1 else " are")
