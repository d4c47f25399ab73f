"""Retries failures: adds units for those that stand, as one more generation of the manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import InputError, TryLaterError, UsageError, command_line
from embq.core.run import checkpoint
from embq.core.run.commits import Commit
from embq.core.run.control import RunState, load_control
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest, ManifestSummary
from embq.core.run.run_info import RunInfo, load_run
from embq.core.run.standing_failures import Retries, by_unit, covered_by, standing_by_record
from embq.core.storage.paths import Place
from embq.core.units import DAMAGED_REST, UNIT_SPEC_MAX_BYTES, Retry, Unit, key_digest, to_ranges
from embq.producer.additions import FirstNames, PlanRecord, append_generation, planning_lock
from embq.producer.retry_planner import SourceCheck
from embq.sources.access.files import name_of
from embq.sources.access.listings import cached_listings
from embq.sources.damaged import digest_in, keeps_damaged

RANGES_MIN_BYTES = 8_000
"""Room for ordinals where a description is as long as it may be without them; a hint has that much room beyond it."""

Row = tuple[int, str, str]
"""Ordinal, key and code of a sample that failed."""

UNNAMED_CODES = ("duplicate_key",)
"""Failures whose repair gives the sample another key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFilter:
    """Filter of failures.

    Attributes:
        codes: of them; () for all.
        units: ids of the units that they are of; () for all.
    """

    codes: tuple[str, ...] = ()
    units: tuple[str, ...] = ()


@dataclass(slots=True)
class RetryResult:
    """Result of a retry.

    Attributes:
        info: the run as it is now, with the retry units if they were added.
        units: retry units.
        samples, whole_units: retried failures by code: of single samples, and of whole units.
        standing: failures that stand, by code, whichever were chosen.
        under_way: failures that an earlier retry covers, which is not done yet.
        chunks: failures of single chunks of texts, which are left out.
        missing: missing files, whose failures are left out.
    """

    info: RunInfo
    units: int = 0
    samples: Counter[str] = field(default_factory=Counter)
    whole_units: Counter[str] = field(default_factory=Counter)
    standing: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    chunks: int = 0
    missing: tuple[str, ...] = ()

    @property
    def failures(self) -> int:
        """Number of retried failures."""
        return self.samples.total() + self.whole_units.total()


def preview(root: Place, chosen: FailureFilter) -> RetryResult:
    """The result that `retry` would have; raises as it does. Writes nothing."""
    with cached_listings():
        planning = _Planning(Layout(root), chosen)
        planning.result.units = sum(1 for _ in planning.units())
        planning.check()
    return planning.result


def retry(root: Place, chosen: FailureFilter, *, version: str, expected: int | None = None) -> RetryResult:
    """Add retry units for the failures that stand; their rows and failures replace these.

    Failures that an earlier retry covers are left out, so repeating it adds nothing.

    Args:
        version: embq version, for the record.
        expected: number of failures that a user has agreed to; None for any.

    Raises InputError if a source cannot be cut into the planned units any more, or every source is gone;
    UsageError for a unit that the run does not have; TryLaterError for a run that rests; InputError, code
    `count_changed`, if there are not `expected` failures. Then nothing is changed.
    """
    layout = Layout(root)
    load_run(root)
    layout.make()
    with planning_lock(layout), cached_listings():
        planning = _Planning(layout, chosen)
        record = PlanRecord(inputs=(), options=(), version=version)

        def check(_: ManifestSummary) -> None:
            planning.check()
            if expected is not None and planning.result.failures != expected:
                raise InputError(
                    f"{planning.result.failures:,} failures are there to retry, not {expected:,}; nothing was added",
                    next_step="look at them again, and agree to their number",
                    code="count_changed",
                )

        summary = append_generation(layout, planning.info, record, planning.units(), check=check)
        planning.result.units, planning.result.info = summary.units, load_run(root)
    return planning.result


def _refuse_resting(layout: Layout, info: RunInfo) -> None:
    state = load_control(layout).state
    if state != RunState.RUNNING and not checkpoint.current(layout, info.units).closed:
        raise TryLaterError(
            f"run {info.run} is {state}; nothing was added",
            next_step=f"let it go on first: {command_line('resume', layout.root)}",
        )


class _Planning:
    """Makes retry units for the failures that stand."""

    def __init__(self, layout: Layout, chosen: FailureFilter) -> None:
        self.info = load_run(layout.root)
        _refuse_resting(layout, self.info)
        self.result = RetryResult(info=self.info)
        self._root = layout.root
        self._chosen = chosen
        self._manifest = Manifest(layout)
        self._retries = Retries(self._manifest, lambda _: True)
        self._sources = SourceCheck(self.info, self._manifest)
        if missing := set(chosen.units) - {unit_id for unit_id, _ in self._manifest.ids()} if chosen.units else ():
            raise UsageError(
                f"run {self.info.run} has no unit {min(missing)}",
                next_step=f"`{command_line('failures', layout.root, '--json')}` names the units of its examples",
            )

    def units(self) -> Iterator[Unit]:
        """The retry units, in the order of what they retry."""
        number = self.info.units
        for commit, failures in standing_by_record(self._root):
            for u, table in by_unit(self._picked(failures)):
                for unit in self._units_of(commit, u, table, number):
                    yield unit
                    number += 1

    def check(self) -> None:
        """Raise InputError if sources changed so that failed samples have no place in them any more."""
        self.result.missing = tuple(self._sources.missing)
        if self._sources.changed:
            raise InputError(
                f"not mended but changed: {FirstNames(self._sources.changed)}; nothing was added",
                next_step="mend them so that each sample keeps its place, or choose others with --code or --unit",
                code="input_changed",
            )
        if self.result.missing and not self.result.failures:
            raise InputError(
                f"not there any more: {FirstNames(self.result.missing)}; nothing was added",
                next_step="put them back, and give the command again",
                code="source_missing",
            )

    def _picked(self, failures: pa.Table) -> pa.Table:
        for counted in pc.value_counts(failures["code"]).to_pylist():
            self.result.standing[counted["values"]] += counted["counts"]
        if self._chosen.codes:
            failures = failures.filter(pc.is_in(failures["code"], pa.array(self._chosen.codes)))
        if self._chosen.units:
            failures = failures.filter(pc.is_in(failures["unit_id"], pa.array(self._chosen.units)))
        under_way = covered_by(self._retries, failures)
        self.result.under_way += int(under_way.sum())
        return failures.filter(pa.array(~under_way))

    def _units_of(self, commit: Commit, u: int, failures: pa.Table, number: int) -> Iterator[Unit]:
        unit = self._manifest.unit(u)
        again = Retry(
            unit=self._retries.planned(u),
            failed=u,
            record=commit.n,
            attempts=pc.max(failures["attempt"]).as_py(),
            replaces=1,
        )
        if failures["ordinal"].null_count:
            units = self._sources.current_units(u, unit)
            if units:
                self.result.whole_units[failures["code"][0].as_py()] += 1
            for first, planned in enumerate(units):
                # The first takes the place of the failure, the others are units that could not be planned before.
                separate = replace(again, unit=number + first, attempts=0, replaces=0)
                yield replace(planned, retry=separate if first else again)
            return
        samples = self._samples(unit, commit, u)
        failures, rest = _without_rest(unit, commit, u, failures)
        for failure in rest:
            for planned in self._sources.current_units(u, unit):
                self.result.samples[failure["code"]] += 1
                only = f"{failure['ordinal']}+"
                yield replace(planned, retry=replace(again, only=only, keys=digest_in(failure["key"])))
                number += 1
        named, placed = self._apart(unit, failures)
        for rows, by_key in ((named, True), (placed, False)):
            yield from self._narrowed(u, unit, replace(again, samples=samples), rows, by_key=by_key)

    def _samples(self, unit: Unit, commit: Commit, u: int) -> int | None:
        """Samples of the unit that was planned first, if they are known."""
        if keeps_damaged(unit):  # a mended shard has more
            return None
        if unit.retry is not None and unit.retry.only:
            return unit.retry.samples
        if unit.samples is not None or self.info.model.chunking is not None:
            return unit.samples
        return next(recorded.rows + recorded.failures for recorded in commit.units if recorded.u == u)

    def _apart(self, unit: Unit, failures: pa.Table) -> tuple[list[Row], list[Row]]:
        """The samples that keep their key when the file is repaired, and those identified by their place alone."""
        rows = sorted(zip(*(failures[name].to_pylist() for name in ("ordinal", "key", "code")), strict=True))
        if self.info.model.chunking is not None:
            uncut = [(ordinal, key[:-1], code) for ordinal, key, code in rows if key.endswith("#")]
            self.result.chunks += len(rows) - len(uncut)
            rows = uncut
        name = name_of(unit)
        named = [
            row
            for row in rows
            if unit.kind == "tar" or (row[1] != f"{name}:{unit.first + row[0] + 1}" and row[2] not in UNNAMED_CODES)
        ]
        named_rows = set(named)
        return named, [row for row in rows if row not in named_rows]

    def _narrowed(self, u: int, unit: Unit, again: Retry, rows: list[Row], *, by_key: bool) -> Iterator[Unit]:
        """Units for single samples, as many as it takes to describe them; `by_key` if their keys are compared."""
        if not rows:
            return
        if unit.kind == "files":
            ordinals, files_unit = self._sources.files(unit, [ordinal for ordinal, _, _ in rows])
            rows = [row for row in rows if row[0] in set(ordinals)]
            if rows:
                self.result.samples.update(code for _, _, code in rows)
                yield replace(files_unit, retry=replace(again, replaces=len(rows), only=to_ranges(ordinals)))
            return
        for planned in self._sources.current_units(u, unit)[:1]:
            self.result.samples.update(code for _, _, code in rows)
            for group in _cut(planned, rows):
                yield replace(
                    planned,
                    retry=replace(
                        again,
                        replaces=len(group),
                        only=to_ranges(ordinal for ordinal, _, _ in group),
                        keys=key_digest([key for _, key, _ in group]) if by_key else "",
                    ),
                )


def _without_rest(unit: Unit, commit: Commit, u: int, failures: pa.Table) -> tuple[pa.Table, list[dict[str, Any]]]:
    """The failures of single samples, and the one that stands for the rest of a damaged shard.

    Where a retry of such a rest failed as a whole, its failure has the key of the one before, and a code of its own.
    """
    rest = pc.equal(failures["code"], DAMAGED_REST)
    if unit.retry is not None and unit.retry.is_rest:
        (of_unit,) = (recorded for recorded in commit.units if recorded.u == u)
        if (of_unit.rows, of_unit.failures) == (0, 1) and digest_in(failures["key"][0].as_py()) == unit.retry.keys:
            return failures.slice(0, 0), failures.to_pylist()
    return failures.filter(pc.invert(rest)), failures.filter(rest).to_pylist()


def _cut(unit: Unit, rows: list[Row]) -> Iterator[list[Row]]:
    """The samples in groups whose ordinals fit into the unit's description."""
    room = max(RANGES_MIN_BYTES, UNIT_SPEC_MAX_BYTES - 1_000 - len(json.dumps(unit.describe())))
    group: list[Row] = []
    length = 0
    for row in rows:
        length += len(str(row[0])) + 1
        if group and length > room:
            yield group
            group, length = [], len(str(row[0])) + 1
        group.append(row)
    if group:
        yield group
