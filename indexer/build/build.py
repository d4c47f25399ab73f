"""Build of an index: runs the stages in order and publishes the version."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from core.errors import InputError
from core.units import content_hash
from indexer.build.build_dir import BuildDir
from indexer.build.runners import Runner
from indexer.build.spec import BuildSpec, draft
from indexer.build.units import NAMED, NEEDS, STAGES, IndexUnit, Sidecar, find, write_inputs
from indexer.collection.opening import Collection
from indexer.faiss_module import faiss
from indexer.index_files.files import WORK, alone, from_json, to_json
from indexer.index_files.publication import publish, sweep
from indexer.index_files.version import Version, find_current


class StageProgress(Protocol):
    """Receives the progress of stages."""

    def stage(self, name: str, done: int, units: int) -> None:
        """Called at the beginning of a stage and after each of its units."""
        ...


class BuildProgress(StageProgress, Protocol):
    """Receives the progress of a build."""

    def planned(self, spec: BuildSpec, *, resumed: bool) -> None:
        """Called before any work; `resumed` where an interrupted build goes on."""
        ...


WriteReport = Callable[[BuildSpec, Version, Mapping[str, Sequence[Sidecar]], Path], None]
"""Writes the report of a version into a folder; gets the sidecars of each stage."""


@dataclass(frozen=True, slots=True)
class Built:
    """A published version; `fresh` is False where it existed already."""

    version: Version
    fresh: bool


def build(
    index: Path,
    collection: Collection,
    options: Mapping[str, Any],
    make_spec: Callable[[], BuildSpec],
    runner: Runner,
    progress: BuildProgress,
    write_report: WriteReport,
    *,
    rebuild: bool = False,
) -> Built:
    """Build an index of a collection, or resume an interrupted build, and make it the current version.

    Args:
        options: options of the user, JSON-ready; equal options find an interrupted build again.
        make_spec: called only where there is no such build.
        rebuild: build even where the current version has equal options and collection.

    Raises InputError where vectors cannot be indexed, TryLaterError where another process works on the index,
    OutputError where the folder cannot be written, and what the runner raises. Finished units stay for the next
    attempt.
    """
    with alone(index):
        id_ = content_hash([collection.digest, dict(options), str(faiss().__version__)])[:16]
        build_dir = BuildDir(index, id_)
        if not rebuild and (current := find_current(index)) is not None and current.build == id_:
            if build_dir.folder.exists():  # killed after the publication
                _clear(index)
            return Built(current, fresh=False)
        described, resumed = build_dir.begin(lambda: to_json(make_spec()))
        spec = from_json(BuildSpec, described, str(build_dir.spec))
        progress.planned(spec, resumed=resumed)
        stages = StageSequence(build_dir, runner, progress)
        for stage in STAGES:
            stages.run(stage, spec.units(stage), NEEDS[stage])
            if stage == "sample":
                _check_vectors(spec, stages.sidecars[stage])
        version = draft(spec, index, id_, stages.sidecars)
        published = publish(version, lambda folder: write_report(spec, version, stages.sidecars, folder))
        _clear(index)
        return Built(published, fresh=True)


@dataclass(slots=True)
class StageSequence:
    """Runs the stages of one build or change, each on what earlier stages have made.

    Attributes:
        sidecars: of each stage that was run, in the order of its units.
    """

    build_dir: BuildDir
    runner: Runner
    progress: StageProgress
    sidecars: dict[str, list[Sidecar]] = field(default_factory=dict)
    _names: dict[str, list[str]] = field(default_factory=dict)

    def run(self, stage: str, count: int, needs: Sequence[str] = (), *, known_as: str = "") -> list[Sidecar]:
        """Have the units of a stage done, unless they are; gives their sidecars.

        Args:
            count: units of the stage.
            needs: earlier stages whose payloads they read.
            known_as: name under which later stages need it, where that is another one.
        """
        inputs = write_inputs(self.build_dir, {needed: self._names[needed] for needed in needs})
        units = [
            IndexUnit(
                index=str(self.build_dir.index), build=self.build_dir.build, stage=stage, number=number, inputs=inputs
            )
            for number in range(count)
        ]
        found = {unit.number: sidecar for unit in units if (sidecar := find(unit)) is not None}
        if units:
            self.progress.stage(stage, len(found), count)

        def done(unit: IndexUnit, sidecar: Sidecar) -> None:
            found[unit.number] = sidecar
            self.progress.stage(stage, len(found), count)

        if missing := [unit for unit in units if unit.number not in found]:
            self.runner.run(missing, done)
        name = known_as or stage
        self._names[name] = [unit.sidecar.name for unit in units]
        self.sidecars[name] = [found[unit.number] for unit in units]
        return self.sidecars[name]


def _clear(index: Path) -> None:
    """Remove the files of the build that no version needs."""
    shutil.rmtree(index / WORK, ignore_errors=True)
    sweep(index)


def _check_vectors(spec: BuildSpec, sampled: Sequence[Sidecar]) -> None:
    """Raise InputError for vectors without a direction, unless --drop-invalid leaves them out."""
    bad = sum(one.stats["bad"] for one in sampled)
    rows = sum(one.stats["rows"] for one in sampled)
    if bad == rows:
        raise InputError(
            f"none of the {rows:,} vectors of {spec.collection.root} has a direction: all are zero or not finite",
            next_step="embed them again; `embq verify` checks those of a run",
            code="bad_vectors",
        )
    refuse_faults(spec, sampled, bad, f"{rows:,}")


def refuse_faults(spec: BuildSpec, units: Sequence[Sidecar], bad: int, among: str) -> None:
    """Raise InputError where vectors are zero or not finite, unless --drop-invalid leaves them out.

    Args:
        units: sidecars of the stage that looked at the vectors.
        bad: number of such vectors.
        among: what they are among, for the message: "1,000 new".
    """
    if bad and not spec.drop_invalid:
        ids = [id_ for one in units for id_ in one.stats["bad_ids"]][:NAMED]
        raise InputError(
            f"{bad:,} of {among} vectors of {spec.collection.root} are zero or not finite; their ids begin with "
            f"{', '.join(map(str, ids))}",
            next_step="add --drop-invalid to leave them out of the index; they keep their ids, and are counted",
            code="bad_vectors",
        )
