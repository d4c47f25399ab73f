"""More data for a run: which units of a new plan its manifest lacks, and what has become of the others."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

from core.manifest import Manifest
from core.units import Unit
from sources.extensions import named_in
from sources.files import cut
from sources.listings import listed_once
from sources.storage import exists, join

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
    those that are there into other units.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._firsts: Counter[str] = Counter()  # folder -> files of it in the manifest
        self._places: set[bytes] = set()  # where something new stands
        self._versions: set[bytes] = set()
        self._left: set[bytes] = set()  # what the plan has not named yet
        for u, (unit_id, kind) in enumerate(manifest.ids()):
            if kind == "files":
                unit = manifest.unit(u)
                self._firsts[unit.source] += len(unit.items)
                self._left.update(_item(unit, path, size) for path, size in unit.items)
            else:
                self._left.add(bytes.fromhex(unit_id))

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
            exact = bytes.fromhex(unit.unit_id)
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
        for u, (unit_id, kind) in enumerate(self._manifest.ids()):
            named = next(number for number, end in enumerate(ends) if u < end) in named_again
            if kind == "files":
                unit = self._manifest.unit(u)
                self._look_at_items(unit, found, named=named and unit.source not in vanished)
            elif bytes.fromhex(unit_id) in self._left:
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
        for path, size in unit.items:
            if _item(unit, path, size) not in self._left:
                continue
            if _digest(unit.source, path) in self._places:
                _note_changed(found, f"{unit.source}/{path} (planned with {size} bytes, {_NOW})")
            elif named and not exists(join(unit.source, path)):
                _note_vanished(found, f"{unit.source}/{path}")


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
    return _digest(unit.source, path, str(size), *(f"{name}={value}" for name, value in named_in(unit)))


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).digest()[:16]
