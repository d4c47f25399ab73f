"""A small index of a folder of .npy files that can get more of them, for the tests of its changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from embq.core.storage.paths import Place
from embq.index.change.growth import Grown, GrowthSpec, grow
from embq.index.collection.opening import open_collection
from embq.index.index_files.version import Version
from embq.index.plan.build_options import BuildOptions
from embq.index.plan.costs import Speeds
from embq.index.plan.index_plan import make_plan
from embq.index.stages.build import build
from embq.index.stages.runners import InProcess
from embq.index.stages.spec import BuildSpec
from embq.index.stages.units import Sidecar
from embq.index.tune.queries import plan_queries

DIM, PART_ROWS = 32, 400
MEMORY = 1 << 30
ASKED = {"recall": "0.9@10", "max_index_query_time_ms": None, "min_nearest_neighbors_to_retrieve": 10}


class Quiet:
    """A course that nobody looks at."""

    def planned(self, spec: BuildSpec, *, resumed: bool) -> None:
        """Nothing."""

    def growing(self, spec: GrowthSpec, *, resumed: bool) -> None:
        """Nothing."""

    def stage(self, name: str, done: int, units: int) -> None:
        """Nothing."""


def rows(count: int, seed: int, *, spread: float = 0.4, centres: int = 12) -> np.ndarray:
    """float16 (count, DIM) of length 1, around some directions that are the same whatever the seed is."""
    centre = np.random.default_rng(7).standard_normal((centres, DIM), np.float32)
    random = np.random.default_rng(seed)
    found = centre[random.integers(0, centres, count)] + spread * random.standard_normal((count, DIM), np.float32)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float16)


def add_part(data: Path, name: str, matrix: np.ndarray) -> None:
    """One more file of vectors."""
    data.mkdir(parents=True, exist_ok=True)
    np.save(data / f"{name}.npy", matrix)


def runner() -> InProcess:
    """Runner in this process."""
    return InProcess(threads=1, memory_bytes=MEMORY)


def make_index(
    folder: Path, *, key: str = "IVF16,RaBitQ4", refine: str = "fp16", parts: int = 3, **options: object
) -> Path:
    """Files of vectors in folder/data, and an index of them, whose folder it gives; built of several blocks.

    Args:
        options: of `embq index`, beside `ASKED`.
    """
    for number in range(parts):
        add_part(folder / "data", f"p{number}", rows(PART_ROWS, number))
    collection = open_collection(folder / "data")

    def small(
        index: Place, spec: BuildSpec, version: Version, stages: Mapping[str, Sequence[Sidecar]], at: Path
    ) -> None:
        (at / "infos.json").write_text(json.dumps({"index_key": spec.plan.key, "target_met": True}), encoding="utf-8")

    plan = make_plan(
        collection.n,
        collection.dim,
        BuildOptions(index_key=key, refine=refine),
        unit_length=True,
        speeds=Speeds(gflops=50.0, disk_bytes_s=5e8, cores=1),
    )
    asked = {**ASKED, **options}

    def spec() -> BuildSpec:
        return BuildSpec(
            collection=collection,
            plan=replace(plan, block_rows=PART_ROWS, slices=2),
            asked=asked,
            queries=plan_queries(collection, count=60),
            held_out=(),
            drop_invalid=True,
            memory_bytes=MEMORY,
        )

    build(folder / "index", collection, asked, spec, runner(), Quiet(), small)
    return folder / "index"


def copy_of(index: Path, folder: Path) -> Path:
    """Another copy of the data and of their index."""
    shutil.copytree(index.parent, folder, dirs_exist_ok=True)
    return folder / "index"


def grown(index: Path, *, drop_invalid: bool = False) -> Grown:
    """Let an index grow by what is in its data."""
    collection = open_collection(index.parent / "data")
    return grow(index, collection, runner(), Quiet(), drop_invalid=drop_invalid, memory_bytes=MEMORY)


def litter(index: Path) -> list[str]:
    """Entries in the folder of an index that belong to neither of its versions."""
    records = [json.loads((one / "version.json").read_text()) for one in index.glob("v*")]
    known = {"CURRENT", "_lock", "_work", "files", *(one.name for one in index.glob("v[0-9]*"))}
    found = [one.name for one in index.iterdir() if one.name not in known]
    named = json.dumps(records)
    found += [one.name for one in (index / "files").iterdir() if one.name not in named]
    return [*found, *(str(one.relative_to(index)) for one in (index / "_work").glob("*"))]
