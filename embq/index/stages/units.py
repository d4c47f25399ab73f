"""Stages of builds and changes, their units, and the sidecars that commit units."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from embq.core.errors import OutputError
from embq.core.storage.beneath import below
from embq.core.storage.durable import names_in
from embq.core.storage.paths import Place, place
from embq.core.units import content_hash
from embq.core.wire import Count, Seconds, ShortText, Word
from embq.index.index_files.files import File, from_json, read_json, to_json, write_current
from embq.index.stages.build_dir import BuildDir

STAGES = ("sample", "train", "queries", "truth", "add", "merge", "tune")
"""The stages of a build, in order."""

NEEDS: dict[str, tuple[str, ...]] = {
    "sample": (),
    "queries": (),
    "train": ("sample",),
    "truth": ("queries",),
    "add": ("train",),
    "merge": ("train", "add"),
    "tune": ("train", "queries", "truth", "add", "merge"),
}
"""Stage -> the stages whose payloads its units read."""

CHANGES = ("grow", "new_queries", "retune", "compact")
"""The stages of changes to an index; see `embq.index.change.growth` and `embq.index.change.compaction`."""

DEDUP = ("vectors", "dedup", "groups")
"""The stages of a deduplication; see `embq.index.dedup.dedup`."""

STAGE_MODULES = {
    **dict.fromkeys(STAGES, "embq.index.stages.build_stages"),
    "train": "embq.index.stages.training",
    **dict.fromkeys(CHANGES, "embq.index.change.stages"),
    **dict.fromkeys(DEDUP, "embq.index.dedup.stages"),
}
"""Stage -> module of its function, which has the name of the stage."""

NAMED = 10
"""Ids of rows without a direction that are named to the user."""

SIDECAR = "sidecar of an index"

AT_ONCE = 16
"""Sidecars that are read at a time: a store takes some 20 ms for each."""


class IndexUnit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of a build.

    Attributes:
        index: folder or URL of the index, as the conductor names it; every worker must see it under that name.
        build: id of the build.
        stage: one of `STAGES`, of `CHANGES` or of `DEDUP`.
        number: of the unit in its stage, from 0.
        inputs: digest of what the stages before have made; names the file that lists it.
    """

    index: str
    build: str
    stage: str
    number: int
    inputs: str

    def __post_init__(self) -> None:
        """ValueError if the unit names no stage, or a path outside of the folder of builds."""
        names = (self.build, self.inputs)
        if self.stage not in STAGE_MODULES or any("/" in name or name.startswith(".") for name in names):
            raise ValueError("no index unit")

    @property
    def digest(self) -> str:
        """Hash of all that decides what the unit makes; the build id stands for collection, plan and versions."""
        return content_hash([self.build, self.stage, self.number, self.inputs])

    @property
    def build_dir(self) -> BuildDir:
        """Folder of the unit's build."""
        return BuildDir(place(self.index), self.build)

    @property
    def sidecar(self) -> Place:
        """The file that makes the unit done."""
        return self.build_dir.folder / f"{self.stage}-{self.number:06d}-{self.digest[:12]}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Record of a finished unit: its payloads and measurements.

    Attributes:
        digest: of the unit.
        files: role -> payload.
        stats: statistics of the stage, JSON-ready.
        seconds: wall time.
        cpu_seconds: of all threads.
        peak_rss_bytes: most memory of the process while it was at it, the libraries included.
    """

    digest: Word
    files: Mapping[ShortText, File]
    stats: Mapping[str, Any]
    seconds: Seconds
    cpu_seconds: Seconds
    peak_rss_bytes: Count
    versions: Mapping[ShortText, ShortText]
    worker: ShortText


def find(unit: IndexUnit) -> Sidecar | None:
    """The unit's sidecar, if it is done and its payload is there; None otherwise.

    Raises OutputError if a store does not answer: that says nothing about the unit.
    """
    try:
        sidecar = from_json(Sidecar, read_json(unit.sidecar), SIDECAR)
        for file in sidecar.files.values():
            file.check_size(below(unit.build_dir.index, file.path))
    except OutputError as error:
        if error.code != "index_damaged":
            raise
        return None
    return sidecar if sidecar.digest == unit.digest else None


def finished(units: Sequence[IndexUnit]) -> Iterator[tuple[IndexUnit, Sidecar]]:
    """Those of a stage's units that are done, with their sidecars; found by one listing of the build's folder."""
    if not units:
        return
    names = set(names_in(units[0].build_dir.folder))
    committed = [unit for unit in units if unit.sidecar.name in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for unit, sidecar in zip(committed, pool.map(find, committed), strict=True):
            if sidecar is not None:
                yield unit, sidecar


def write_inputs(build_dir: BuildDir, inputs: Mapping[str, Sequence[Sidecar]]) -> str:
    """Write down the sidecars that the units of a stage read; returns the digest by which they find them.

    Of two builds with one id, the later of which follows after the earlier was removed, a worker may still be at a unit
    of the earlier. build.json is part of the digest, so that it counts for that one only.

    Args:
        inputs: stage -> its sidecars in the order of its units.
    """
    sums = {
        stage: [sorted(file.sha256 for file in unit.files.values()) for unit in done] for stage, done in inputs.items()
    }
    digest = content_hash([build_dir.read_spec(), sums])
    listed = {stage: [to_json(sidecar) for sidecar in done] for stage, done in inputs.items()}
    # Not once only: a payload that was lost has another name when it is made again.
    write_current(build_dir.folder / f"inputs-{digest}.json", json.dumps(listed).encode())
    return digest


def read_inputs(build_dir: BuildDir, digest: str) -> dict[str, list[Sidecar]]:
    """The sidecars that a unit's inputs name."""
    listed = read_json(build_dir.folder / f"inputs-{digest}.json")
    return {stage: [from_json(Sidecar, record, SIDECAR) for record in done] for stage, done in listed.items()}
