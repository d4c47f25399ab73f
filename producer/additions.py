"""More data for a run: which units of a new plan its manifest lacks, and what has become of the others."""

from __future__ import annotations

import fcntl
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path

from core.errors import AwayError
from core.run.generations import PREFIX, Generation, append, leftovers
from core.run.layout import PLANNED, Layout
from core.run.manifest import Manifest, ManifestSummary, SegmentWriter
from core.run.run_info import RunInfo
from core.storage.durable import drop, drop_in, names_in
from core.units import Unit
from sources.access.files import exists, join
from sources.access.listings import listed_once
from sources.formats.image_folder import cut
from sources.options import EXTENSIONS

SHOWN = 3


@dataclass(slots=True)
class Differences:
    """How inputs differ from what the manifest says of them.

    Attributes:
        changed: inputs that say something else now, with how they differ.
        changed_count: number of all of them; `changed` holds the first `SHOWN`.
        vanished: inputs that were named again and are not there any more, each once; the first `SHOWN` of
            `vanished_count`.
    """

    changed: list[str] = field(default_factory=list)
    changed_count: int = 0
    vanished: list[str] = field(default_factory=list)
    vanished_count: int = 0


class Additions:
    """Compares a plan with a manifest, holding about 100 bytes for each unit, and for each file of a folder of images.

    A unit is known by its id, a file of a folder by its path and size. So files that are added to a folder do not move
    those that are there into other units. What a retry has found mended is known by the version that the retry found:
    a unit by its place in its source, a file of a folder by its size then.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._mended: dict[str, str] = {}  # source -> its version when it was retried last
        self._sizes: dict[tuple[str, str], int] = {}  # (folder, path) -> its size when it was retried last
        for _, unit in manifest.retries():
            if unit.kind == "files":
                self._sizes.update({(unit.source, path): size for path, size in unit.items})
            else:
                self._mended[unit.source] = unit.etag
        self._firsts: Counter[str] = Counter()  # folder -> files of it in the manifest
        self._places: set[bytes] = set()  # where something new stands
        self._versions: set[bytes] = set()
        self._left: set[bytes] = set()  # what the plan has not named yet
        for u, known in self._known():
            if known is None:
                unit = manifest.unit(u)
                self._firsts[unit.source] += len(unit.items)
                self._left.update(_item(unit, path, size) for path, size in self._items(unit))
            else:
                self._left.add(known)

    def _known(self) -> Iterator[tuple[int, bytes | None]]:
        """(index, what it is known by) of each unit of the inputs; None for files of a folder, known one by one."""
        for u, (unit_id, kind) in enumerate(self._manifest.ids()):
            again = self._manifest.unit(u).retry if self._manifest.is_retry(u) else None
            if again is not None and (again.only or kind == "files"):
                continue
            if kind == "files":
                yield u, None
            elif self._mended and (unit := self._manifest.unit(u)).source in self._mended:
                yield u, _place(unit)
            else:
                yield u, bytes.fromhex(unit_id)

    def _items(self, unit: Unit) -> Iterator[tuple[str, int]]:
        """The files of a folder's unit, with the sizes by which they are known."""
        return ((path, self._sizes.get((unit.source, path), size)) for path, size in unit.items)

    def of(self, units: Iterable[Unit], unit_samples: int) -> Iterator[Unit]:
        """The units of a plan that the manifest lacks; new files of a folder are cut into units of their own."""
        for (kind, source), group in groupby(units, key=lambda unit: (unit.kind, unit.source)):
            if kind == "files":
                first = next(group)
                items = self._new_items(source, chain([first], group))  # noqa: B031 - `first` was taken off it
                yield from cut(first, items, unit_samples, first=self._firsts[source])
            else:
                yield from self._new_units(source, group)

    def _new_units(self, source: str, units: Iterable[Unit]) -> Iterator[Unit]:
        for unit in units:
            exact = _place(unit) if self._mended.get(source) == unit.etag else bytes.fromhex(unit.unit_id)
            if exact in self._left:
                self._left.remove(exact)
                continue
            self._places.add(_digest(source))
            self._versions.add(_digest(source, unit.etag))
            yield unit

    def _new_items(self, source: str, units: Iterable[Unit]) -> Iterator[tuple[str, int]]:
        for unit in units:
            for path, size in unit.items:
                exact = _item(unit, path, size)
                if exact in self._left:
                    self._left.remove(exact)
                else:
                    self._places.add(_digest(source, path))
                    yield path, size

    def differences(self, named_again: Collection[int], vanished: Sequence[str] = ()) -> Differences:
        """What the plan, whose units were all taken, says of what it does not have as the manifest has it.

        The storage is asked about what the plan did not name; of a remote folder with many such files, by one listing.

        Args:
            named_again: generations whose inputs the plan was made from as well.
            vanished: inputs that the plan found missing; they are not looked at a second time.

        Raises SourceError where the storage does not tell.
        """
        found = Differences()
        for path in vanished:
            _note_vanished(found, path)
        if self._left:
            with listed_once():
                self._look_at_rest(found, named_again, frozenset(vanished))
        return found

    def _look_at_rest(self, found: Differences, named_again: Collection[int], vanished: Collection[str]) -> None:
        ends = [generation.first for generation in self._manifest.generations] + [len(self._manifest)]
        seen: set[bytes] = set()
        for u, known in self._known():
            named = next(number for number, end in enumerate(ends) if u < end) in named_again
            if known is None:
                unit = self._manifest.unit(u)
                self._look_at_items(unit, found, named=named and unit.source not in vanished)
            elif known in self._left:
                unit = self._manifest.unit(u)
                place = _digest(unit.source)
                if place not in seen:
                    seen.add(place)
                    self._look_at_source(unit, found, named=named and unit.source not in vanished)

    def _look_at_source(self, unit: Unit, found: Differences, *, named: bool) -> None:
        if _digest(unit.source) in self._places:
            same = _digest(unit.source, unit.etag) in self._versions
            how = "the same file, cut into other units" if same else f"planned as version {unit.etag}, another one now"
            _note_changed(found, f"{unit.source} ({how})")
        elif named and not exists(unit.source):
            _note_vanished(found, unit.source)

    def _look_at_items(self, unit: Unit, found: Differences, *, named: bool) -> None:
        for path, size in self._items(unit):
            if _item(unit, path, size) not in self._left:
                continue
            if _digest(unit.source, path) in self._places:
                _note_changed(found, f"{unit.source}/{path} (planned with {size} bytes, {_NOW})")
            elif named and not exists(join(unit.source, path)):
                _note_vanished(found, f"{unit.source}/{path}")


_EXTENSIONS = {one.name for one in EXTENSIONS}
_NOW = "another size now, or read by other --image-key or --caption-key"


def _note_changed(found: Differences, what: str) -> None:
    found.changed_count += 1
    if len(found.changed) < SHOWN:
        found.changed.append(what)


def _note_vanished(found: Differences, what: str) -> None:
    found.vanished_count += 1
    if len(found.vanished) < SHOWN:
        found.vanished.append(what)


def _item(unit: Unit, path: str, size: int) -> bytes:
    """A file of a folder, as it is read: by its path, its size, and what the user said of extensions."""
    return _digest(
        unit.source, path, str(size), *(f"{name}={value}" for name, value in unit.options if name in _EXTENSIONS)
    )


def _place(unit: Unit) -> bytes:
    """A unit of a source that was mended: the same samples of it, whatever bytes they take now."""
    options = (f"{name}={value}" for name, value in unit.options)
    return _digest(unit.kind, unit.source, str(unit.first), str(unit.samples), *options)


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).digest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What a plan was made from, as a generation records it.

    Attributes:
        inputs: as the user gave them; () for retries.
        options: reader options and selection.
        version: embq version that planned.
    """

    inputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    version: str


@contextmanager
def alone(layout: Layout) -> Iterator[None]:
    """Nobody else plans, on this machine at least; unfinished files of plans that were killed go.

    Several machines may plan for one object store. There each plan's segments have names of their own, and the
    conditional create of run.json or of a generation's record decides whose are real.
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


def grow(
    layout: Layout,
    there: RunInfo,
    asked: PlanRecord,
    units: Iterable[Unit],
    *,
    check: Callable[[ManifestSummary], None],
) -> ManifestSummary:
    """Add units to a run as one more generation; none where there are none. Whoever calls it holds the lock.

    Args:
        there: the run as it is now.
        check: called when all units are written and before they are real. What it raises is raised, and nothing is
            added.
    """
    if isinstance(layout.root, Path):  # nobody else plans, so they are of plans that were killed
        _drop_unnamed(layout, there)
    number = len(there.added) + 1
    # A name of its own: no other plan can ever write to a segment that a generation names.
    segments = SegmentWriter(layout, f"{PREFIX}{number:04d}-{secrets.token_hex(4)}-")
    try:
        summary = segments.write(units)
        check(summary)
        if summary.units:
            generation = Generation(
                number=number,
                run=there.run,
                first=there.units,
                units=summary.units,
                samples=summary.samples if asked.inputs else 0,
                digest=summary.digest,
                segments=tuple(segments.names),
                inputs=asked.inputs,
                options=asked.options,
                version=asked.version,
                created=now(),
            )
            append(layout.manifest, generation, temporary=layout.temporary)
    except AwayError:
        raise  # the record may still come to be there; what is not named in the end, `embq gc` removes
    except BaseException:
        _drop_unnamed(layout, there, segments.prefix)
        raise
    return summary


def _drop_unnamed(layout: Layout, there: RunInfo, prefix: str = "") -> None:
    """Remove the segments that nothing names, of those whose names begin with `prefix`."""
    for leftover in leftovers(layout.manifest, there.segments):
        if leftover.name.startswith(prefix):
            drop(leftover)


def now() -> str:
    """UTC time for the record of a plan; information only."""
    return datetime.now(UTC).isoformat(timespec="seconds")
