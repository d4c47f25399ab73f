"""A small collection, `embq index` over it, and what must be true of an index whatever happened while it was built."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from embq.index.stages.units import STAGE_MODULES
from tests.e2e.session import Command
from tests.faults.kit.cluster import sabotaged
from tests.faults.kit.table import Recovery

ROWS, DIM, FILES = 3_000, 24, 3
BLOCK_ROWS = 1_024
"""Three blocks, so that a stage has several units to lose."""
SLICES = 2
STAGES = {"sample": 3, "train": 1, "queries": 1, "truth": 3, "add": 3, "merge": SLICES, "tune": 1}
"""Units of each stage of the build of such a collection."""
OPTIONS = ("--index-key", "IVF16,SQ8", "--nb-indices-to-keep", str(SLICES), "--quiet")
SMALL = (
    {"set": "embq.index.plan.memory:LEAST_BLOCK_ROWS", "to": BLOCK_ROWS},
    # How long latencies are measured for; none is looked at here.
    {"set": "embq.index.tune.measure:REPORTED_SECONDS", "to": 0.05},
)
QUERIES = 200
PATIENCE_S = 200.0
"""For a command that takes seconds, on a machine that is busy with others."""


def write_collection(folder: Path, rows: int = ROWS, dim: int = DIM) -> Path:
    """Files of clustered vectors of length 1; the same ones each time."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(7)
    centres = random.normal(size=(40, dim))
    vectors = centres[random.integers(0, len(centres), rows)] + 0.4 * random.normal(size=(rows, dim))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for number, part in enumerate(np.array_split(vectors.astype(np.float32), FILES)):
        np.save(folder / f"{number}.npy", part)
    return folder


def crash(at: str, marker: Path, *, match: str = "", when: str = "before", do: str = "kill") -> dict[str, Any]:
    """Sabotage: once, in whichever process gets there first."""
    return {"at": at, "do": do, "when": when, "marker": str(marker), **({"match": match} if match else {})}


def counted(folder: Path) -> list[dict[str, Any]]:
    """Sabotage: each time that the work of a unit is begun, a byte goes into a file of its stage."""
    return [
        {"at": f"{STAGE_MODULES[stage]}:{stage}", "do": "pause", "seconds": 0, "every": True}
        | {"tally": str(folder / f"begun-{stage}")}
        for stage in STAGES
    ]


@dataclass(slots=True)
class Building:
    """One index and those who build it.

    Attributes:
        source: folder of the vectors; `named`, where it is given, is what the command names in its place.
        folder: for what a test notes, and for the index where `at` does not say another place.
    """

    source: Path
    folder: Path
    recovery: Recovery
    broker_url: str = ""
    options: tuple[str, ...] = OPTIONS
    at: Path | None = None
    named: str = ""
    url: str = ""
    commands: list[Command] = field(default_factory=list)

    @property
    def index(self) -> Path:
        """Folder of the index."""
        return self.at or self.folder / "index"

    def begin(
        self,
        *options: str,
        sabotage: Sequence[Mapping[str, Any]] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Command:
        """Start `embq index`."""
        changed = {**(environment or {}), **sabotaged([*SMALL, *counted(self.folder), *sabotage])}
        given = [*self.options, *options]
        if self.broker_url:
            url = urlsplit(self.broker_url)
            given += ["--broker", f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"]
            changed["EMBQ_BROKER_PASSWORD_FILE"] = str(self.folder / "password")
            (self.folder / "password").write_text(url.password or "")
        source, to = self.named or self.source, self.url or self.index
        command = Command("index", source, "--output", to, *given, environment=changed, prefix=prefix)
        self.commands.append(command)
        return command

    def run(self, *options: str, sabotage: Sequence[Mapping[str, Any]] = ()) -> None:
        """`embq index` to its end, which must be a good one."""
        command = self.begin(*options, sabotage=sabotage)
        status = command.wait(PATIENCE_S)
        assert status in (0, 3), command.said
        assert "Traceback" not in command.said

    def run_killed(self, *options: str, sabotage: Sequence[Mapping[str, Any]]) -> None:
        """`embq index` that the sabotage kills."""
        command = self.begin(*options, sabotage=sabotage)
        status = command.wait(PATIENCE_S)
        assert status == -9, command.said
        self.recovery.injected()

    def close(self) -> None:
        """End what is left."""
        for command in self.commands:
            command.close()

    # --- what is there ---

    def begun(self) -> dict[str, int]:
        """Stage -> how often the work of one of its units was begun, in all attempts."""
        paths = {stage: self.folder / f"begun-{stage}" for stage in STAGES}
        return {stage: path.stat().st_size if path.exists() else 0 for stage, path in paths.items()}

    def sidecars(self) -> dict[str, int]:
        """Stage -> units that are done, of the build that is under way."""
        found = (path.name.split("-")[0] for path in self.index.glob("_work/*/*-??????-????????????.json"))
        return dict(Counter(found))

    def record(self) -> dict[str, Any]:
        """The record of the current version."""
        name = (self.index / "CURRENT").read_text().strip()
        found: dict[str, Any] = json.loads((self.index / name / "version.json").read_text())
        return found

    def contents(self) -> dict[str, list[str]]:
        """Role -> digests of the files that the current version names, in order."""
        record = self.record()
        groups = record["groups"]
        return {
            "trained": [record["trained"]["sha256"]],
            "lists": [one["sha256"] for group in groups for one in group],
            **{role: [one["sha256"] for one in record[role]] for role in ("rows", "identity")},
        }

    def answers(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and scores of the 10 nearest of `QUERIES` queries, with a quarter of the lists probed."""
        from embq.index.searcher import Searcher

        random = np.random.default_rng(11)
        vectors = np.concatenate([np.load(path) for path in sorted(self.source.glob("*.npy"))])
        queries = vectors[random.integers(0, len(vectors), QUERIES)]
        queries = queries + 0.1 * random.normal(size=queries.shape).astype(np.float32)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
        searcher = Searcher.open(self.index)
        found = searcher.search(queries.astype(np.float32), 10, nprobe=4)
        searcher.close()
        return found.ids, found.scores

    def assert_published(self, version: str = "v0001") -> None:
        """One version, the files that it names with the content that it says, and nothing else."""
        assert (self.index / "CURRENT").read_text().strip() == version
        there = {path.name for path in self.index.iterdir()}
        assert there - {"_lock"} == {"CURRENT", "files", version}, there
        record = self.record()
        named = [record["trained"], *(one for group in record["groups"] for one in group)]
        named += [one for role in ("rows", "identity") for one in record[role]]
        assert {f"files/{path.name}" for path in (self.index / "files").iterdir()} == {one["path"] for one in named}
        for one in named:
            path = self.index / one["path"]
            assert (path.stat().st_size, _sha256(path)) == (one["bytes"], one["sha256"])

    def assert_same_as(self, other: Building) -> None:
        """The same files, byte by byte, and the same answers."""
        assert self.contents() == other.contents()
        for mine, theirs in zip(self.answers(), other.answers(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


MakeBuilding = Callable[..., Building]


def unit_processes(command: Command) -> list[psutil.Process]:
    """The processes below a command that do index units."""
    found = []
    for process in command.descendants():
        try:
            if "embq.index.stages.process" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found
