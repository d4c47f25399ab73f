"""What a conversion is and became, in a file beside its shards: how another attempt knows what it may go on with."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from core.errors import InputError
from core.storage.durable import overwrite
from training.shards.account import RECORD
from training.shards.pattern import Pattern
from training.shards.pictures import LeftOut
from training.shards.plan import Plan

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A conversion.

    Attributes:
        digest: see `Plan.digest`.
        source: what was converted, as the user named it.
        seed: see `Layout`.
        samples_per_shard: see `Layout`.
        metadata: see `Layout`.
        shards: how many there are in the end.
        samples: in all of them.
        classes: how many; None without classes.
        left_out: pictures that became no samples.
        finished: whether all shards are there.
    """

    digest: str
    source: str
    seed: int | None
    samples_per_shard: int
    metadata: bool
    shards: int
    samples: int
    classes: int | None
    left_out: tuple[LeftOut, ...]
    finished: bool = False

    @staticmethod
    def of(plan: Plan, source: str) -> Record:
        """The record of a plan that is to be carried out."""
        layout, classes = plan.layout, plan.listing.classes
        return Record(
            digest=plan.digest(),
            source=source,
            seed=layout.seed,
            samples_per_shard=layout.samples_per_shard,
            metadata=layout.metadata,
            shards=plan.shards,
            samples=len(plan.order),
            classes=None if classes is None else len(classes),
            left_out=plan.listing.left_out,
        )

    def done(self) -> Record:
        """The same, finished."""
        return replace(self, finished=True)

    def write(self, path: Path) -> None:
        """Write it, durably."""
        shape = {"schema": SCHEMA, **asdict(self), "left_out": [one._asdict() for one in self.left_out]}
        data = json.dumps(shape, indent=1).encode() + b"\n"
        overwrite(path, data, temporary=path.with_name(f".{path.name}.{secrets.token_hex(4)}"))


def path_of(pattern: Pattern) -> Path:
    """Where the record of these shards stands."""
    return pattern.folder / (f"{pattern.stem}-{RECORD}" if pattern.stem else RECORD)


def require_same(plan: Plan, record: Record) -> bool:
    """Whether shards of just this conversion may be there already: another attempt of it was interrupted, or is done.

    Raises InputError where what is there is of another conversion, or nobody knows of which.
    """
    pattern = plan.layout.pattern
    there = pattern.there()
    before = _read(path_of(pattern))
    if before is None:
        if there:
            raise InputError(
                f"{pattern.folder / there[0]}: is there already, and no conversion is known that made it",
                code="other_conversion",
                next_step="name the shards otherwise, or write them into another folder",
            )
        return False
    if before.get("digest") != record.digest:
        raise InputError(
            f"{path_of(pattern)}: these shards are of another conversion: {_differences(before, record)}",
            code="other_conversion",
            next_step="name the shards otherwise, write them into another folder, or remove those and this file",
        )
    if strange := sorted(set(there) - plan.sizes().keys()):
        raise InputError(
            f"{pattern.folder / strange[0]}: is none of the {plan.shards:,} shards of this conversion",
            code="other_conversion",
            next_step="move it away, or name the shards otherwise",
        )
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise InputError(f"{path}: is not what embq wrote", next_step="remove it with the shards that belong to it")
    return said


def _differences(before: dict[str, Any], record: Record) -> str:
    now = asdict(record)
    names = ("seed", "samples_per_shard", "metadata", "samples", "classes")
    differ = [f"{name} was {before.get(name)} and is {now[name]}" for name in names if before.get(name) != now[name]]
    return ", ".join(differ) or "pictures have changed since"
