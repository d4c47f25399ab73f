"""Building an index: the stages in order, each done by whoever the runner has, and then the publication."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from core.errors import InputError
from core.units import content_hash
from indexer.build.build_dir import BuildDir
from indexer.build.runners import Runner
from indexer.build.spec import BuildSpec, draft
from indexer.build.units import NEEDS, STAGES, IndexUnit, Sidecar, find, write_inputs
from indexer.collection.opening import Collection
from indexer.faiss_module import faiss
from indexer.index_files.files import WORK, alone
from indexer.index_files.publication import publish, sweep
from indexer.index_files.version import Version, current_name, read_version
from indexer.plan.plan import IndexPlan


class StageProgress(Protocol):
    """Who is told how far a stage is."""

    def stage(self, name: str, done: int, units: int) -> None:
        """At the beginning of a stage, and whenever a unit of it is done."""
        ...


class BuildProgress(StageProgress, Protocol):
    """Who is told how a build goes."""

    def planned(self, spec: BuildSpec, *, resumed: bool) -> None:
        """Before any work: what will be built; `resumed` where an earlier attempt has left something."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What a build is to be.

    Attributes:
        index: folder of the index.
        options: all that the user said, JSON-ready; the same words find an interrupted build again.
        make_plan: the plan for the collection; called only where there is no such build.
        queries: how query sets are made, JSON-ready.
        hold_out: ids of rows that are queries.
        drop_invalid: leave out rows that have no direction.
        memory_bytes: that all processes of a machine may take together.
        rebuild: build it even where the current version is just that.
    """

    index: Path
    options: Mapping[str, Any]
    make_plan: Callable[[], IndexPlan]
    queries: Mapping[str, Any]
    hold_out: Callable[[], Sequence[int]]
    drop_invalid: bool
    memory_bytes: int
    rebuild: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """A published version, and what its stages told; `fresh` is False where it was there already."""

    version: Version
    stages: Mapping[str, Sequence[Sidecar]]
    fresh: bool


Small = Callable[[BuildSpec, Version, Mapping[str, Sequence[Sidecar]], Path], None]
"""Writes the report of a version into its folder."""


def build(collection: Collection, asked: BuildRequest, runner: Runner, course: BuildProgress, small: Small) -> Built:
    """Build an index of a collection, or go on with a build that was interrupted, and make it the current version.

    Raises InputError where vectors are not fit for it, TryLaterError where another process is at it, OutputError where
    the folder cannot be written, and what the runner raises. What was done stays for the next attempt.
    """
    with alone(asked.index):
        id_ = content_hash([collection.digest, dict(asked.options), str(faiss().__version__)])[:16]
        build_dir = BuildDir(asked.index, id_)
        if not asked.rebuild and (there := _current(asked.index)) is not None and there.build == id_:
            if build_dir.folder.exists():  # killed between the publication and the end
                _clear(asked.index)
            return Built(there, {}, fresh=False)
        build_dir.make()
        resumed = build_dir.spec.exists()
        if not resumed:
            build_dir.write_once(build_dir.spec, _spec(collection, asked).describe())
        spec = BuildSpec.from_description(build_dir.read_spec())
        course.planned(spec, resumed=resumed)
        stages: dict[str, list[Sidecar]] = {}
        names: dict[str, list[str]] = {}
        for stage in STAGES:
            before = {needed: names[needed] for needed in NEEDS[stage]}
            units = units_of(spec, build_dir, stage, write_inputs(build_dir, before))
            stages[stage] = run_stage(stage, units, runner, course)
            names[stage] = [unit.sidecar.name for unit in units]
            if stage == "sample":
                _check_vectors(spec, stages[stage])
        version = draft(spec, asked.index, id_, stages)
        published = publish(version, lambda folder: small(spec, version, stages, folder))
        _clear(asked.index)
        return Built(published, stages, fresh=True)


def units_of(spec: BuildSpec, build_dir: BuildDir, stage: str, inputs: str) -> list[IndexUnit]:
    """The units of a stage, in order."""
    return [
        IndexUnit(index=str(build_dir.index), build=build_dir.build, stage=stage, number=number, inputs=inputs)
        for number in range(spec.units(stage))
    ]


def _clear(index: Path) -> None:
    """What was only for the build goes."""
    shutil.rmtree(index / WORK, ignore_errors=True)
    sweep(index)


def _spec(collection: Collection, asked: BuildRequest) -> BuildSpec:
    return BuildSpec(
        collection=collection,
        plan=asked.make_plan(),
        asked=asked.options,
        queries=asked.queries,
        held_out=tuple(int(id_) for id_ in asked.hold_out()),
        drop_invalid=asked.drop_invalid,
        memory_bytes=asked.memory_bytes,
    )


def _current(index: Path) -> Version | None:
    name = current_name(index)
    return read_version(index, name) if name else None


def run_stage(stage: str, units: Sequence[IndexUnit], runner: Runner, course: StageProgress) -> list[Sidecar]:
    """Have a stage done; gives its sidecars in the order of its units."""
    found = {unit.number: sidecar for unit in units if (sidecar := find(unit)) is not None}
    course.stage(stage, len(found), len(units))

    def done(unit: IndexUnit, sidecar: Sidecar) -> None:
        found[unit.number] = sidecar
        course.stage(stage, len(found), len(units))

    if missing := [unit for unit in units if unit.number not in found]:
        runner.run(missing, done)
    return [found[unit.number] for unit in units]


def _check_vectors(spec: BuildSpec, sampled: Sequence[Sidecar]) -> None:
    """Refuse vectors without a direction where the user has not said to leave them out."""
    bad = sum(one.stats["bad"] for one in sampled)
    rows = sum(one.stats["rows"] for one in sampled)
    if bad == rows:
        raise InputError(
            f"none of the {rows:,} vectors of {spec.collection.root} has a direction: all are zero or not finite",
            next_step="embed them again; `embq verify` checks those of a run",
            code="bad_vectors",
        )
    if bad and not spec.drop_invalid:
        ids = [id_ for one in sampled for id_ in one.stats["bad_ids"]][:10]
        raise InputError(
            f"{bad:,} of {rows:,} vectors of {spec.collection.root} are zero or not finite; their ids begin with "
            f"{', '.join(map(str, ids))}",
            next_step="add --drop-invalid to leave them out of the index; they keep their ids, and are counted",
            code="bad_vectors",
        )
