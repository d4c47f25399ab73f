"""Checks the manifest against run.json, and that its units cover their sources without gaps."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from embq.app.verify.findings import Findings
from embq.app.verify.source_lines import SLICED, SourceLines
from embq.core import wire
from embq.core.errors import EmbqError, OutputError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo
from embq.core.units import Unit
from embq.sources.formats.image_folder import walk_with
from embq.sources.formats.text_files import open_text
from embq.sources.interface import unwatched


def check_manifest(layout: Layout, info: RunInfo, findings: Findings) -> Manifest | None:
    """The manifest, after one pass over it; None if it cannot be read.

    Held are eight bytes per unit, and the names of sources that were retried.
    """
    try:
        manifest = Manifest(layout)
        if len(manifest) != info.units:
            findings.add("manifest", "manifest", f"it has {len(manifest)} units, run.json says {info.units}")
        generations = {end: (name, expected) for end, name, expected in _generations(info)}
        digest = hashlib.sha256()
        ids = np.empty(len(manifest), dtype=np.uint64)
        mended = {unit.source for _, unit in manifest.retries() if unit.kind != "files"}
        cover = Coverage(findings, mended, is_complete=not _selected(info))
        for u, unit in enumerate(manifest):
            if u in generations and u:
                _check_digest(digest.hexdigest(), *generations[u], findings)
                digest = hashlib.sha256()
                cover.next_generation()
            stored = manifest.unit_id(u)
            if unit.unit_id != stored:
                findings.add("manifest", f"unit {u}", f"its id is {stored}, its content says {unit.unit_id}")
            digest.update(stored.encode())
            ids[u] = int(unit.unit_id[:16], 16)
            cover.check_unit(u, unit)
        cover.end()
    except (OutputError, OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        findings.add("manifest", "manifest", f"it cannot be read: {error}")
        return None
    _check_digest(digest.hexdigest(), *generations[info.units], findings)
    if len(np.unique(ids)) != len(ids):
        findings.add("manifest", "manifest", "two of its units are the same")
    return manifest


def check_digests(layout: Layout, info: RunInfo, findings: Findings) -> Manifest | None:
    """Compare the unit ids of the manifest with run.json; None if it cannot be read."""
    try:
        manifest = Manifest(layout)
        if len(manifest) != info.units:
            findings.add("manifest", "manifest", f"it has {len(manifest)} units, run.json says {info.units}")
        ids = manifest.ids()
        first = 0
        for end, name, expected in _generations(info):
            digest = hashlib.sha256()
            for unit_id, _ in islice(ids, end - first):
                digest.update(unit_id.encode())
            _check_digest(digest.hexdigest(), name, expected, findings)
            first = end
    except (OutputError, OSError, pa.ArrowException) as error:
        findings.add("manifest", "manifest", f"it cannot be read: {error}")
        return None
    return manifest


def _generations(info: RunInfo) -> Iterator[tuple[int, str, str]]:
    """(units up to its end, name, digest) of the first plan and of each generation that was added."""
    yield info.ends[0], "run.json", info.manifest_digest
    for end, generation in zip(info.ends[1:], info.added, strict=True):
        yield end, f"generation {generation.number}", generation.digest


def _check_digest(digest: str, name: str, expected: str, findings: Findings) -> None:
    if digest[:32] != expected:
        findings.add("manifest", "manifest", f"its units are not those that {name} has the digest of")


def _selected(info: RunInfo) -> bool:
    """True if only a part of the inputs was selected, so that there are gaps between units."""
    options = [info.options, *(generation.options for generation in info.added)]
    return any(name in ("exclude", "include", "limit", "sample") for pairs in options for name, _ in pairs)


class Coverage:
    """Reports gaps between the units of each source, which are consecutive in the manifest.

    Args:
        mended: sources that were retried; only these can have more units in a later generation.
        is_complete: every input was selected as a whole, so that there are no gaps.
    """

    def __init__(self, findings: Findings, mended: Set[str], *, is_complete: bool) -> None:
        self._findings = findings
        self._is_complete = is_complete
        self._ends = dict.fromkeys(mended, 0)  # source -> samples of its units so far
        self._lines = SourceLines()
        self._last: Unit | None = None
        self._at = (0, 0)  # next byte, next ordinal
        self._folders: Counter[str] = Counter()

    def check_unit(self, u: int, unit: Unit) -> None:
        """Check the next unit. Of retries, only those of units that could not be planned before count."""
        if unit.retry is not None:
            if not unit.retry.only:
                self._reach(unit)
            return
        last = self._last
        if last is None or (last.kind, last.source) != (unit.kind, unit.source):
            self._end_of_source()
            self._at = self._beginning(unit)
        start, first = self._at
        if unit.kind == "files":
            self._folders[unit.source] += len(unit.items)
        elif _by_bytes(unit) and unit.start != start and (self._is_complete or unit.start < start):
            self._findings.add("coverage", f"unit {u}", f"it starts at byte {unit.start} of {unit.source}, not {start}")
        if unit.first != first and (self._is_complete or unit.first < first):
            self._findings.add("coverage", f"unit {u}", f"its first sample is number {unit.first}, not {first}")
        self._at = (unit.stop, first + (unit.samples or 0))
        self._last = unit
        self._reach(unit)

    def _reach(self, unit: Unit) -> None:
        if unit.source in self._ends:
            self._ends[unit.source] = max(self._ends[unit.source], unit.first + (unit.samples or 0))

    def _beginning(self, unit: Unit) -> tuple[int, int]:
        """The byte and the ordinal at which the units of a generation must start in the source of `unit`."""
        first = self._ends.get(unit.source, 0)
        if not first:
            return unit.start if unit.kind == "csv" else 0, self._folders[unit.source]  # its header is before
        if unit.kind in SLICED and _by_bytes(unit):
            return self._lines.placed(replace(unit, first=first)).start, first
        return unit.start, first

    def next_generation(self) -> None:
        """Start the units of the next generation."""
        self._end_of_source()
        self._last = None

    def end(self) -> None:
        """Check the end of the last source, and count the images of folders."""
        self._end_of_source()
        if not self._is_complete:
            return
        for folder, planned in self._folders.items():
            if Path(folder).is_dir() and (present := sum(1 for _ in walk_with((), folder, Counter()))) != planned:
                self._findings.note(
                    f"{folder} holds {present:,} images now, {planned:,} are planned: it has changed since"
                )

    def _end_of_source(self) -> None:
        last = self._last
        if last is None or not _by_bytes(last) or not self._is_complete:
            return
        size = wire.decimal(last.etag.rpartition("-")[2])
        if size is not None and last.stop != size and not (last.kind == "csv" and _ends_blank(last)):
            self._findings.add(
                "coverage", last.source, f"its units end at byte {last.stop}, when planned it had {size} bytes"
            )


def _ends_blank(unit: Unit) -> bool:
    """True if a table has blank lines alone behind a unit, or cannot be read, which reading it says."""
    try:
        with open_text(unit, unwatched) as text:
            text.seek(unit.stop)
            return not text.read(1 << 20).strip()
    except EmbqError:
        return True


def _by_bytes(unit: Unit) -> bool:
    """True if the units of this source are consecutive byte ranges."""
    if unit.kind in SLICED:  # one that could not be planned has no slice
        return unit.samples is not None and "compression" not in dict(unit.options)
    return unit.kind == "tar"
