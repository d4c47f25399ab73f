"""Plans units again from sources that were repaired in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from embq.core.errors import InputError, SourceError
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo
from embq.core.units import FILE_NAME, Unit
from embq.sources.access.files import join, stat_file
from embq.sources.kinds import split
from embq.sources.partitions import OPTION as PARTITION
from embq.sources.reader_options import ReadOptions

BY_FOLDER = (FILE_NAME, PARTITION)
"""Options of a unit that the folders of its file give."""
GONE_CODES = ("source_missing", "source_denied", "not_a_file")


@dataclass(slots=True)
class SourceCheck:
    """Compares planned units with their sources as they are now; each file is looked up once.

    Attributes:
        missing: files that are missing or may not be read, each once.
        changed: sources that cannot be cut into the planned units any more, with the reason.
    """

    info: RunInfo
    manifest: Manifest
    missing: dict[str, None] = field(default_factory=dict)
    changed: dict[str, None] = field(default_factory=dict)
    _versions: dict[str, tuple[int, str] | None] = field(default_factory=dict)
    _planned: dict[str, list[Unit]] = field(default_factory=dict)

    def files(self, unit: Unit, ordinals: Sequence[int]) -> tuple[list[int], Unit]:
        """The ordinals of those files of a folder that exist, and a unit of them with their sizes now.

        Args:
            unit: one that holds them; a retry holds only those that it repeated.
            ordinals: of the files, in the unit that was planned first.
        """
        held = dict(zip(unit.selected or range(len(unit.items)), unit.items, strict=True))
        existing: list[int] = []
        items: list[tuple[str, int]] = []
        for ordinal in ordinals:
            path, _ = held[ordinal]
            if (status := self._stat(join(unit.source, path))) is not None:
                existing.append(ordinal)
                items.append((path, status[0]))
        return existing, replace(unit, items=tuple(items), samples=len(items), retry=None)

    def current_units(self, u: int, unit: Unit) -> list[Unit]:
        """The unit as its source is now; several units if the source could not be cut when it was planned.

        Empty if it is missing, or cannot be cut in this way any more.
        """
        if unit.kind == "files":
            return self._folder(unit)
        if (status := self._stat(unit.source)) is None:
            return []
        size, version = status
        planned = replace(unit, retry=None)
        if unit.kind == "tar":
            return [replace(planned, stop=size, etag=version)]
        if version == unit.etag and unit.samples is not None:
            return [planned]
        units = self._plan(u, unit)
        if unit.samples is None:
            return units
        same = [part for part in units if (part.first, part.samples) == (unit.first, unit.samples)]
        if not same:
            last = unit.first + unit.samples
            self.changed[f"{unit.source} (samples {unit.first + 1:,} to {last:,} are no unit of it any more)"] = None
        return same

    def _folder(self, unit: Unit) -> list[Unit]:
        """All files of a folder's unit; missing ones fail again, unless all are missing."""
        statuses = [self._stat(join(unit.source, path), note=False) for path, _ in unit.items]
        if not any(statuses):
            self.missing[unit.source] = None
            return []
        sizes = [status[0] if status else size for status, (_, size) in zip(statuses, unit.items, strict=True)]
        items = tuple((path, size) for (path, _), size in zip(unit.items, sizes, strict=True))
        return [replace(unit, items=items, retry=None)]

    def _stat(self, path: str, *, note: bool = True) -> tuple[int, str] | None:
        if path not in self._versions:
            try:
                status = stat_file(path)
                self._versions[path] = (status.size, status.version)
            except SourceError as error:
                if error.code not in GONE_CODES:
                    raise
                self._versions[path] = None
        if note and self._versions[path] is None:
            self.missing[path] = None
        return self._versions[path]

    def _plan(self, u: int, unit: Unit) -> list[Unit]:
        """All units of a file, cut as they were when it was planned."""
        if unit.source not in self._planned:
            options = ReadOptions.from_record(self._options(u))
            if self.info.model.chunking is not None:
                options = options.for_chunks()
            try:
                planned = split(unit.kind, unit.source, options)
                self._planned[unit.source] = [_as_found(part, unit) for part in planned]
            except InputError as error:
                if error.code in GONE_CODES:
                    self.missing[unit.source] = None
                else:
                    self.changed[f"{unit.source} ({error.message})"] = None
                self._planned[unit.source] = []
        return self._planned[unit.source]

    def _options(self, u: int) -> tuple[tuple[str, str], ...]:
        """The options that unit `u`, or the one that it retries, was planned with."""
        while (retry := self.manifest.unit(u).retry) is not None:
            u = retry.failed
        later = [generation for generation in self.info.added if generation.first <= u]
        return later[-1].options if later else self.info.options


def _as_found(planned: Unit, unit: Unit) -> Unit:
    """A unit with what the folders of the file gave to `unit`; the file may have been sent to another place since."""
    own = (pair for pair in planned.options if pair[0] not in BY_FOLDER)
    return replace(planned, options=tuple(sorted((*own, *(pair for pair in unit.options if pair[0] in BY_FOLDER)))))
