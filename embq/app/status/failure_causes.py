"""Failures of a run by cause, with the advice for each, for `embq failures` and the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from embq.core.errors import command_line
from embq.core.redaction import printable
from embq.core.units import DAMAGED_REST, Unit
from embq.core.wire import Count, UnitId, convert

if TYPE_CHECKING:
    from embq.core.storage.paths import Place

EXAMPLES = 3
"""Examples of each group."""
HOPELESS = 10
"""Failures of one code, and no row beside them, from which a cause of all of them is concluded."""


REMEDIES = {
    "bad_result": "use the same version of embq everywhere",
    "chunk_too_long": "larger --chunk-tokens, in a new run of these texts",
    "crash": "look at the log of the workers and at memory",
    "lost_result": "check the shared storage",
    "beyond_float16": "--dtype float32 holds larger values, --normalize makes them small: a new run of these samples",
    "non_finite": "look at the model: it gives no finite vector in fp32 either",
    "out_of_memory": "a device with more memory, or smaller --chunk-tokens in a new run",
    "outside_root": "put the files into the folder of the input",
    "source_denied": "give the worker the right to read them",
    "source_missing": "put them back",
    "source_unreadable": "check the disk or share",
    "storage_missing": "install what the message names",
    "too_many_chunks": "larger --chunk-tokens, in a new run of these texts",
    "unknown_kind": "update the workers",
    "wrong_count": "use the same version of embq everywhere",
    "wrong_model": "use the same model files everywhere",
    "wrong_schema": "use the same version of embq everywhere",
    "wrong_version": "use the same version of embq everywhere",
    "wrong_unit": "use the same version of embq everywhere",
}
"""Failure code -> what to do before a retry, if that is not fixing the samples themselves."""

FINAL = frozenset({"beyond_float16", "chunk_too_long", "non_finite", "too_many_chunks"})
"""Codes that a retry in the same run gives again."""


@dataclass(slots=True)
class Group:
    """The failures of one code; whole units apart from samples.

    Attributes:
        samples: those of shards that failed, as far as files beside the shards tell; 0 for none.
        examples: the first ones, as rows of the failures; of a whole unit the key is "" and the ordinal None.
    """

    code: str
    whole_unit: bool
    count: int = 0
    samples: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


class Example(TypedDict):
    """A failure of a group, as JSON has it."""

    key: str
    ordinal: Count | None
    unit: UnitId
    source: str
    message: str
    attempt: int


def grouped(root: Place) -> list[Group]:
    """The committed failures by code, largest group first; raises as `standing_failures` does."""
    import pyarrow.compute as pc

    from embq.core.run.standing_failures import missing_samples, standing_failures

    groups: dict[tuple[str, bool], Group] = {}
    for table in standing_failures(root):
        marked = table.append_column("whole", pc.is_null(table["ordinal"]))
        counts = marked.group_by(["code", "whole"]).aggregate([([], "count_all")])
        for row in counts.to_pylist():
            kind = (row["code"], row["whole"])
            group = groups.setdefault(kind, Group(*kind))
            group.count += row["count_all"]
            of_shards = row["whole"] or row["code"] == DAMAGED_REST
            if of_shards or len(group.examples) < EXAMPLES:
                same = pc.and_(pc.equal(marked["code"], row["code"]), pc.equal(marked["whole"], row["whole"]))
                mine = marked.filter(same)
                group.samples += missing_samples(mine) if of_shards else 0
                group.examples += mine.slice(0, EXAMPLES - len(group.examples)).to_pylist()
    return sorted(groups.values(), key=lambda group: (-group.count, group.code, group.whole_unit))


def only_cause(root: Place) -> str:
    """The code of all committed failures of a run, if it is one and there are `HOPELESS` samples of it; else ""."""
    match grouped(root):
        case [Group(whole_unit=False) as group] if group.count >= HOPELESS:
            return group.code
    return ""


def described(root: Place, groups: list[Group]) -> list[dict[str, Any]]:
    """The groups as JSON-ready values, with the source of each example from the manifest."""
    from embq.core.run.layout import Layout
    from embq.core.run.manifest import Manifest

    if not groups:
        return []
    manifest = Manifest(Layout(root))
    return [
        {
            "code": group.code,
            "count": group.count,
            "whole_unit": group.whole_unit,
            "samples": group.samples or None,
            "examples": [_example(row, manifest.unit(row["u"])) for row in group.examples],
            "next": next_step(group.code, root),
        }
        for group in groups
    ]


def _example(row: Mapping[str, Any], unit: Unit) -> Example:
    """A row of the failures as an example. The author of a folder decides what its file holds: MalformedError."""
    fields = {name: row[name] for name in ("key", "ordinal", "message", "attempt")}
    return convert(Example, {**fields, "unit": unit.unit_id, "source": unit.source}, what="failure in the folder")


def next_step(code: str, root: Place) -> str:
    """The advice to a user for failures of a code."""
    remedy = REMEDIES.get(code, "mend them in their place")
    return remedy if code in FINAL else f"{remedy}, then: {command_line('retry', root, '--code', code)}"


def cause_lines(group: dict[str, Any], width: int = 0) -> list[str]:
    """A group of `described` for people: count, code and an example; its message; the advice.

    Args:
        width: columns of the code.
    """
    what = ("unit" if group["whole_unit"] else "sample") + ("s" if group["count"] > 1 else "")
    example = group["examples"][0]
    at = example["source"] if group["whole_unit"] else f"{example['key']} in {example['source']}"
    samples = f"at least {group['samples']:,} samples, " if group["samples"] else ""
    tries = f" (attempt {example['attempt']})" if example["attempt"] > 1 else ""
    return [
        f"{group['count']:>12,} {what:<7}  {printable(group['code']):<{width}}  {samples}such as {printable(at)}",
        f"{'':>22}{printable(example['message'])}{tries}",
        f"{'':>22}next: {printable(group['next'])}",
    ]
