"""Checks which failures each retry replaces, and returns units with their sources as of the last retry."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from embq.app.verify.findings import Findings
from embq.app.verify.source_lines import SLICED, SourceLines
from embq.core.errors import OutputError
from embq.core.run.commits import CommittedUnit
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.standing_failures import Retries, failed_keys, record_failures
from embq.core.units import Retry, Unit


class Retried:
    """The retries of a run; memory grows with the retried inputs only."""

    def __init__(self, layout: Layout, manifest: Manifest, findings: Findings) -> None:
        self._layout = layout
        self._findings = findings
        self._retries = Retries(manifest, lambda _: True)
        self._versions: dict[str, tuple[str, int]] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._claimed: dict[int, set[int]] = {}
        self._lines = SourceLines()
        self._record = 0
        self._failures = pa.table({})
        for _, unit in manifest.retries():
            if unit.kind == "files":
                self._sizes.update({(unit.source, path): size for path, size in unit.items})
            else:
                self._versions[unit.source] = unit.etag, unit.stop

    def now(self, unit: Unit) -> Unit:
        """The unit with its source as of the last retry; unchanged if the source cannot be read."""
        if unit.kind == "files":
            items = tuple((path, self._sizes.get((unit.source, path), size)) for path, size in unit.items)
            return replace(unit, items=items)
        version, size = self._versions.get(unit.source, (unit.etag, 0))
        if version == unit.etag:
            return unit
        mended = replace(unit, etag=version, stop=size if unit.kind == "tar" else unit.stop)
        return self._lines.placed(mended) if unit.kind in SLICED and unit.samples is not None else mended

    def again(self, u: int) -> list[Retry]:
        """The later retries of the samples of unit `u`."""
        return [retry for _, retry in self._retries.of(u)]

    def check(self, where: str, recorded: CommittedUnit, retry: Retry | None) -> None:
        """Check that a retry replaces existing failures, each once, and that other units replace none."""
        planned = (0, 0) if retry is None else (retry.replaces, retry.lifts)
        if (recorded.supersedes, recorded.lifts) != planned:
            self._findings.add(
                "supersedes",
                where,
                f"it takes the place of {recorded.supersedes} failures and {recorded.lifts} units, planned were "
                f"{planned[0]} and {planned[1]}",
            )
        if retry is None or not retry.replaces:
            return
        ordinals = retry.ordinals or [-1]
        if retry.only and retry.replaces != len(ordinals):
            self._findings.add("supersedes", where, f"{len(ordinals)} samples replace {retry.replaces} failures")
        claimed = self._claimed.setdefault(retry.failed, set())
        if twice := claimed.intersection(ordinals):
            self._findings.add(
                "supersedes", where, f"{len(twice)} failures of unit {retry.failed} were retried before it"
            )
        claimed.update(ordinals)
        try:
            if self._record != retry.record:
                self._failures, self._record = record_failures(self._layout.root, retry.record), retry.record
            failed_keys(self._failures, retry)
        except OutputError as error:
            self._findings.add("supersedes", where, error.message)
