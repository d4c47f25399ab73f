"""Adds a new plan to a run: finds the units that its manifest lacks, and appends them as one more generation."""

from __future__ import annotations

import fcntl
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, count, groupby
from pathlib import Path

from embq.core.errors import AwayError, InputError
from embq.core.run.generations import PREFIX, Generation, append, leftovers
from embq.core.run.layout import PLANNED, Layout
from embq.core.run.manifest import Manifest, ManifestSummary, SegmentWriter
from embq.core.run.run_info import RunInfo
from embq.core.storage.durable import drop, drop_in, names_in
from embq.core.storage.paths import Place
from embq.core.units import FILE_NAME, Unit
from embq.producer.file_names import end_of
from embq.producer.plan import expand
from embq.producer.selection import SELECTED
from embq.sources.access.files import absolute, base_name, exists, has_magic, join, name_of, with_name
from embq.sources.access.listings import cached_listings
from embq.sources.access.patterns import expand_braces, matcher
from embq.sources.formats.image_folder import cut
from embq.sources.kinds import NAMED, source_for
from embq.sources.reader_options import EXTENSIONS

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Origin of a plan, as a generation records it.

    Attributes:
        inputs: absolute paths, patterns and URLs; () for retries.
        options: reader options and selection.
        version: embq version that planned.
    """

    inputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    version: str


class FirstNames:
    """Some names for a message: the first `SHOWN`, and the number of all."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._first: list[str] = []
        self.count = 0
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Add a name."""
        self.count += 1
        if len(self._first) < SHOWN:
            self._first.append(name)

    def __str__(self) -> str:
        rest = self.count - len(self._first)
        return ", ".join(self._first) + (f" and {rest:,} more" if rest else "")


@dataclass(frozen=True, slots=True)
class Differences:
    """Inputs that differ from the manifest.

    Attributes:
        changed: inputs whose content or cut is another one now, with the difference.
        vanished: inputs that were named again and are missing, each once.
    """

    changed: FirstNames = field(default_factory=FirstNames)
    vanished: FirstNames = field(default_factory=FirstNames)

    def refuse_changed(self, output: Place, existing_run: RunInfo, requested: PlanRecord) -> None:
        """InputError `input_changed` if inputs differ from those that the run `existing_run` was planned for."""
        if not self.changed.count:
            return
        options = dict(requested.options)
        differing = [
            f"{name}: {value or 'none'} there, {options[name] or 'none'} asked for"
            for name, value in existing_run.options
            if name not in SELECTED and options.get(name, value) != value
        ]
        raise InputError(
            f"inputs are not what was planned for {output}: {self.changed}"
            + (f"; options differ: {'; '.join(differing)}" if differing else "")
            + "; nothing was added",
            next_step="put the planned files back or leave the changed ones out, or choose another --output; "
            "rows of the old and the new content are never mixed",
            code="input_changed",
        )

    def warnings(self) -> tuple[str, ...]:
        """One line on inputs that are missing; () if none is."""
        if not self.vanished.count:
            return ()
        return (
            f"not there any more: {self.vanished}; rows that were made of it stay, what is not done of it will fail",
        )


class Additions:
    """Compares a plan with a manifest, in about 100 bytes for each unit, and for each file of a folder of images.

    A unit is identified by its id, a file of a folder by its path and size, so that files that are added to a folder do
    not move the others into other units. A source that was retried is identified as the retry found it: a unit by its
    place in the source, a file of a folder by its size at that time.

    Args:
        limited: whether this plan or an earlier one has a --limit, which cuts the last unit of a plan.
    """

    def __init__(self, manifest: Manifest, *, limited: bool = False) -> None:
        self._manifest = manifest
        self._begun: dict[bytes, tuple[bytes, int | None]] = {}  # beginning -> identity and samples of a unit there
        self._retried: dict[str, str] = {}  # source -> its version when it was retried last
        self._sizes: dict[tuple[str, str], int] = {}  # (folder, path) -> its size when it was retried last
        for _, unit in manifest.retries():
            if unit.kind == "files":
                self._sizes.update({(unit.source, path): size for path, size in unit.items})
            else:
                self._retried[unit.source] = unit.etag
        self._firsts: Counter[str] = Counter()  # folder -> files of it in the manifest
        self._files: dict[str, list[int]] | None = None  # last part of a path -> units; for the names of new files
        self._names: dict[str, dict[str, str]] = {}  # last part -> source -> name of the file in its keys, "" for that
        self._taken: dict[str, set[str]] = {}  # last part -> names of files in keys
        self._new_places: set[bytes] = set()
        self._new_versions: set[bytes] = set()
        self._unmatched: set[bytes] = set()  # in the manifest, and not in the plan so far
        for u, identity in self._identities():
            if identity is None:
                unit = manifest.unit(u)
                self._firsts[unit.source] += len(unit.items)
                self._unmatched.update(_item(unit, path, size) for path, size in self._items(unit))
            else:
                self._unmatched.add(identity)
                if limited and (unit := manifest.unit(u)).retry is None:
                    self._begun[_beginning(unit)] = identity, unit.samples

    def _identities(self) -> Iterator[tuple[int, bytes | None]]:
        """(index, identity) of each unit of the inputs; None for units of a folder, whose files have identities."""
        for u, (unit_id, kind) in enumerate(self._manifest.ids()):
            again = self._manifest.unit(u).retry if self._manifest.is_retry(u) else None
            if again is not None and (again.only or kind == "files"):
                continue
            if kind == "files":
                yield u, None
            elif self._retried and (unit := self._manifest.unit(u)).source in self._retried:
                yield u, _place(unit)
            else:
                yield u, bytes.fromhex(unit_id)

    def _items(self, unit: Unit) -> Iterator[tuple[str, int]]:
        """The files of a folder's unit, with the sizes that identify them."""
        return ((path, self._sizes.get((unit.source, path), size)) for path, size in unit.items)

    def of(self, units: Iterable[Unit], unit_samples: int) -> Iterator[Unit]:
        """The units of a plan that the manifest lacks. New files of a folder are cut into units of their own."""
        for (kind, source), group in groupby(units, key=lambda unit: (unit.kind, unit.source)):
            if kind == "files":
                first = next(group)
                items = self._new_items(source, chain([first], group))  # noqa: B031 - `first` was taken off it
                yield from cut(first, items, unit_samples, first=self._firsts[source])
            else:
                yield from self._new_units(source, self._named_as_before(source, group))

    def _named_as_before(self, source: str, units: Iterator[Unit]) -> Iterator[Unit]:
        """The units of a file with the name that it was planned by, which may be its path below another folder."""
        first = next(units)
        parts = source.split("/") if first.kind in NAMED else []
        names = ["", *("/".join(parts[at:]) for at in range(1, len(parts) - 1))]
        candidates = chain([first], (with_name(first, name) for name in names))
        match = next((unit for unit in candidates if self._is_there(unit)), None)
        if match is None:
            match = self._named_apart(first) if first.kind in NAMED else first
        yield match
        yield from (with_name(unit, dict(match.options).get(FILE_NAME, "")) for unit in units)

    def _is_there(self, unit: Unit) -> bool:
        return self._identity(unit) in self._unmatched or _beginning(unit) in self._begun

    def _named_apart(self, unit: Unit) -> Unit:
        """The unit with the name that its file has in the run; of a new file, with one that no other file has."""
        last = base_name(unit.source)
        names = self._names_of(last)
        if unit.source in names:
            return with_name(unit, names[unit.source])
        taken, name = self._taken[last], name_of(unit)
        for parts in count(name.count("/") + 2):
            if name not in taken:
                break
            name = end_of(unit.source, parts)
        taken.add(name)
        return unit if name == name_of(unit) else with_name(unit, name)

    def _names_of(self, last: str) -> dict[str, str]:
        """Source -> name in its keys, of the files in the manifest whose paths end in `last`."""
        if self._files is None:
            self._files = {}
            for u, source in self._manifest.files(NAMED):
                self._files.setdefault(base_name(source), []).append(u)
        if last not in self._names:
            units = map(self._manifest.unit, self._files.get(_column_text(last), ()))
            self._names[last] = {unit.source: dict(unit.options).get(FILE_NAME, "") for unit in units}
            self._taken[last] = {name or last for name in self._names[last].values()}
        return self._names[last]

    def _identity(self, unit: Unit) -> bytes:
        return _place(unit) if self._retried.get(unit.source) == unit.etag else bytes.fromhex(unit.unit_id)

    def _new_units(self, source: str, units: Iterable[Unit]) -> Iterator[Unit]:
        for unit in units:
            exact = self._identity(unit)
            if exact in self._unmatched:
                self._unmatched.remove(exact)
            elif (rest := self._without_begun(unit)) is not None:
                self._new_places.add(_digest(source))
                self._new_versions.add(_digest(source, unit.etag))
                yield rest

    def _without_begun(self, unit: Unit) -> Unit | None:
        """The part of a unit that is in no unit that --limit has cut; None if nothing is left."""
        while (held := self._begun.get(_beginning(unit))) is not None:
            identity, samples = held
            self._unmatched.discard(identity)
            if samples is None or (unit.samples is not None and unit.samples <= samples):
                return None
            unit = source_for(unit.kind).part(unit, samples)
        return unit

    def _new_items(self, source: str, units: Iterable[Unit]) -> Iterator[tuple[str, int]]:
        for unit in units:
            for path, size in unit.items:
                exact = _item(unit, path, size)
                if exact in self._unmatched:
                    self._unmatched.remove(exact)
                else:
                    self._new_places.add(_digest(source, path))
                    yield path, size

    def differences(self, named_again: Collection[int], vanished: Sequence[str] = ()) -> Differences:
        """Inputs that the manifest and the plan have in different versions. Call it when all units of `of` were taken.

        Inputs that are not in the plan are looked up in the storage; many files of a remote folder by one listing.

        Args:
            named_again: generations whose inputs the plan has as well; only they can have vanished.
            vanished: inputs that planning found missing, which are not looked up again.

        Raises SourceError if the storage does not answer.
        """
        differences = Differences(vanished=FirstNames(vanished))
        if self._unmatched:
            with cached_listings():
                self._look_at_rest(differences, named_again, frozenset(vanished))
        return differences

    def _look_at_rest(self, differences: Differences, named_again: Collection[int], vanished: Collection[str]) -> None:
        ends = [generation.first for generation in self._manifest.generations] + [len(self._manifest)]
        places: set[bytes] = set()
        for u, identity in self._identities():
            named = next(number for number, end in enumerate(ends) if u < end) in named_again
            if identity is None:
                unit = self._manifest.unit(u)
                self._look_at_items(unit, differences, named=named and unit.source not in vanished)
            elif identity in self._unmatched:
                unit = self._manifest.unit(u)
                place = _digest(unit.source)
                if place not in places:
                    places.add(place)
                    self._look_at_source(unit, differences, named=named and unit.source not in vanished)

    def _look_at_source(self, unit: Unit, differences: Differences, *, named: bool) -> None:
        if _digest(unit.source) in self._new_places:
            same = _digest(unit.source, unit.etag) in self._new_versions
            how = "the same file, cut into other units" if same else f"planned as version {unit.etag}, another one now"
            differences.changed.add(f"{unit.source} ({how})")
        elif named and not exists(unit.source):
            differences.vanished.add(unit.source)

    def _look_at_items(self, unit: Unit, differences: Differences, *, named: bool) -> None:
        for path, size in self._items(unit):
            if _item(unit, path, size) not in self._unmatched:
                continue
            if _digest(unit.source, path) in self._new_places:
                differences.changed.add(f"{unit.source}/{path} (planned with {size} bytes, {_NOW})")
            elif named and not exists(join(unit.source, path)):
                differences.vanished.add(f"{unit.source}/{path}")


_EXTENSIONS = {option.name for option in EXTENSIONS}
_NOW = "another size now, or read by other --image-key or --caption-key"


def _item(unit: Unit, path: str, size: int) -> bytes:
    """Identity of a file of a folder: path, size, and the extensions that the user named."""
    return _digest(
        unit.source, path, str(size), *(f"{name}={value}" for name, value in unit.options if name in _EXTENSIONS)
    )


def _beginning(unit: Unit) -> bytes:
    """What the units with one first sample of one version of a source have in common."""
    options = (f"{name}={value}" for name, value in unit.options)
    return _digest(unit.kind, unit.source, unit.etag, str(unit.first), *options)


def _place(unit: Unit) -> bytes:
    """Identity of a unit of a source that was retried: its samples, whatever bytes they take now."""
    options = (f"{name}={value}" for name, value in unit.options)
    return _digest(unit.kind, unit.source, str(unit.first), str(unit.samples), *options)


def _column_text(source: str) -> str:
    """A source as the manifest's column has it."""
    return source.encode("utf-8", "backslashreplace").decode()


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).digest()[:16]


def uncovered(inputs: Sequence[str], recorded: Sequence[str], layout: Layout) -> list[str]:
    """Return the inputs, made absolute, that a run does not have in any spelling and that match none of its patterns.

    Args:
        inputs: as the user gives them.
        recorded: inputs of the run and of its generations.

    Raises InputError for a pattern without match.
    """
    paths = {absolute(text) for text in recorded}
    unmatched = [text for text in inputs if absolute(text) not in paths]
    if not unmatched:
        return []
    paths.update(absolute(path) for text in recorded for path in _expanded(text))
    patterns = [matcher(path) for path in paths if has_magic(path)]
    paths.update(unit.source for unit in Manifest(layout))

    def is_new(path: str) -> bool:
        return path not in paths and not any(fits(path) for fits in patterns)

    return [absolute(text) for text in unmatched if any(is_new(path) for path, _ in expand([text], Counter()))]


def _expanded(text: str) -> Iterable[str]:
    """The patterns and paths that the braces of a recorded input stand for; () if it has none, or is a file's name."""
    try:
        return list(expand_braces(text, "")) if "{" in text else ()
    except InputError:
        return ()


@contextmanager
def planning_lock(layout: Layout) -> Iterator[None]:
    """Holds the lock on planning for a run on this machine, and removes files of plans that were killed.

    Several machines may plan for one object store. There each plan's segments have names of their own, and the
    conditional create of run.json or of a generation's record decides which of them count.
    """
    if not isinstance(layout.root, Path):
        layout.make_own()  # another machine may have made the run
    with layout.open_plan_lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Until run.json stands there is no writer, and control.json is written by plans alone.
        planned = PLANNED if layout.run_json.exists() else (*PLANNED, "control.")
        for leftover in names_in(layout.temporary):
            if leftover.startswith(planned):
                drop_in(layout.temporary, leftover)
        yield


def append_generation(
    layout: Layout,
    existing_run: RunInfo,
    requested: PlanRecord,
    units: Iterable[Unit],
    *,
    check: Callable[[ManifestSummary], None],
) -> ManifestSummary:
    """Add units to a run as one more generation, if there are any. Call it under `planning_lock`.

    Args:
        existing_run: the run as it is now.
        check: called when all units are written and before they count. Where it raises, nothing is added.
    """
    if isinstance(layout.root, Path):  # under the lock, so they are of plans that were killed
        _drop_unnamed(layout, existing_run)
    number = len(existing_run.added) + 1
    # Unique, so that no other plan can write to a segment that a generation names.
    segments = SegmentWriter(layout, f"{PREFIX}{number:04d}-{secrets.token_hex(4)}-")
    try:
        summary = segments.write(units)
        check(summary)
        if summary.units:
            generation = Generation(
                number=number,
                run=existing_run.run,
                first=existing_run.units,
                units=summary.units,
                samples=summary.samples if requested.inputs else 0,
                digest=summary.digest,
                segments=tuple(segments.names),
                inputs=requested.inputs,
                options=requested.options,
                version=requested.version,
                created=utc_now(),
            )
            append(layout.manifest, generation, temporary=layout.temporary)
    except AwayError:
        raise  # the record may still arrive; `embq gc` removes segments that no record names
    except BaseException:
        _drop_unnamed(layout, existing_run, segments.prefix)
        raise
    return summary


def _drop_unnamed(layout: Layout, existing_run: RunInfo, prefix: str = "") -> None:
    """Remove segments that no record names and whose names begin with `prefix`."""
    for leftover in leftovers(layout.manifest, existing_run.segments):
        if leftover.name.startswith(prefix):
            drop(leftover)


def utc_now() -> str:
    """UTC time for the record of a plan; information only."""
    return datetime.now(UTC).isoformat(timespec="seconds")
