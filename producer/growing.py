"""Writing to the manifest of a run: one plan at a time, and a further generation of it whole or not at all."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from core.errors import AwayError
from core.run.generations import PREFIX, Generation, append, leftovers
from core.run.layout import PLANNED, Layout
from core.run.manifest import ManifestSummary, SegmentWriter
from core.run.run_info import RunInfo
from core.storage.durable import drop, drop_in, names_in
from core.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan was made from, as a generation records it.

    Attributes:
        inputs: as the user gave them; () for retries.
        options: reader options and selection.
        version: embq version that planned.
    """

    inputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    version: str


@contextmanager
def alone(layout: Layout) -> Iterator[None]:
    """Nobody else plans, on this machine at least; unfinished files of plans that were killed go.

    Several machines may plan for one object store. There each plan's segments have names of their own, and the
    conditional create of run.json or of a generation's record decides whose are real.
    """
    if not isinstance(layout.root, Path):
        layout.make_own()  # another machine may have made the run
    with layout.open_plan_lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Until run.json stands there is no writer, and control.json is written by plans alone.
        planned = PLANNED if layout.run_json.exists() else (*PLANNED, "control.")
        for leftover in names_in(layout.temporary):
            if leftover.startswith(planned):
                drop_in(layout.temporary, leftover)
        yield


def grow(
    layout: Layout, there: RunInfo, asked: Asked, units: Iterable[Unit], *, check: Callable[[ManifestSummary], None]
) -> ManifestSummary:
    """Add units to a run as one more generation; none where there are none. Whoever calls it holds the lock.

    Args:
        there: the run as it is now.
        check: called when all units are written and before they are real. What it raises is raised, and nothing is
            added.
    """
    if isinstance(layout.root, Path):  # nobody else plans, so they are of plans that were killed
        _drop_unnamed(layout, there)
    number = len(there.added) + 1
    # A name of its own: no other plan can ever write to a segment that a generation names.
    segments = SegmentWriter(layout, f"{PREFIX}{number:04d}-{secrets.token_hex(4)}-")
    try:
        summary = segments.write(units)
        check(summary)
        if summary.units:
            generation = Generation(
                number=number,
                run=there.run,
                first=there.units,
                units=summary.units,
                samples=summary.samples if asked.inputs else 0,
                digest=summary.digest,
                segments=tuple(segments.names),
                inputs=asked.inputs,
                options=asked.options,
                version=asked.version,
                created=now(),
            )
            append(layout.manifest, generation, temporary=layout.temporary)
    except AwayError:
        raise  # the record may still come to be there; what is not named in the end, `embq gc` removes
    except BaseException:
        _drop_unnamed(layout, there, segments.prefix)
        raise
    return summary


def _drop_unnamed(layout: Layout, there: RunInfo, prefix: str = "") -> None:
    """Remove the segments that nothing names, of those whose names begin with `prefix`."""
    for leftover in leftovers(layout.manifest, there.segments):
        if leftover.name.startswith(prefix):
            drop(leftover)


def now() -> str:
    """UTC time for the record of a plan; information only."""
    return datetime.now(UTC).isoformat(timespec="seconds")
