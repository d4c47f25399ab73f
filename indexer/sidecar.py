"""What a unit has made: a sidecar that names its payload, and is the commit of the unit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from core.errors import MalformedError, OutputError
from core.storage.beneath import below
from core.units import content_hash
from core.wire import Count, RelativePath, Seconds, Sha256, ShortText, Word, convert
from indexer.units import IndexUnit
from indexer.workshop import Workshop, read_json

HASH_BYTES = 1 << 22
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A committed payload.

    Attributes:
        path: relative to the index's folder.
    """

    path: RelativePath
    bytes: Count
    sha256: Sha256

    def describe(self) -> dict[str, Any]:
        """The file as JSON-ready values; `from_description` is its inverse."""
        return {"path": self.path, "bytes": self.bytes, "sha256": self.sha256}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> File:
        """The file that `describe` gave; OutputError for anything else, such as a path that leads out of the index."""
        return _read(cls, described, "file of an index")

    def check(self, index: Path) -> Path:
        """Where it is; OutputError where it is missing or has another size."""
        path = below(index, self.path)
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

    digest: Word
    files: Mapping[ShortText, File]
    stats: Mapping[str, Any]
    seconds: Seconds
    cpu_seconds: Seconds
    peak_rss_bytes: Count
    versions: Mapping[ShortText, ShortText]
    worker: ShortText

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
        """The sidecar that `describe` gave; OutputError for anything else."""
        return _read(cls, described, "sidecar of an index")


def _read(form: type[T], described: Mapping[str, Any], what: str) -> T:
    try:
        return convert(form, described, what=what)
    except MalformedError as error:
        raise OutputError(error.message, code="index_damaged") from error


def find(unit: IndexUnit) -> Sidecar | None:
    """The unit's sidecar, where it is done and its payload is there; None otherwise."""
    if not unit.sidecar.exists():
        return None
    with suppress(OutputError):
        sidecar = Sidecar.from_description(read_json(unit.sidecar))
        for file in sidecar.files.values():
            file.check(Path(unit.index))
        return sidecar if sidecar.digest == unit.digest else None
    return None


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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
