"""Growth of an index: new rows of its collection become a further group of lists, encoded with the trained template.

Nothing is trained again. The drift of the new rows from the training sample, and the recall of searches for them, are
measured and reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from embq.core.errors import InputError
from embq.core.units import content_hash
from embq.index.change.compaction import Compaction, compacted, due
from embq.index.change.version_swap import swap_version, tidy
from embq.index.collection.opening import Block, Collection
from embq.index.faiss_module import faiss
from embq.index.index_files.files import from_json, index_lock
from embq.index.index_files.sizes import imbalance
from embq.index.index_files.version import ListsFile, Version, read_current
from embq.index.plan.build_options import bytes_text, parse_bytes
from embq.index.stages.build import StageProgress, StageSequence, refuse_faults
from embq.index.stages.build_dir import BuildDir
from embq.index.stages.runners import Runner
from embq.index.stages.spec import BuildSpec, mean_residual, row_files
from embq.index.stages.units import Sidecar
from embq.index.tune.queries import QueryPlan

RETUNE_SHARE = 0.10
"""An index is tuned again when it has grown by more than this since it was tuned."""
EXACT_ROWS, EXACT_SHARE = 200_000, 50
"""Limits for exact search as the source of true neighbours: the rows of the collection, or their number for each new
row. Beyond both, the source is a search that looks much farther than usual."""
RETUNE_QUERIES = 300
OUTGROWN = 2.0
"""Growth since training, as a factor on the rows, beyond which other lists would be chosen."""
WARN_CHANGE = 0.10
"""Drift beyond this is worth a warning."""


class GrowthProgress(StageProgress, Protocol):
    """Receives the progress of a growth."""

    def growing(self, spec: GrowthSpec, *, resumed: bool) -> None:
        """Called before any work; `resumed` if an interrupted growth goes on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Rows that are added to a version.

    Attributes:
        base: name of the version that grows.
        first_id: of the first new row.
        retunes: tune again, with all query sets.
        exact: the true neighbours come from exact search.
    """

    base: str
    first_id: int
    retunes: bool
    exact: bool


@dataclass(frozen=True, kw_only=True)
class GrowthSpec(BuildSpec):
    """Content of the build.json of a growth; `collection` is the grown one."""

    growth: Growth

    @cached_property
    def new_blocks(self) -> list[Block]:
        """Blocks of the new rows, one for each unit of the stage `grow`."""
        return self.collection.blocks(self.plan.block_rows, self.growth.first_id)

    @property
    def new_rows(self) -> int:
        """Number of new rows."""
        return self.collection.n - self.growth.first_id

    def draft(self, base: Version, added: Sequence[Sidecar]) -> Version:
        """The version that `base` becomes with the lists that the units have added."""
        return replace(
            base,
            name="",
            collection=self.collection,
            groups=(
                *base.groups,
                *((ListsFile.of(sidecar.files["lists"], first=0, last=sidecar.stats["lists"]),) for sidecar in added),
            ),
            rows=(*base.rows, *row_files(added, self.new_blocks, "rows")) if base.rows else (),
            identity=(*base.identity, *row_files(added, self.new_blocks, "identity")),
            next_id=self.collection.n,
            excluded=base.excluded + sum(sidecar.stats["excluded"] for sidecar in added),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Result of a growth.

    Attributes:
        version: current version afterwards.
        rows: that were added; 0 if the collection has no more than the index.
        report: content of "growth" in infos.json.
        compaction: if one was due.
    """

    version: Version
    rows: int
    report: Mapping[str, Any] = field(default_factory=dict)
    compaction: Compaction | None = None


def holds(version: Version, collection: Collection, key_options: Mapping[str, Any]) -> bool:
    """True for a version with all rows of a collection that was built with these options."""
    if content_hash(version.notes.get("asked")) != content_hash(dict(key_options)):
        return False
    try:
        return not collection.grown_from(version.collection)
    except InputError:
        return False


def grow(
    index: Path,
    collection: Collection,
    runner: Runner,
    progress: GrowthProgress,
    *,
    drop_invalid: bool,
    memory_bytes: int,
) -> Grown:
    """Add the new rows of a collection to its index, and make that the current version.

    Args:
        collection: as it is now.
        memory_bytes: that all processes of a machine may take together.

    Raises InputError if rows of the index are gone or have changed (`part_missing`, `part_changed`,
    `other_embeddings`) or new ones are no vectors (`bad_vectors`), TryLaterError if another process works on the
    index, and what the runner raises. Finished units stay for the next attempt.
    """
    with index_lock(index):
        base = read_current(index)
        now = _continued(collection, base)
        if now.n == base.next_id:
            compaction = compacted(base, runner, progress) if due(base) else None
            tidy(index)
            return Grown(version=base if compaction is None else compaction.version, rows=0, compaction=compaction)
        _check_memory(now, base)
        digest = content_hash([base.name, base.trained.sha256, now.digest, drop_invalid, str(faiss().__version__)])
        build_dir = BuildDir(index, f"grow-{digest[:16]}")
        make_spec = partial(_spec, now, base, drop_invalid=drop_invalid, memory_bytes=memory_bytes)
        spec, resumed = build_dir.begin(GrowthSpec, make_spec)
        progress.growing(spec, resumed=resumed)
        stages = _run_stages(spec, build_dir, runner, progress)
        report = growth_report(spec, base, stages)
        retuned = stages["retune"][0].stats
        version = replace(
            spec.draft(base, stages["grow"]),
            search=retuned["search"],
            notes={
                **base.notes,
                "imbalance_factor": report["drift"]["imbalance_factor_before"],
                "tuned_rows": spec.collection.n if spec.growth.retunes else _tuned_rows(base),
            },
        )
        infos: dict[str, Any] = {
            "growth": report,
            "imbalance_factor": report["drift"]["imbalance_factor"],
            **retuned["infos"],
            **({"target_met": False} if retuned["met"] is False else {}),
        }
        published = swap_version(base, version, infos)
        compaction = compacted(published, runner, progress) if due(published) else None
        last = published if compaction is None else compaction.version
        return Grown(version=last, rows=spec.new_rows, report=report, compaction=compaction)


def _continued(collection: Collection, base: Version) -> Collection:
    """The collection with the ids that its rows have in the index."""
    try:
        now = collection.continuing(base.collection)
    except InputError as error:
        advice = "`embq index build` indexes what is there now" if error.code != "part_damaged" else ""
        raise InputError(
            error.message, next_step="; ".join(filter(None, [error.next_step, advice])), code=error.code
        ) from error
    if base.plan.metric == "cosine" and not now.unit_length:
        raise InputError(
            f"the index compares by the cosine, for which vectors have length 1, and some of {now.root} have not",
            next_step="scale the new vectors to length 1, or index all by their products with `embq index build`",
            code="other_embeddings",
        )
    return now


def _spec(now: Collection, base: Version, *, drop_invalid: bool, memory_bytes: int) -> GrowthSpec:
    new = now.n - base.next_id
    retunes = now.n - _tuned_rows(base) > RETUNE_SHARE * _tuned_rows(base)
    return GrowthSpec(
        collection=now,
        plan=base.plan,
        asked=base.notes["asked"],
        queries=_queries(base),
        held_out=(),
        drop_invalid=drop_invalid,
        memory_bytes=memory_bytes,
        growth=Growth(
            base=base.name,
            first_id=base.next_id,
            retunes=retunes,
            exact=retunes or now.n <= max(EXACT_ROWS, EXACT_SHARE * new),
        ),
    )


def _check_memory(now: Collection, base: Version) -> None:
    """Raise InputError if the grown index would exceed its memory limit."""
    limit = base.notes["asked"].get("max_index_memory_usage")
    lists = sum(file.bytes for group in base.groups for file in group)
    needed = base.trained.bytes + lists * now.n / max(1, base.next_id - base.dropped)
    if limit is not None and needed > parse_bytes(limit) * base.plan.indices:
        raise InputError(
            f"with {now.n - base.next_id:,} rows more the index takes {bytes_text(needed)} of memory, "
            f"--max-index-memory-usage is {limit}",
            next_step="`embq index build` makes one of all rows that fits; it takes a larger limit as well",
            code="index_memory",
        )


def _queries(base: Version) -> QueryPlan:
    """The query sets of the last tuning with fewer queries; sets whose file is gone are left out."""
    previous = from_json(QueryPlan, base.notes["queries"], "query plan of an index")
    files = {name: path for name, path in previous.files.items() if Path(path).exists()}
    counts = {
        name: min(count, RETUNE_QUERIES)
        for name, count in previous.counts.items()
        if name not in previous.files or name in files
    }
    return replace(previous, counts=counts, files=files)


def _tuned_rows(version: Version) -> int:
    return int(version.notes.get("tuned_rows", version.plan.n))


def _run_stages(
    spec: GrowthSpec, build_dir: BuildDir, runner: Runner, progress: GrowthProgress
) -> dict[str, list[Sidecar]]:
    """Run all stages; returns the sidecars of each."""
    stages = StageSequence(build_dir, runner, progress)
    added = stages.run("grow", len(spec.new_blocks))
    refuse_faults(spec, added, sum(sidecar.stats["excluded"] for sidecar in added), f"{spec.new_rows:,} new")
    # The stage `truth` is that of a build, which knows the query sets as `queries`.
    stages.run("new_queries", 1, known_as="queries")
    stages.run("truth", len(spec.blocks) if spec.growth.exact else 0, ("queries",))
    stages.run("retune", 1, ("grow", "queries", "truth"))
    return stages.sidecars


def growth_report(spec: GrowthSpec, base: Version, stages: Mapping[str, Sequence[Sidecar]]) -> dict[str, Any]:
    """Content of "growth" in infos.json.

    Args:
        base: the version that grew.
        stages: stage -> sidecars of its units.
    """
    added, retuned = stages["grow"], stages["retune"][0].stats
    collection, plan = spec.collection, spec.plan
    drift = _drift(spec, base, added)
    every = [sidecar for units in stages.values() for sidecar in units]
    return {
        "rows_added": spec.new_rows,
        "excluded": sum(sidecar.stats["excluded"] for sidecar in added),
        "rows_at_training": plan.n,
        "rows_since_training": collection.n - plan.n,
        "drift": drift,
        "recall_of_new_rows": {
            f"recall@{retuned['k']}": retuned["recall"],
            "before_tuning": retuned["recall_before"],
            "queries": retuned["queries"],
            "truth": retuned["truth"],
        },
        "tuned_again": retuned["tuned"],
        "warnings": _warnings(drift, retuned, rows=collection.n, rows_at_training=plan.n),
        "seconds": {stage: sum(sidecar.seconds for sidecar in units) for stage, units in stages.items()},
        "cpu_seconds": {stage: sum(sidecar.cpu_seconds for sidecar in units) for stage, units in stages.items()},
        "peak_rss_bytes": max(sidecar.peak_rss_bytes for sidecar in every),
    }


def _drift(spec: GrowthSpec, base: Version, added: Sequence[Sidecar]) -> dict[str, float]:
    """Distance of the new rows from their centroids, and imbalance of the lists, now and at training."""
    at_training, residual = float(base.notes["residual"]), mean_residual(added)
    return {
        "residual": residual,
        "residual_at_training": at_training,
        "change": residual / at_training - 1.0 if at_training > 0.0 and residual else 0.0,
        "imbalance_factor": imbalance(spec.draft(base, added)),
        "imbalance_factor_before": float(base.notes.get("imbalance_factor") or imbalance(base)),
    }


def _warnings(drift: Mapping[str, float], retuned: Mapping[str, Any], *, rows: int, rows_at_training: int) -> list[str]:
    """Reasons to build the index again, a sentence each."""
    reasons = []
    if drift["change"] > WARN_CHANGE:
        reasons.append(
            "the new rows are unlike those that the index was trained on: their mean squared distance to the centres "
            f"of their lists is {drift['residual']:.4g}, {100 * drift['change']:.0f} % more than at training"
        )
    now, at_training = drift["imbalance_factor"], drift["imbalance_factor_before"]
    if now > at_training * (1.0 + WARN_CHANGE):
        reasons.append(
            f"the lists have become less equal, so that searches take longer: imbalance factor {now:.3g}, "
            f"{at_training:.3g} at training"
        )
    if retuned["met"] is False:
        reasons.append(
            f"recall@{retuned['k']} of searches for new rows is {retuned['recall']:.3f}, below what was asked for"
        )
    if rows > OUTGROWN * rows_at_training:
        reasons.append(
            f"the index has {rows / rows_at_training:.1f} times the {rows_at_training:,} rows that its lists were "
            "chosen for, so that searches take longer than they need to"
        )
    return [f"{reason}; consider `embq index build --overwrite`" for reason in reasons]
