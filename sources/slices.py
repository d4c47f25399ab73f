"""Cutting a text file of any size at line borders, and reading a cut's lines, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.errors import InputError, SourceError
from core.service.log import Events
from core.units import Unit
from sources.compressed import DAMAGE_CODES
from sources.inspection import UNREADABLE_CODES, marked, refuse_marked
from sources.storage import SAMPLE_MAX_BYTES, stat_file
from sources.text_files import Text, damage_of, open_planned, whole_first

log = Events("sources")

_BLOCK = 1 << 18
"""Fits the second-level cache, where counting line ends is fastest."""
_STRIDE = 1 << 11


def split_lines(unit: Unit, most: int, most_bytes: int = 0) -> Iterator[Unit]:
    """`unit`, which names kind, source and options, cut into units of `most` lines each. The last may have fewer, and
    so may one that reaches `most_bytes` before (0: none does).

    A compressed file that is damaged gives one unit without `samples`, which fails.

    Raises InputError where the file is missing, empty, or changes while it is being planned.
    """
    path = unit.source
    status = stat_file(path)
    first = 0
    planned = replace(unit, stop=status.size, etag=status.version)
    try:
        with open_planned(planned) as (planned, file):
            for start, stop, lines in whole_first(planned, _cuts(file, most, most_bytes)):
                yield replace(planned, start=start, stop=stop, first=first, samples=lines)
                first += lines
    except SourceError as error:
        if error.code in DAMAGE_CODES:
            log.warning("table_unusable", path=path, code=error.code, why=error.message)
            failing = replace(planned, start=0, stop=0)
            yield marked(failing, error.code) if error.code in UNREADABLE_CODES else failing
            return
        if error.code != "source_changed":
            raise
        raise InputError(
            f"{path}: was written to while it was being planned", next_step="plan it when it is complete"
        ) from error
    if first == 0:
        raise InputError(f"{path}: is empty", code="empty_input", next_step="leave it out")


def _cuts(file: Text, most: int, most_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, lines) of each cut. A last line without a line end counts; nothing behind a line end does not."""
    start = lines = offset = 0
    block = b"\n"
    while fresh := file.read(_BLOCK):
        block = fresh
        ends = block.count(b"\n")
        at = 0
        while True:
            behind = _after_lines(block, at, most - lines) if lines + ends >= most else 0
            if most_bytes:
                full = block.find(b"\n", max(at, start + most_bytes - offset - 1)) + 1
                behind = min(full or behind, behind or full)
            if not behind:
                break
            passed = block.count(b"\n", at, behind)
            ends -= passed
            yield start, offset + behind, lines + passed
            start, lines, at = offset + behind, 0, behind
        lines += ends
        offset += len(block)
    if start < offset:
        yield start, offset, lines + (not block.endswith(b"\n"))


def _after_lines(block: bytes, at: int, lines: int) -> int:
    """The offset behind the next `lines` line ends of `block`, which has them."""
    # Counting passes a line end seven times faster than finding it does.
    while (passed := block.count(b"\n", at, at + _STRIDE)) < lines:
        lines -= passed
        at += _STRIDE
    for _ in range(lines):
        at = block.find(b"\n", at) + 1
    return at


def read_lines(file: Text, unit: Unit) -> Iterator[bytes | None]:
    """The unit's lines without their ends (LF or CRLF); None for a line above `SAMPLE_MAX_BYTES`.

    Raises SourceError `source_changed` where the slice does not hold the lines that were planned, and what is wrong
    with a file that was damaged when it was planned.
    """
    refuse_marked(unit)
    if unit.samples is None:
        raise damage_of(file, unit)
    file.seek(unit.start)
    left = unit.stop - unit.start
    count = 0
    while left > 0:
        line = file.readline(min(left, SAMPLE_MAX_BYTES + 1))
        if not line:
            break
        left -= len(line)
        count += 1
        if len(line) > SAMPLE_MAX_BYTES:
            left -= _skip_line(file, line, left)
            yield None
        else:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
    if left or count != unit.samples:
        raise SourceError(
            f"{unit.source}: bytes {unit.start} to {unit.stop} hold {count} lines and not the planned {unit.samples}",
            code="source_changed",
            next_step="put the planned file back, or plan a new run",
        )


def _skip_line(file: Text, line: bytes, left: int) -> int:
    """Read to the end of a line that is too long without keeping it; the number of bytes skipped."""
    skipped = 0
    while not line.endswith(b"\n") and skipped < left:
        line = file.readline(min(left - skipped, 1 << 20))
        if not line:
            break
        skipped += len(line)
    return skipped
