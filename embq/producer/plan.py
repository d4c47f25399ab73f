"""Plans a run: paths, patterns and folders in, units and metadata columns out."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice

from embq.core.errors import EmbqError, InputError, UsageError
from embq.core.models import MODALITIES
from embq.core.rows.metadata import find_columns
from embq.core.rows.spec import Column
from embq.core.run.layout import ENTRIES, MARKS, RUN_ENTRIES
from embq.core.service.log import Events
from embq.core.storage.paths import is_url
from embq.core.units import Unit
from embq.producer.input_scan import InputScan
from embq.producer.selection import Selection
from embq.sources.access.files import absolute, exists, has_magic, join, match
from embq.sources.access.listings import cached_listings
from embq.sources.access.patterns import expand_braces
from embq.sources.access.urls import check_source
from embq.sources.extensions import ALL, of_system
from embq.sources.formats.image_folder import OF_SYSTEM, OUTPUT, walk_with
from embq.sources.kinds import SUPPORTED
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import first_metadata, may_have_metadata

log = Events("producer")

LOOK_UNITS = 8
"""Units whose first metadata are read."""

LOOK_AMONG = 64
"""First units among which these are looked for, so that planning streams where few units can have metadata."""

LOOK_SAMPLES = 100
"""Samples of each of these units whose metadata are read."""

LOOK_S = 10.0
"""Longest time for all of these reads; slower inputs get the columns that were found until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Units and modalities of a run.

    Attributes:
        units: in the order of the inputs, an iterator. Folders are listed and lines counted while it is taken, so it
            raises InputError if an input turns out to be unusable, or nothing is left of the inputs.
        modalities: embedded of each row: ("image",), ("text",) or ("image", "text"); () if all inputs have vanished.
        listing: what is taken and what is left out, one line; "" for one file.
        warnings: one line each, about inputs that are left out.
        vanished: inputs that were planned before and are missing now.
    """

    units: Iterator[Unit]
    modalities: tuple[str, ...]
    warnings: tuple[str, ...]
    vanished: tuple[str, ...] = ()
    listing: str = ""


def plan(
    inputs: Sequence[str],
    options: ReadOptions,
    modalities: Sequence[str] = (),
    *,
    as_held: bool = False,
    selection: Selection | None = None,
    was_planned: Callable[[str], bool] | None = None,
) -> Plan:
    """The plan for `inputs`: paths, brace expressions, patterns and folders on this machine.

    Args:
        inputs: as the user gave them. A path that exists is taken as it is, whatever characters it has.
        options: how inputs split into units and samples.
        modalities: to embed; () takes images if all inputs can have them, and texts if none can.
        as_held: whether to embed only those of `modalities` that all inputs have, so no captions of folders of images
            alone.
        selection: the part of the inputs to take; None takes all.
        was_planned: whether an input was planned before; then it may be missing.

    Raises InputError for missing inputs, a pattern without match, a command or URL, inputs that are all empty, and
    inputs that do not go together; UsageError for options out of range. A shard is looked at once, and not opened.
    """
    if options.unit_samples < 1:
        raise UsageError("a unit needs at least one sample", next_step="for example --unit-size 1000")
    if not inputs:
        raise UsageError("no input was named", next_step=f"name {SUPPORTED}")
    chosen = selection or Selection()
    scan = InputScan(options, chosen, modalities)
    with cached_listings():
        for path, folder in expand(inputs, scan.listing.left_out):
            scan.add(path, folder)
    vanished = scan.check(was_planned or (lambda _: False))
    units = scan.units()
    if as_held:
        modalities = [modality for modality in modalities if all(modality in held for held in _held(scan, options))]
    return Plan(
        units=units if chosen.all else _some_left(chosen.narrow(units, options.unit_samples), chosen),
        modalities=_choose_modalities(scan.kinds, scan.held, modalities) if scan.kinds else (),
        warnings=scan.warnings(),
        vanished=tuple(vanished),
        listing=str(scan.listing),
    )


def expand(inputs: Sequence[str], skipped: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield (absolute path or URL, folder before the first special character) of each input, in order.

    Links stay as they are, for the user to recognise. The folder is "" for an input without special characters.

    Args:
        skipped: counts matches that are left out because they are in an output folder.

    Raises InputError for a pattern without match.
    """
    for text in inputs:
        if not text:
            raise InputError("an input is empty", next_step="check the variable that holds it; . is the current folder")
        check_source(text)
        special = "{" in text or has_magic(text)
        if not special or (not is_url(text) and os.path.lexists(text)):
            yield absolute(text), ""
            continue
        folder = absolute(re.split(r"[{*?\[]", text, maxsplit=1)[0].rpartition("/")[0] or ".")
        for pattern in expand_braces(text, "'shards/{00000..00099}.tar'") if "{" in text else [text]:
            yield from ((path, folder) for path in _matches(pattern, skipped))


def _matches(pattern: str, skipped: Counter[str]) -> Iterator[str]:
    if not has_magic(pattern):
        yield absolute(pattern)
        return
    paths, holds_run = match(pattern), cache(lambda folder: all(exists(join(folder, name)) for name in MARKS))
    outside = [path for path in paths if not _is_output(path, pattern, holds_run)]
    named = len(re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0])
    matches = [path for path in outside if not of_system(path[named:])]
    for reason, count in ((OUTPUT, len(paths) - len(outside)), (OF_SYSTEM, len(outside) - len(matches))):
        if count:
            skipped[reason] += count
    if not matches:
        raise InputError(
            f"{pattern!r}: no file matches"
            + (" outside of output folders of embq and folders of the system" if paths else ""),
            next_step="check the pattern: list the folder with the storage's own tool",
        )
    yield from map(absolute, matches)


def _is_output(path: str, pattern: str, holds_run: Callable[[str], bool]) -> bool:
    """True if a match stands in the output folder of a run, unless the pattern names the entry of the folder."""
    parts = path.split("/")
    return any(
        (part in ENTRIES or part in RUN_ENTRIES or part.endswith("_emb"))
        and f"/{part}/" not in pattern
        and holds_run("/".join(parts[:depth]))
        for depth, part in enumerate(parts[:-1])
        if depth
    )


def _some_left(units: Iterator[Unit], selection: Selection) -> Iterator[Unit]:
    unit = None
    for unit in units:
        yield unit
    if unit is None:
        options = ", ".join(f"--{name} {value}" for name, value in selection.recorded())
        raise InputError(
            f"nothing is left of the inputs after {options}",
            code="empty_input",
            next_step="take more of them; `--dry-run` shows what is left",
        )


def _held(scan: InputScan, options: ReadOptions) -> Iterator[tuple[str, ...]]:
    """The modalities of each kind of input; of folders of images by whether there is a caption."""
    for kind, path in scan.kinds.items():
        captions = options.caption_keys or ALL.texts
        if kind == "files" and next(walk_with(captions, path, Counter()), None) is None:
            yield ("image",)
        else:
            yield scan.held[kind]


def _choose_modalities(
    kinds: Mapping[str, str], held: Mapping[str, Sequence[str]], modalities: Sequence[str]
) -> tuple[str, ...]:
    """`modalities` if every kind can have it, else what the kinds have in common.

    Args:
        kinds: kind -> an example of it.
        held: kind -> what that example can have.
    """
    if unknown := set(modalities) - set(MODALITIES):
        raise UsageError(f"unknown modality {', '.join(sorted(unknown))}", next_step=f"known: {', '.join(MODALITIES)}")
    with_images = [path for kind, path in kinds.items() if "image" in held[kind]]
    texts_only = [path for kind, path in kinds.items() if "image" not in held[kind]]
    images_only = [path for kind, path in kinds.items() if "text" not in held[kind]]
    if "image" in modalities and texts_only:
        raise InputError(
            f"{texts_only[0]} holds texts only, and images are to be embedded",
            next_step="leave it out, or choose --modality text",
        )
    if "text" in modalities and images_only:
        raise InputError(
            f"{images_only[0]} holds images and no column that is known to hold texts",
            next_step="name the column with --text-column, or choose --modality image",
        )
    if not modalities and with_images and texts_only:
        raise InputError(
            f"{with_images[0]} holds images and {texts_only[0]} texts only",
            next_step="choose --modality text to embed captions and texts, or run them separately",
        )
    if not modalities:
        return ("image",) if with_images else ("text",)
    return tuple(modality for modality in MODALITIES if modality in modalities)


def first_columns(units: Iterator[Unit]) -> tuple[tuple[Column, ...], Iterator[Unit]]:
    """The metadata columns of a run of `units`, and all the units again.

    The same inputs give the same columns. A unit that cannot be read adds none, and fails when workers read it. Raises
    what `units` raises.
    """
    first = list(islice(units, LOOK_AMONG))
    deadline = time.monotonic() + LOOK_S
    texts: list[str] = []
    looked = 0
    for unit in first:
        if looked == LOOK_UNITS:
            break
        if (left_s := deadline - time.monotonic()) <= 0:
            log.warning("metadata_slow", source=unit.source, after_s=LOOK_S)
            break
        if not may_have_metadata(unit):
            continue
        looked += 1
        try:
            texts += first_metadata(unit, LOOK_SAMPLES, wait_s=left_s)
        except EmbqError as error:
            log.warning("metadata_unseen", source=unit.source, code=error.code, why=error.message)
    return find_columns(texts), chain(first, units)
