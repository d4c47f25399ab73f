"""Input files that cannot be used: failure codes, and the unit that stands for such a file in a manifest."""

from __future__ import annotations

import signal
from dataclasses import replace

from embq.core.errors import SourceError
from embq.core.service.log import Events
from embq.core.units import Unit
from embq.sources.access.files import stat_file

log = Events("sources")

DIED = "reader_died"
"""Code of a file that ends the library which parses it."""

UNREADABLE_CODES = (DIED, "too_large")
"""Codes of files that no worker should open. Their unit carries the code as an option."""

COLUMN_CODES = ("missing_column", "ambiguous_column", "wrong_column_type")
"""Codes of files whose columns do not fit the reader options."""

COMPRESSION_CODES = ("source_truncated", "source_damaged", "unsupported_compression", "too_large")
"""Codes of compressed files that cannot be read to their end."""

UNUSABLE_CODES = (*COLUMN_CODES, "table_damaged", DIED, *COMPRESSION_CODES)
"""Codes that fail the units of one file and leave all other inputs alone."""


def note_unusable(path: str, error: SourceError) -> None:
    """Log an error of planning that fails the units of one file; raise any other."""
    if error.code not in UNUSABLE_CODES:
        raise error
    log.warning("table_unusable", path=path, code=error.code, why=error.message)


def failing_unit(unit: Unit, error: SourceError) -> Unit:
    """The only unit of a file whose planning ended with `error`; it fails with that code, or when it is read.

    Raises `error` as `note_unusable` does.
    """
    note_unusable(unit.source, error)
    if not unit.etag:
        unit = replace(unit, etag=stat_file(unit.source).version)
    if error.code not in UNREADABLE_CODES:
        return unit
    return replace(unit, options=tuple(sorted((*unit.options, (error.code, "while it was planned")))))


def may_be_opened(unit: Unit) -> bool:
    """False for the unit of a file that no worker should open, as `failing_unit` marks it."""
    return not set(UNREADABLE_CODES) & {name for name, _ in unit.options}


def refuse_unreadable(unit: Unit) -> None:
    """Raise SourceError for a unit that `failing_unit` marked."""
    named = dict(unit.options)
    if DIED in named:
        raise died(unit)
    if "too_large" in named:
        raise SourceError(
            f"{unit.source}: when the run was planned, it was larger than what a reader takes",
            code="too_large",
            next_step="split it into smaller files",
        )


def died(unit: Unit, status: int | None = None) -> SourceError:
    """The error for a file that ended its reader process.

    Args:
        status: exit status of the process; None if it happened while the run was planned.
    """
    if status is None:
        how = "when the run was planned, it ended the library that reads it"
    elif status == -signal.SIGXCPU:
        how = "the library that reads it comes to no end"
    else:
        how = f"it ends the library that reads it ({signal.Signals(-status).name})"
    return SourceError(
        f"{unit.source}: is damaged: {how}",
        code="reader_died",
        next_step="copy or write the file again",
        transient=status == -signal.SIGKILL,  # by a person, or by the system for want of memory
    )


def readable_now(unit: Unit) -> SourceError:
    """The error for a file that could not be planned and can be read now: its rows are not in the manifest."""
    return SourceError(
        f"{unit.source}: could not be read when the run was planned, and can be now",
        code="source_changed",
        next_step="make a new run of it",
    )


def not_as_planned(unit: Unit, content: str) -> SourceError:
    """Error of a slice that holds `content`, such as "3 lines", and was planned with something else."""
    return SourceError(
        f"{unit.source}: bytes {unit.start} to {unit.stop} hold {content} and not the planned {unit.samples}",
        code="source_changed",
        next_step="put the planned file back, or plan a new run",
    )
