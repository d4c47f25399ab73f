"""Samples of a unit as workers read them: within the allowed roots, bounded, narrowed to what a retry repeats."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from sys import getsizeof

from embq.core.errors import SourceError
from embq.core.process.limits import unit_bytes
from embq.core.storage.paths import is_url
from embq.core.units import Retry, Sample, Unit, key_digest
from embq.sources.access import urls
from embq.sources.access.files import source_errors
from embq.sources.access.urls import check_source
from embq.sources.damaged import rest
from embq.sources.interface import Moved, unwatched
from embq.sources.kinds import is_guarded, source_for
from embq.sources.partitions import add_partition, merged, partition_of
from embq.sources.reader_process import client
from embq.sources.rows import within, without_images, without_texts
from embq.sources.unusable import may_be_opened

METADATA_CHARS = 1_000_000
"""Most metadata that a look at one unit returns."""


def read(
    unit: Unit, roots: Sequence[str], *, on_progress: Moved = unwatched, images: bool = True, texts: bool = True
) -> Iterator[Sample]:
    """The samples of a unit that came over the network; of a retry, those that it repeats, with their first ordinals.

    Tables are read in a process of their own, under a limit of memory: see `embq.sources.reader_process`.

    Args:
        unit: what to read.
        roots: the folders and URLs that units may lie in, links resolved; empty allows all.
        on_progress: called whenever bytes have come in.
        images: False leaves out images that are files of their own, which are neither read nor fetched.
        texts: False if texts are not embedded; a caption that cannot be read is then `unread`, not an error.

    Raises SourceError `shard_scheme_denied`, `source_denied` or `unknown_kind` at once, later what the source raises,
    and `too_large` if the texts of the unit are more than a unit may have.
    """
    require_allowed(unit.source, roots)
    source_for(unit.kind)
    if not images:
        unit = without_images(unit)
    if not texts:
        unit = without_texts(unit)
    samples = client.read(unit, roots, on_progress) if is_guarded(unit.kind) else read_here(unit, roots, on_progress)
    return _bounded(unit, samples)


def start_reader(unit: Unit) -> None:
    """Start the reader process that `read` takes for the unit, if it takes one; ConfigError if none can be started."""
    if is_guarded(unit.kind):
        client.start(unit)


def require_allowed(source: str, roots: Sequence[str]) -> None:
    """Raise SourceError `shard_scheme_denied` or `source_denied` for a source that may not be read; see `read`."""
    check_source(source)
    if not is_allowed(source, roots):
        raise SourceError(
            f"{source}: outside of what the worker on {socket.gethostname()} may read ({', '.join(roots)})",
            code="source_denied",
            next_step="start that worker with the input's folder in EMBQ_ROOTS, or move the input; then embq retry",
        )


def read_here(
    unit: Unit, roots: Sequence[str], on_progress: Moved = unwatched, *, only: int | None = None
) -> Iterator[Sample]:
    """The result of `read`, in this process whatever the kind; nothing is checked before.

    Args:
        only: ordinal of the sample that is wanted. Of kinds that can read it by itself, it comes alone, with the
            ordinal 0; of others all samples of the original unit come.
    """
    if only is not None:
        unit = source_for(unit.kind).unit_of_sample(replace(unit, retry=None), only)
    samples = source_for(unit.kind).read(within(unit, roots) if roots else unit, on_progress)
    if partition_of(unit):
        samples = add_partition(samples, unit)
    if unit.retry is not None and unit.retry.is_rest:
        return rest(samples, unit, unit.retry)
    if unit.retry is None or unit.selected is None:
        return samples
    if unit.kind == "files":  # it names each file, those that are repeated alone
        return _numbered(samples, unit.selected)
    return _repeated(samples, unit, unit.retry, unit.selected)


def may_have_metadata(unit: Unit) -> bool:
    """True if a look at a unit may tell what metadata its samples have; cheap."""
    with suppress(SourceError):  # of an unknown kind
        return may_be_opened(unit) and (bool(partition_of(unit)) or source_for(unit.kind).may_have_metadata(unit))
    return False


def first_metadata(unit: Unit, most: int, *, wait_s: float) -> list[str]:
    """Metadata of the unit's first `most` samples, or of those that came within `wait_s`.

    Formats whose parser can crash, and files behind URLs, which may keep silent, are looked at by the reader process.

    Raises SourceError as `read` does, and `reader_died` if the reader process sent no answer within `wait_s`.
    """
    if is_guarded(unit.kind) or is_url(unit.source):
        return client.first_metadata(unit, most, wait_s=wait_s)
    return metadata_here(unit, most, wait_s=wait_s)


def metadata_here(unit: Unit, most: int, *, wait_s: float = float("inf")) -> list[str]:
    """The result of `first_metadata`, in this process whatever the kind, up to `METADATA_CHARS`."""
    deadline = time.monotonic() + wait_s
    texts: list[str] = []
    chars = 0
    values = partition_of(unit)
    with source_errors(unit.source):
        for text in source_for(unit.kind).first_metadata(unit, most):
            chars += len(text)
            if chars > METADATA_CHARS:
                break
            texts.append(merged(values, text) if values else text)
            if time.monotonic() > deadline:
                break
    return texts or ([merged(values, None)] if values else [])


def fetchable(unit: Unit, roots: Sequence[str]) -> bool:
    """True if the unit is one whole file behind a URL that may be read, so that it can be fetched before its turn.

    Args:
        roots: as for `read`.
    """
    if unit.kind != "tar" or not is_url(unit.source):
        return False
    try:
        check_source(unit.source)
        return is_allowed(unit.source, roots)
    except SourceError:  # reading it raises the same
        return False


def is_here(unit: Unit, roots: Sequence[str]) -> bool:
    """True if this machine can read the unit: its path exists, or it is a URL, within `roots`.

    Nothing is read, and of a folder the first file stands for all. A source that is no path counts as here, so that
    reading it raises the error.

    Args:
        roots: as for `read`.
    """
    try:
        check_source(unit.source)
        if not is_allowed(unit.source, roots):
            return False
    except SourceError:
        return True
    if is_url(unit.source):
        return True
    first = unit.items[0][0] if unit.kind == "files" and unit.items else ""
    return os.path.exists(os.path.join(unit.source, first) if first else unit.source)


def _bounded(unit: Unit, samples: Iterator[Sample]) -> Iterator[Sample]:
    """The samples; SourceError `too_large` if their texts together are more than `unit_bytes`."""
    remaining = most = unit_bytes()
    try:
        for sample in samples:
            if sample.text is not None:
                remaining -= getsizeof(sample.text)
            if sample.metadata is not None:
                remaining -= getsizeof(sample.metadata)
            if remaining < 0:
                raise SourceError(
                    f"{unit.source}: texts and metadata of one unit take more than {most:,} bytes",
                    code="too_large",
                    next_step="plan it with a smaller --unit-size, or give the worker more memory",
                )
            yield sample
    finally:
        if isinstance(samples, Generator):  # ends a reader process that is left halfway
            samples.close()


def is_allowed(source: str, roots: Sequence[str]) -> bool:
    """Return whether a source lies in or below one of the roots, links resolved; empty roots allow all."""
    if is_url(source):
        return not roots or any(urls.is_inside(source, root) for root in roots)
    try:
        os.fsencode(source)
        real = os.path.realpath(source)
    except ValueError as error:  # a zero byte, or a character that no file name can have
        raise SourceError(f"{source!r}: not a path", code="source_missing") from error
    folders = [os.path.realpath(root) for root in roots if not is_url(root)]
    return not roots or any(os.path.commonpath([real, folder]) == folder for folder in folders)


# --- retries ---


def _numbered(samples: Iterator[Sample], ordinals: list[int]) -> Iterator[Sample]:
    for sample, ordinal in zip(samples, ordinals, strict=True):
        yield replace(sample, ordinal=ordinal)


def _repeated(samples: Iterator[Sample], unit: Unit, retry: Retry, ordinals: list[int]) -> Iterator[Sample]:
    """The samples that a retry repeats.

    Raises SourceError `source_changed`, at the end, where the source holds other samples than it did: more, fewer, or
    others in their places.
    """
    chosen = frozenset(ordinals)
    keys: list[str] = []
    count = 0
    for count, sample in enumerate(samples, start=1):  # noqa: B007 - it is the number of samples in the end
        if sample.ordinal in chosen:
            keys.append(sample.key)
            yield sample
    planned = unit.samples if unit.samples is not None else retry.samples
    if planned is not None and count != planned:
        raise _changed(unit, f"it holds {count} samples, and held {planned}")
    if len(keys) != len(ordinals) or (retry.keys and key_digest(keys) != retry.keys):
        raise _changed(unit, "samples that failed have other keys, or stand in other places")


def _changed(unit: Unit, why: str) -> SourceError:
    return SourceError(
        f"{unit.source}: {why}: it was not mended but changed",
        code="source_changed",
        next_step="mend it so that each sample keeps its key and its place, or make a new run of it",
    )
