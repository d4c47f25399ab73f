"""Growth: rows that a collection has got since become a further group of lists, under the template that is there.

Nothing is trained again. How unlike the rows are that the template was trained on, and how well searches find the new
ones, is measured and told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from core.errors import InputError
from core.units import content_hash
from indexer.build.build import StageProgress, run_stage
from indexer.build.build_dir import BuildDir
from indexer.build.runners import Runner
from indexer.build.spec import BuildSpec, mean_residual
from indexer.build.units import IndexUnit, Sidecar, write_inputs
from indexer.change.compaction import Compaction, compacted, due
from indexer.change.version_swap import succeed, tidy
from indexer.collection.opening import Block, Collection
from indexer.faiss_module import faiss
from indexer.index_files.files import alone
from indexer.index_files.sizes import imbalance
from indexer.index_files.version import Slice, Span, Version, current_name, read_current, read_version
from indexer.plan.options import bytes_text, parse_bytes
from indexer.tune.queries import QueryPlan

OUTGROWN = 2.0
"""Beyond so many times the rows at training, other lists would be chosen."""
WARN_CHANGE = 0.10
"""Drift beyond this is worth a warning."""


def told_of(growth: Growth, base: Version, stages: Mapping[str, Sequence[Sidecar]]) -> dict[str, Any]:
    """What infos.json says under "growth".

    Args:
        base: the version that grew.
        stages: stage -> sidecars of its units.
    """
    added, retuned = stages["grow"], stages["retune"][0].stats
    collection, plan = growth.spec.collection, growth.spec.plan
    drift = _drift(growth, base, added)
    every = [one for units in stages.values() for one in units]
    return {
        "rows_added": growth.rows,
        "excluded": sum(one.stats["excluded"] for one in added),
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
        "seconds": {stage: sum(one.seconds for one in units) for stage, units in stages.items()},
        "cpu_seconds": {stage: sum(one.cpu_seconds for one in units) for stage, units in stages.items()},
        "peak_rss_bytes": max(one.peak_rss_bytes for one in every),
    }


def _drift(growth: Growth, base: Version, added: Sequence[Sidecar]) -> dict[str, float]:
    """How far the new rows are from what the lists were made for, and how much less equal the lists have become."""
    at_training, residual = float(base.notes["residual"]), mean_residual(added)
    return {
        "residual": residual,
        "residual_at_training": at_training,
        "change": residual / at_training - 1.0 if at_training > 0.0 and residual else 0.0,
        "imbalance_factor": imbalance(growth.draft(base, added)),
        "imbalance_factor_before": float(base.notes.get("imbalance_factor") or imbalance(base)),
    }


def _warnings(drift: Mapping[str, float], retuned: Mapping[str, Any], *, rows: int, rows_at_training: int) -> list[str]:
    """What speaks for building the index again, a sentence each."""
    told = []
    if drift["change"] > WARN_CHANGE:
        told.append(
            "the new rows are unlike those that the index was trained on: their mean squared distance to the centres "
            f"of their lists is {drift['residual']:.4g}, {100 * drift['change']:.0f} % more than at training; "
            "consider --rebuild"
        )
    now, before = drift["imbalance_factor"], drift["imbalance_factor_before"]
    if now > before * (1.0 + WARN_CHANGE):
        told.append(
            f"the lists have become less equal, so that searches take longer: imbalance factor {now:.3g}, "
            f"{before:.3g} at training; consider --rebuild"
        )
    if retuned["met"] is False:
        told.append(
            f"recall@{retuned['k']} of searches for new rows is {retuned['recall']:.3f}, below what was asked for; "
            "consider --rebuild"
        )
    if rows > OUTGROWN * rows_at_training:
        told.append(
            f"the index has {rows / rows_at_training:.1f} times the {rows_at_training:,} rows that its lists were "
            "chosen for, so that searches take longer than they need to; consider --rebuild"
        )
    return told


RETUNE_SHARE = 0.10
"""An index is tuned again when it has grown by more than this since it was tuned."""
EXACT_ROWS, EXACT_SHARE = 200_000, 50
"""Exact search through the whole collection tells which rows are the nearest where that is so small, or the new rows
are at least one in so many; else a search that looks much farther than usual does."""
RETUNE_QUERIES = 300


class GrowthProgress(StageProgress, Protocol):
    """Who is told how an index grows."""

    def growing(self, growth: Growth, *, resumed: bool) -> None:
        """Before any work; `resumed` where an earlier attempt has left something."""
        ...


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What is added: the frozen content of the build.json of its units.

    Attributes:
        spec: of the collection as it is now.
        base: name of the version that grows.
        first_id: of the first new row.
        retunes: tune again, by all query sets.
        exact: the truth comes from exact search.
    """

    spec: BuildSpec
    base: str
    first_id: int
    retunes: bool
    exact: bool

    @cached_property
    def blocks(self) -> list[Block]:
        """The new rows in pieces, each for one unit."""
        return self.spec.collection.blocks(self.spec.plan.block_rows, self.first_id)

    @property
    def rows(self) -> int:
        """New rows."""
        return self.spec.collection.n - self.first_id

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values, among them those of the spec; `from_description` is its inverse."""
        own = {name: getattr(self, name) for name in ("base", "first_id", "retunes", "exact")}
        return {**self.spec.describe(), "growth": own}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> Growth:
        """What `describe` gave."""
        return cls(spec=BuildSpec.from_description(described), **described["growth"])

    def draft(self, base: Version, added: Sequence[Sidecar]) -> Version:
        """The version that `base` becomes by what the units have added."""
        return replace(
            base,
            name="",
            collection=self.spec.collection,
            groups=(
                *base.groups,
                *((Slice(file=one.files["lists"], first=0, last=one.stats["lists"]),) for one in added),
            ),
            rows=(*base.rows, *self._spans(added, "rows")),
            identity=(*base.identity, *self._spans(added, "identity")),
            next_id=self.spec.collection.n,
            excluded=base.excluded + sum(one.stats["excluded"] for one in added),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _spans(self, added: Sequence[Sidecar], role: str) -> list[Span]:
        return [
            Span(file=one.files[role], first_id=block.first_id, rows=block.rows)
            for one, block in zip(added, self.blocks, strict=True)
            if role in one.files
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What came of it.

    Attributes:
        version: current one afterwards.
        rows: that were added; 0 where the collection has no more than the index.
        told: what infos.json says under "growth".
        compaction: where one was due.
    """

    version: Version
    rows: int
    told: Mapping[str, Any] = field(default_factory=dict)
    compaction: Compaction | None = None


def fits(index: Path, asked: Mapping[str, Any]) -> bool:
    """Whether there is an index that was asked for in the same words, so that it can grow."""
    name = current_name(index)
    return bool(name) and content_hash(read_version(index, name).notes.get("asked")) == content_hash(dict(asked))


def grow(
    index: Path,
    collection: Collection,
    runner: Runner,
    course: GrowthProgress,
    *,
    drop_invalid: bool,
    memory_bytes: int,
) -> Grown:
    """Add to an index what its collection has got since, and make that its current version.

    Args:
        collection: as it is now.
        memory_bytes: that all processes of a machine may take together.

    Raises InputError where rows of the index are gone or have changed (`part_missing`, `part_changed`,
    `other_embeddings`) or new ones are no vectors (`bad_vectors`), TryLaterError where another process is at work on
    the index, and what the runner raises. What was done stays for the next attempt.
    """
    with alone(index):
        base = read_current(index)
        now = _continued(collection, base)
        if now.n == base.next_id:
            compaction = _compacted(base, runner, course)
            tidy(index)
            return Grown(version=base if compaction is None else compaction.version, rows=0, compaction=compaction)
        growth = _growth(now, base, drop_invalid=drop_invalid, memory_bytes=memory_bytes)
        digest = content_hash([base.name, base.trained.sha256, now.digest, drop_invalid, str(faiss().__version__)])
        build_dir = BuildDir(index, f"grow-{digest[:16]}")
        build_dir.make()
        resumed = not build_dir.write_once(build_dir.spec, growth.describe())
        growth = Growth.from_description(build_dir.read_spec())
        course.growing(growth, resumed=resumed)
        stages = _stages(growth, build_dir, runner, course)
        told = told_of(growth, base, stages)
        retuned = stages["retune"][0].stats
        version = replace(
            growth.draft(base, stages["grow"]),
            search=retuned["search"],
            notes={
                **base.notes,
                "imbalance_factor": told["drift"]["imbalance_factor_before"],
                "tuned_rows": growth.spec.collection.n if growth.retunes else _tuned_rows(base),
            },
        )
        infos: dict[str, Any] = {
            "growth": told,
            "imbalance_factor": told["drift"]["imbalance_factor"],
            **retuned["infos"],
            **({"target_met": False} if retuned["met"] is False else {}),
        }
        published = succeed(base, version, infos)
        compaction = _compacted(published, runner, course)
        last = published if compaction is None else compaction.version
        return Grown(version=last, rows=growth.rows, told=told, compaction=compaction)


def _continued(collection: Collection, base: Version) -> Collection:
    """The collection with the ids that its rows have in the index."""
    try:
        now = collection.continuing(base.collection)
    except InputError as error:
        advice = "add --rebuild to index what is there now" if error.code != "part_damaged" else ""
        raise InputError(
            error.message, next_step="; ".join(filter(None, [error.next_step, advice])), code=error.code
        ) from error
    if base.plan.metric == "cosine" and not now.unit_length:
        raise InputError(
            f"the index compares by the cosine, for which vectors have length 1, and some of {now.root} have not",
            next_step="scale the new vectors to length 1, or add --rebuild to index all of them by their products",
            code="other_embeddings",
        )
    return now


def _growth(now: Collection, base: Version, *, drop_invalid: bool, memory_bytes: int) -> Growth:
    new = now.n - base.next_id
    _check_memory(now, base)
    retunes = now.n - _tuned_rows(base) > RETUNE_SHARE * _tuned_rows(base)
    return Growth(
        spec=BuildSpec(
            collection=now,
            plan=base.plan,
            asked=base.notes["asked"],
            queries=_queries(base).describe(),
            held_out=(),
            drop_invalid=drop_invalid,
            memory_bytes=memory_bytes,
        ),
        base=base.name,
        first_id=base.next_id,
        retunes=retunes,
        exact=retunes or now.n <= max(EXACT_ROWS, EXACT_SHARE * new),
    )


def _check_memory(now: Collection, base: Version) -> None:
    """Refuse what would take more memory than the index may."""
    said = base.notes["asked"].get("max_index_memory_usage")
    lists = sum(one.file.bytes for group in base.groups for one in group)
    needed = base.trained.bytes + lists * now.n / max(1, base.next_id - base.dropped)
    if said is not None and needed > parse_bytes(said) * base.plan.indices:
        raise InputError(
            f"with {now.n - base.next_id:,} rows more the index takes {bytes_text(needed)} of memory, "
            f"--max-index-memory-usage is {said}",
            next_step="--rebuild builds one of all rows that fits; a larger limit builds anew as well",
            code="index_memory",
        )


def _queries(base: Version) -> QueryPlan:
    """The query sets that the index was tuned by, with fewer queries; a file that is gone is no reason not to grow."""
    known = QueryPlan.from_description(base.notes["queries"])
    files = {name: path for name, path in known.files.items() if Path(path).exists()}
    counts = {
        name: min(count, RETUNE_QUERIES)
        for name, count in known.counts.items()
        if name not in known.files or name in files
    }
    return replace(known, counts=counts, files=files)


def _tuned_rows(version: Version) -> int:
    return int(version.notes.get("tuned_rows", version.plan.n))


def _stages(growth: Growth, build_dir: BuildDir, runner: Runner, course: GrowthProgress) -> dict[str, list[Sidecar]]:
    """Have all units done; stage -> sidecars."""
    done: dict[str, list[Sidecar]] = {}
    names: dict[str, list[str]] = {}
    truths = len(growth.spec.blocks) if growth.exact else 0
    for stage, count, needs in (
        ("grow", len(growth.blocks), ()),
        ("ask", 1, ()),
        ("truth", truths, ("queries",)),
        ("retune", 1, ("grow", "queries", "truth")),
    ):
        inputs = write_inputs(build_dir, {needed: names[needed] for needed in needs})
        units = [
            IndexUnit(index=str(build_dir.index), build=build_dir.build, stage=stage, number=number, inputs=inputs)
            for number in range(count)
        ]
        # The stage `truth` is that of a build, which knows the query sets by that name.
        name = "queries" if stage == "ask" else stage
        done[name] = run_stage(stage, units, runner, course) if units else []
        names[name] = [unit.sidecar.name for unit in units]
        if stage == "grow":
            _check_vectors(growth, done[stage])
    return done


def _check_vectors(growth: Growth, added: Sequence[Sidecar]) -> None:
    bad = sum(one.stats["excluded"] for one in added)
    if bad and not growth.spec.drop_invalid:
        ids = [id_ for one in added for id_ in one.stats["bad_ids"]][:10]
        raise InputError(
            f"{bad:,} of {growth.rows:,} new vectors of {growth.spec.collection.root} are zero or not finite; their "
            f"ids begin with {', '.join(map(str, ids))}",
            next_step="add --drop-invalid to leave them out of the index; they keep their ids, and are counted",
            code="bad_vectors",
        )


def _compacted(version: Version, runner: Runner, course: GrowthProgress) -> Compaction | None:
    return compacted(version, runner, course) if due(version) else None
