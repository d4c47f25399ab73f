"""Index units: steps of a build that any process may do, any number of times, and that count once.

A unit's payload is written under a temporary name, made durable and renamed; then its sidecar is created, which names
the payload. The sidecar is the commit: the first one stands, and whoever comes second drops its own payload.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.durable import drop, fsync_folder, publish
from core.errors import OutputError
from core.units import content_hash
from indexer.workshop import FILES, WORK, Workshop, read_json
from indexer.writing import disk_error

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

CHANGES = ("grow", "ask", "retune", "compact")
"""The stages of changes to an index that is there; see `indexer.growth` and `indexer.compaction`."""

HASH_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexUnit:
    """One step of a build.

    Attributes:
        index: folder of the index, as the conductor names it; every worker must see it under that name.
        build: id of the build.
        stage: one of `STAGES`, or of `CHANGES`.
        number: of the unit in its stage, from 0.
        inputs: digest of what the stages before have made; names the file that lists it.
    """

    index: str
    build: str
    stage: str
    number: int
    inputs: str

    def describe(self) -> dict[str, Any]:
        """The unit as JSON-ready values; `from_description` is its inverse."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> IndexUnit:
        """The unit that `describe` gave; ValueError or TypeError on any other shape."""
        if set(described) != set(cls.__slots__) or described["stage"] not in (*STAGES, *CHANGES):
            raise ValueError("no index unit")
        unit = cls(
            index=str(described["index"]),
            build=str(described["build"]),
            stage=str(described["stage"]),
            number=int(described["number"]),
            inputs=str(described["inputs"]),
        )
        if any("/" in part or part.startswith(".") for part in (unit.build, unit.inputs)):
            raise ValueError("no index unit")
        return unit

    @property
    def digest(self) -> str:
        """Hash of all that decides what the unit makes; the build id stands for collection, plan and versions."""
        return content_hash([self.build, self.stage, self.number, self.inputs])

    @property
    def workshop(self) -> Workshop:
        """Where the unit's build is."""
        return Workshop(Path(self.index), self.build)

    @property
    def sidecar(self) -> Path:
        """The file that makes the unit done."""
        return self.workshop.folder / f"{self.stage}-{self.number:06d}-{self.digest[:12]}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A committed payload.

    Attributes:
        path: relative to the index's folder.
    """

    path: str
    bytes: int
    sha256: str

    def describe(self) -> dict[str, Any]:
        """The file as JSON-ready values; `from_description` is its inverse."""
        return {"path": self.path, "bytes": self.bytes, "sha256": self.sha256}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> File:
        """The file that `describe` gave."""
        return cls(path=str(described["path"]), bytes=int(described["bytes"]), sha256=str(described["sha256"]))

    def check(self, index: Path) -> Path:
        """Where it is; OutputError where it is missing or has another size."""
        path = index / self.path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise OutputError(
                f"{path} belongs to the index and is not there",
                next_step="restore it, or build the index again with `embq index --rebuild`",
                code="index_damaged",
            ) from error
        if size != self.bytes:
            raise OutputError(
                f"{path} has {size} bytes, its record says {self.bytes}",
                next_step="restore it, or build the index again with `embq index --rebuild`",
                code="index_damaged",
            )
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What a unit has made.

    Attributes:
        digest: of the unit.
        files: role -> payload.
        stats: what the stage tells, JSON-ready.
        seconds: wall time.
        cpu_seconds: of all threads.
        peak_rss_bytes: most memory of the process while it was at it, the libraries included.
    """

    digest: str
    files: Mapping[str, File]
    stats: Mapping[str, Any]
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    versions: Mapping[str, str]
    worker: str

    def describe(self) -> dict[str, Any]:
        """The sidecar as JSON-ready values; `from_description` is its inverse."""
        return {
            "digest": self.digest,
            "files": {role: file.describe() for role, file in self.files.items()},
            "stats": dict(self.stats),
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "peak_rss_bytes": self.peak_rss_bytes,
            "versions": dict(self.versions),
            "worker": self.worker,
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> Sidecar:
        """The sidecar that `describe` gave."""
        return cls(
            digest=described["digest"],
            files={role: File.from_description(file) for role, file in described["files"].items()},
            stats=described["stats"],
            seconds=described["seconds"],
            cpu_seconds=described["cpu_seconds"],
            peak_rss_bytes=described["peak_rss_bytes"],
            versions=described["versions"],
            worker=described["worker"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a stage function gives.

    Attributes:
        kept: role -> finished temporary file of the index itself; its suffix is kept.
        work: the same for what only later stages need.
    """

    kept: Mapping[str, Path] = field(default_factory=dict)
    work: Mapping[str, Path] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A unit at work: what its stage function may use.

    Attributes:
        spec: what build.json says.
        before: stage -> sidecars of its units, in order.
        threads: that it may use.
        memory_bytes: that the process may take.
    """

    unit: IndexUnit
    spec: Mapping[str, Any]
    before: Mapping[str, Sequence[Sidecar]]
    threads: int
    memory_bytes: int

    @property
    def index(self) -> Path:
        """Folder of the index."""
        return Path(self.unit.index)

    def temporary(self, suffix: str) -> Path:
        """A path for an unfinished file."""
        return self.unit.workshop.temporary(f"{self.unit.stage}-{self.unit.number:06d}.{suffix}")

    def file(self, stage: str, number: int, role: str) -> Path:
        """A payload of an earlier stage; OutputError where it is gone."""
        return self.before[stage][number].files[role].check(self.index)


StageFunction = Callable[[Task], Made]


def find(unit: IndexUnit) -> Sidecar | None:
    """The unit's sidecar, where it is done and its payload is there; None otherwise."""
    if not unit.sidecar.exists():
        return None
    with suppress(OutputError, KeyError, TypeError):
        sidecar = Sidecar.from_description(read_json(unit.sidecar))
        for file in sidecar.files.values():
            file.check(Path(unit.index))
        return sidecar if sidecar.digest == unit.digest else None
    return None


def perform(unit: IndexUnit, stage: StageFunction, *, threads: int, memory_bytes: int, worker: str) -> Sidecar:
    """Do a unit, unless it is done; gives its sidecar, which may be that of another attempt.

    Raises the EmbqError that says why it cannot be done.
    """
    if (done := find(unit)) is not None:
        return done
    workshop = unit.workshop
    task = Task(
        unit=unit,
        spec=workshop.read_spec(),
        before=read_inputs(workshop, unit.inputs),
        threads=threads,
        memory_bytes=memory_bytes,
    )
    _forget_peak()
    began, cpu = time.monotonic(), time.process_time()
    try:
        made = stage(task)
        sidecar = Sidecar(
            digest=unit.digest,
            files={
                **{role: _keep(unit, path, FILES) for role, path in made.kept.items()},
                **{role: _keep(unit, path, f"{WORK}/{unit.build}") for role, path in made.work.items()},
            },
            stats=made.stats,
            seconds=round(time.monotonic() - began, 3),
            cpu_seconds=round(time.process_time() - cpu, 3),
            peak_rss_bytes=_peak(),
            versions=versions(),
            worker=worker,
        )
        if unit.sidecar.exists() and find(unit) is None:
            drop(unit.sidecar)  # its payload is gone or damaged: it commits nothing any more
        if workshop.write_once(unit.sidecar, sidecar.describe()):
            return sidecar
    except OSError as error:
        raise disk_error(error, workshop.folder) from error
    # Another attempt was first: its payload stands, ours is litter.
    for file in sidecar.files.values():
        drop(Path(unit.index) / file.path)
    theirs = find(unit)
    if theirs is None:
        raise OutputError(f"{unit.sidecar} names files that are not there", code="index_damaged")
    return theirs


def write_inputs(workshop: Workshop, before: Mapping[str, Sequence[str]]) -> str:
    """Write down which sidecars the units of a stage read; gives the digest by which they find the list.

    Args:
        before: stage -> names of its sidecars in the order of its units.
    """
    sums = {
        stage: [
            sorted(file["sha256"] for file in read_json(workshop.folder / name)["files"].values()) for name in names
        ]
        for stage, names in before.items()
    }
    digest = content_hash(sums)
    workshop.write_once(
        workshop.folder / f"inputs-{digest}.json", {stage: list(names) for stage, names in before.items()}
    )
    return digest


def read_inputs(workshop: Workshop, digest: str) -> dict[str, list[Sidecar]]:
    """The sidecars that a unit's inputs name."""
    listed = read_json(workshop.folder / f"inputs-{digest}.json")
    return {
        stage: [Sidecar.from_description(read_json(workshop.folder / name)) for name in names]
        for stage, names in listed.items()
    }


def versions() -> dict[str, str]:
    """What numbers may depend on."""
    import numpy as np

    from indexer.faiss_module import faiss

    return {
        "faiss": str(faiss().__version__),
        "numpy": str(np.__version__),
        "python": platform.python_version(),
        "host": socket.gethostname(),
    }


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _keep(unit: IndexUnit, temporary: Path, folder: str) -> File:
    suffix = temporary.name.split(".", 1)[1]
    name = f"{unit.stage}-{unit.number:06d}-{unit.digest[:12]}-{secrets.token_hex(3)}.{suffix}"
    path = Path(unit.index) / folder / name
    size, sha256 = temporary.stat().st_size, sha256_of(temporary)
    publish(temporary, path)
    fsync_folder(path.parent)
    return File(path=f"{folder}/{name}", bytes=size, sha256=sha256)


def _forget_peak() -> None:
    """Start the kernel's high-water mark of this process anew (proc(5), clear_refs)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)
