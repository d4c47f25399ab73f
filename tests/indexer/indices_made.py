"""Indices of small outputs, built in this process by embq's own stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from embq.core.storage.paths import Place
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

MEMORY_BYTES = 2 << 30

SAID = {"recall": "0.95@10", "max_index_query_time_ms": None, "min_nearest_neighbors_to_retrieve": 20}
"""What `embq index` has by itself, as far as tuning looks at it."""


class Silent:
    """Whom a build need not tell anything."""

    def planned(self, spec: BuildSpec, *, resumed: bool) -> None:
        """Nothing."""

    def stage(self, name: str, done: int, units: int) -> None:
        """Nothing."""


def _no_report(
    index: Place, spec: BuildSpec, version: Version, stages: Mapping[str, Sequence[Sidecar]], folder: Path
) -> None:
    """No report: a searcher needs none."""


def index_of(root: Path, *, output: str | None = None, to: Path | None = None, **wishes: object) -> Path:
    """Build an index of an output folder, or of a folder of embeddings; gives the folder of the index.

    Args:
        output: which of a run's vectors.
        wishes: options of `BuildOptions`.
    """
    collection = open_collection(root, output=output)
    wish = BuildOptions(**wishes)  # type: ignore[arg-type]
    speeds = Speeds(gflops=50.0, disk_bytes_s=1e9, cores=1)
    index = to or root / "index" / collection.output
    queries = plan_queries(collection, count=8)
    options = {**SAID, **wishes}

    def spec() -> BuildSpec:
        return BuildSpec(
            collection=collection,
            plan=make_plan(collection.n, collection.dim, wish, unit_length=collection.unit_length, speeds=speeds),
            asked=options,
            queries=queries,
            held_out=tuple(queries.held_out(collection.n).tolist()),
            drop_invalid=False,
            memory_bytes=MEMORY_BYTES,
        )

    runner = InProcess(threads=1, memory_bytes=MEMORY_BYTES)
    build(index, collection, options, spec, runner, Silent(), _no_report)
    return index
