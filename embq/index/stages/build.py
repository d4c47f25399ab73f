"""Build of an index: runs the stages in order and publishes the version."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from embq.core.errors import InputError
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place
from embq.core.units import content_hash
from embq.index.collection.opening import Collection
from embq.index.faiss_module import faiss
from embq.index.index_files.files import WORK, index_lock, note
from embq.index.index_files.publication import names_below, publish, remove_folder, settle, sweep
from embq.index.index_files.version import Version, find_current
from embq.index.stages.build_dir import BuildDir
from embq.index.stages.runners import Runner
from embq.index.stages.spec import BuildSpec, draft
from embq.index.stages.units import NAMED, NEEDS, STAGES, IndexUnit, Sidecar, finished, write_inputs


class StageProgress(Protocol):
    """Receives the progress of stages."""

    def stage(self, name: str, done: int, units: int) -> None:
        """Called at the beginning of a stage and after each of its units."""
        ...


class BuildProgress(StageProgress, Protocol):
    """Receives the progress of a build."""

    def planned(self, spec: BuildSpec, *, resumed: bool) -> None:
        """Called before any work; `resumed` if an interrupted build goes on."""
        ...


WriteReport = Callable[[Place, BuildSpec, Version, Mapping[str, Sequence[Sidecar]], Path], None]
"""Writes the report of a version of an index into a folder; gets the sidecars of each stage."""


@dataclass(frozen=True, slots=True)
class Built:
    """A published version of the index at `index`; `fresh` is False if it existed already."""

    index: Place
    version: Version
    fresh: bool

    @property
    def path(self) -> Place:
        """Folder of the version, with its report."""
        return self.index / self.version.name


def build_id(collection: Collection, options: Mapping[str, Any]) -> str:
    """Id of the build of a collection with these options, JSON-ready."""
    return content_hash([collection.digest, dict(options), str(faiss().__version__)])[:16]


def build(
    index: Place,
    collection: Collection,
    options: Mapping[str, Any],
    make_spec: Callable[[], BuildSpec],
    runner: Runner,
    progress: BuildProgress,
    write_report: WriteReport,
    *,
    overwrite: bool = False,
) -> Built:
    """Build an index of a collection, or resume an interrupted build, and make it the current version.

    Args:
        index: a folder, or a prefix in a bucket.
        options: options of the user, JSON-ready; equal options find an interrupted build again.
        make_spec: called only if there is no such build.
        overwrite: build even where the current version has equal options and collection.

    Raises InputError if vectors cannot be indexed, TryLaterError if another process works on the index,
    OutputError if the folder cannot be written, and what the runner raises. Finished units stay for the next
    attempt.
    """
    bucket = index if isinstance(index, ObjectPath) else None
    with index_lock(index) as check_lock:
        id_ = build_id(collection, options)
        build_dir = BuildDir(index, id_)
        if bucket is not None:
            settle(bucket)
        if not overwrite and (current := find_current(index)) is not None and current.build == id_:
            if build_dir.folder.is_dir():  # killed after the publication
                _clear(build_dir)
            return Built(index, current, fresh=False)
        spec, resumed = build_dir.begin(BuildSpec, make_spec)
        progress.planned(spec, resumed=resumed)
        stages = StageSequence(build_dir, runner, progress, {stage: (0, spec.units(stage)) for stage in STAGES})
        for stage in STAGES:
            stages.run(stage, spec.units(stage), NEEDS[stage])
            if stage == "sample":
                _check_vectors(spec, stages.sidecars[stage])
        version = draft(spec, build_dir.local, id_, stages.sidecars)
        tuned, drawn = stages.sidecars["tune"][0], stages.sidecars["queries"][0]
        for file in (version.trained, tuned.files["tuning"], drawn.files["queries"]):
            build_dir.file(file)  # the report is made of these here
        check_lock()
        report = partial(write_report, index, spec, version, stages.sidecars)
        published = publish(version, report, to=bucket)
        check_lock()
        _clear(build_dir)
        return Built(index, published, fresh=True)


@dataclass(slots=True)
class StageSequence:
    """Runs the stages of one build or change, each on what earlier stages have made.

    Attributes:
        counts: stage -> (done, all) units; those that are known before.
        sidecars: of each stage that was run, in the order of its units.
    """

    build_dir: BuildDir
    runner: Runner
    progress: StageProgress
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    sidecars: dict[str, list[Sidecar]] = field(default_factory=dict)

    def run(self, stage: str, count: int, needs: Sequence[str] = (), *, known_as: str = "") -> list[Sidecar]:
        """Have the units of a stage done, unless they are; returns their sidecars.

        Args:
            count: units of the stage.
            needs: earlier stages whose payloads they read.
            known_as: name under which later stages need it, if that is another one.
        """
        inputs = write_inputs(self.build_dir, {needed: self.sidecars[needed] for needed in needs})
        units = [
            IndexUnit(
                index=str(self.build_dir.index), build=self.build_dir.build, stage=stage, number=number, inputs=inputs
            )
            for number in range(count)
        ]
        sidecars = {unit.number: sidecar for unit, sidecar in finished(units)}
        if units:
            self._report_progress(stage, len(sidecars), count)

        def done(unit: IndexUnit, sidecar: Sidecar) -> None:
            sidecars[unit.number] = sidecar
            self._report_progress(stage, len(sidecars), count)

        if missing := [unit for unit in units if unit.number not in sidecars]:
            self.runner.run(missing, done)
        name = known_as or stage
        self.sidecars[name] = [sidecars[unit.number] for unit in units]
        return self.sidecars[name]

    def _report_progress(self, stage: str, done: int, units: int) -> None:
        self.progress.stage(stage, done, units)
        self.counts[stage] = done, units
        note(self.build_dir.index, stages=self.counts)


def _clear(build_dir: BuildDir) -> None:
    """Remove the files of the build that no version needs."""
    index = build_dir.index
    if isinstance(index, ObjectPath):
        for name in names_below(index, WORK):
            remove_folder(index / WORK / name)
    else:
        shutil.rmtree(index / WORK, ignore_errors=True)
    sweep(index)
    build_dir.forget()


def _check_vectors(spec: BuildSpec, sampled: Sequence[Sidecar]) -> None:
    """Raise InputError for vectors without a direction, unless --drop-invalid leaves them out."""
    bad = sum(sidecar.stats["bad"] for sidecar in sampled)
    rows = sum(sidecar.stats["rows"] for sidecar in sampled)
    if bad == rows and (spec.drop_invalid or math.isinf(spec.plan.largest)):
        raise InputError(
            f"none of the {rows:,} vectors of {spec.collection.root} has a direction: all are zero or not finite",
            next_step="embed them again; `embq verify` checks those of a run",
            code="bad_vectors",
        )
    refuse_faults(spec, sampled, bad, f"{rows:,}")


def refuse_faults(spec: BuildSpec, units: Sequence[Sidecar], bad: int, among: str) -> None:
    """Raise InputError if vectors are zero, not finite or beyond float16, unless --drop-invalid leaves them out.

    Args:
        units: sidecars of the stage that looked at the vectors.
        bad: number of such vectors.
        among: what they are among, for the message: "1,000 new".
    """
    if bad and not spec.drop_invalid:
        ids = [id_ for sidecar in units for id_ in sidecar.stats["bad_ids"]][:NAMED]
        beyond = other = ""
        if math.isfinite(spec.plan.largest):
            beyond = f"beyond the range of float16 ({spec.plan.largest:,.0f}), "
            codec = "--index-key with SQbf16 or Flat" if spec.plan.codec == "SQfp16" else ""
            rows = "--refine none" if spec.plan.refine == "fp16" else ""
            other = f"build it with {' and '.join(filter(None, (codec, rows)))} for numbers beyond that range; or "
        raise InputError(
            f"{bad:,} of {among} vectors of {spec.collection.root} are not finite, {beyond}or zero and without a cosine"
            f"; their ids begin with {', '.join(map(str, ids))}",
            next_step=f"{other}add --drop-invalid, in Python drop_invalid=True, to leave them out of the index; they "
            "keep their ids, and are counted",
            code="bad_vectors",
        )
