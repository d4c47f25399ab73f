"""The samples that a retry does again, out of all that its source holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.errors import SourceError
from core.units import Retry, Sample, Unit, key_digest
from sources.base import Moved, Source
from sources.files import FilesSource


def read_wanted(source: Source, unit: Unit, moved: Moved) -> Iterator[Sample]:
    """The unit's samples, or those of them that it does again, with their ordinals in the unit planned first.

    Raises SourceError `source_changed`, at the end, where the source holds other samples than it did: more, fewer, or
    others in their places. Else as `Source.read` does.
    """
    retry, wanted = unit.retry, unit.wanted
    if retry is None or wanted is None:
        return source.read(unit, moved)
    if unit.kind == FilesSource.kind:  # which names each file, those that are wanted alone
        return _numbered(source.read(unit, moved), wanted)
    return _picked(source.read(unit, moved), unit, retry, wanted)


def _numbered(samples: Iterator[Sample], wanted: list[int]) -> Iterator[Sample]:
    for sample, ordinal in zip(samples, wanted, strict=True):
        yield replace(sample, ordinal=ordinal)


def _picked(samples: Iterator[Sample], unit: Unit, retry: Retry, wanted: list[int]) -> Iterator[Sample]:
    chosen = frozenset(wanted)
    keys: list[str] = []
    count = 0
    for count, sample in enumerate(samples, start=1):  # noqa: B007 - it is the number of samples in the end
        if sample.ordinal in chosen:
            keys.append(sample.key)
            yield sample
    planned = unit.samples if unit.samples is not None else retry.samples
    if planned is not None and count != planned:
        raise _changed(unit, f"it holds {count} samples, and held {planned}")
    if len(keys) != len(wanted) or (retry.keys and key_digest(keys) != retry.keys):
        raise _changed(unit, "samples that failed have other keys, or stand in other places")


def _changed(unit: Unit, why: str) -> SourceError:
    return SourceError(
        f"{unit.source}: {why}: it was not mended but changed",
        code="source_changed",
        next_step="mend it so that each sample keeps its key and its place, or make a new run of it",
    )
