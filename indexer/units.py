"""The stages of a build, and the units that they are cut into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.units import content_hash
from indexer.workshop import Workshop

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
