"""Compaction: merges the lists of an index and of its additions into one group, without deleted rows.

Nothing is encoded again, so the answers are the same. Rows keep their ids, and deleted ids stay deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embq.core.units import content_hash
from embq.index.change.version_swap import swap_version, tidy
from embq.index.faiss_module import faiss
from embq.index.index_files.files import index_lock
from embq.index.index_files.lists import read_lists
from embq.index.index_files.sizes import imbalance, list_sizes
from embq.index.index_files.version import ListsFile, Version, read_current
from embq.index.plan.index_plan import RANGE_BYTES
from embq.index.stages.build import StageProgress, StageSequence
from embq.index.stages.build_dir import BuildDir
from embq.index.stages.runners import Runner

MOST_SHARE, MOST_GROUPS = 0.10, 32
"""Limits of additions, as a share of the rows and in number, beyond which an index is compacted when it has grown: a
search looks at every list in all of them, and an open index holds all their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Result of a compaction.

    Attributes:
        groups: that were put together; 1 if there was nothing to do but dropping what is deleted, or nothing at all.
        dropped: codes of deleted rows.
        fresh: False if nothing was to do.
    """

    version: Version
    groups: int
    dropped: int
    fresh: bool


def compact(index: Path, runner: Runner, progress: StageProgress) -> Compaction:
    """Compact the current version, unless it is; interrupted, the same call goes on.

    Raises InputError `no_index`, TryLaterError if another process is at work on the index, and what the runner
    raises.
    """
    with index_lock(index):
        return compacted(read_current(index), runner, progress)


def due(version: Version) -> bool:
    """True if additions are numerous or large enough that they should be put into the index."""
    return len(version.groups) > 1 and (
        len(version.groups) - 1 > MOST_GROUPS or version.next_id - merged_ids(version) > MOST_SHARE * version.next_id
    )


def merged_ids(version: Version) -> int:
    """The id below which rows are in the first group of a version."""
    return int(version.notes.get("merged_ids", version.plan.n))


def compacted(base: Version, runner: Runner, progress: StageProgress) -> Compaction:
    """As `compact`, of a version; the caller holds the index's lock."""
    dropped = base.deleted - base.dropped
    if len(base.groups) == 1 and not dropped:
        tidy(base.index)
        return Compaction(version=base, groups=1, dropped=0, fresh=False)
    files = sorted(file.sha256 for file in base.files())
    build_dir = BuildDir(base.index, f"compact-{content_hash([base.name, files, str(faiss().__version__)])[:16]}")
    spec, _ = build_dir.begin(dict[str, Any], lambda: {"base": base.name, "bounds": list_ranges_of(base)})
    bounds = spec["bounds"]
    done = StageSequence(build_dir, runner, progress).run("compact", len(bounds))
    version = replace(
        base,
        name="",
        groups=(
            tuple(
                ListsFile.of(sidecar.files["lists"], first=first, last=last)
                for sidecar, (first, last) in zip(done, bounds, strict=True)
            ),
        ),
        notes={**base.notes, "dropped": base.deleted, "merged_ids": base.next_id},
    )
    published = swap_version(base, version, {"imbalance_factor": imbalance(version)})
    return Compaction(version=published, groups=len(base.groups), dropped=dropped, fresh=True)


def list_ranges_of(version: Version) -> list[tuple[int, int]]:
    """Ranges of lists, each of about `RANGE_BYTES`, so that one of them is little memory; at least one per piece."""
    sizes = list_sizes(version)
    entry = int(read_lists(version.groups[0][0].check(version.index), mapped=True).code_size) + 8
    target = max(1.0, min(RANGE_BYTES, entry * version.next_id / max(1, version.plan.indices)))
    bounds, first, held = [], 0, 0.0
    for number, size in enumerate(entry * sizes):
        if number > first and held + size > target:
            bounds.append((first, number))
            first, held = number, 0.0
        held += float(size)
    return [*bounds, (first, len(sizes))]
